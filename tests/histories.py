"""A small allocator that records itself, to make snapshots whose truth is known.

It follows native's published rules (sizes, segments, split, best fit, merge)
and writes entries and segments in the snapshot's format. What it measured of
itself along the way is what the tests compare with.
"""

from __future__ import annotations

import gzip
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from esper_alloc.replay.snapshot import SnapshotError, load_snapshot

MIB = 1 << 20


def up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


@dataclass
class Block:
    address: int
    size: int
    segment: Segment
    state: str = "inactive"
    requested: int = 0


@dataclass
class Segment:
    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    small: bool
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Usage:
    """Bytes now and at their most since `reset`."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def reset(self) -> None:
        self.peak = self.now


class Recorder:
    """One device. Entries before `cut()` are forgotten, as by a full ring."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.segments: list[Segment] = []
        self.entries: list[dict[str, Any]] = []
        self.next_address = 0x7F00_0000_0000 + device * (1 << 40)
        self.time = 1_000_000
        self.allocated, self.active, self.reserved = Usage(), Usage(), Usage()
        self.native_allocated, self.native_active = Usage(), Usage()

    def entry(self, action: str, address: int, size: int, stream: int) -> None:
        self.time += 7
        self.entries.append(
            {
                "action": action, "addr": address, "size": size, "stream": stream,
                "time_us": self.time, "frames": [],
            }
        )  # fmt: skip

    def note(self, action: str = "snapshot") -> None:
        """An entry that changes nothing."""
        self.time += 1
        self.entries.append({"action": action, "size": 0, "stream": 0, "time_us": self.time})

    def cut(self) -> None:
        """The recording begins here: all entries so far are lost."""
        self.entries.clear()
        for usage in self.usages():
            usage.reset()

    def usages(self) -> tuple[Usage, ...]:
        return (
            self.allocated, self.active, self.reserved, self.native_allocated, self.native_active,
        )  # fmt: skip

    def alloc(self, size: int, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> Block:
        wanted = max(512, up(size, 512))
        small = wanted <= MIB
        fitting = [
            block
            for segment in self.segments
            if (segment.stream, segment.pool, segment.small) == (stream, pool, small)
            for block in segment.blocks
            if block.state == "inactive" and block.size >= wanted
        ]
        block = min(fitting, key=lambda one: (one.size, one.address), default=None)
        if block is None:
            block = self.grow(wanted, stream, pool, small)
        rest = block.size - wanted
        if rest >= 512 if small else rest > MIB:
            blocks = block.segment.blocks
            split = Block(block.address + wanted, rest, block.segment)
            blocks.insert(blocks.index(block) + 1, split)
            block.size = wanted
        block.state, block.requested = "active_allocated", size
        self.entry("alloc", block.address, size, stream)
        for usage in (self.allocated, self.active):
            usage.add(up(size, 512))
        for usage in (self.native_allocated, self.native_active):
            usage.add(block.size)
        return block

    def grow(self, wanted: int, stream: int, pool: tuple[int, int], small: bool) -> Block:
        size = 2 * MIB if small else 20 * MIB if wanted < 10 * MIB else up(wanted, 2 * MIB)
        segment = Segment(self.next_address, size, stream, pool, small)
        # Touching the next one: blocks must not merge across.
        self.next_address += size
        segment.blocks.append(Block(segment.address, size, segment))
        self.segments.append(segment)
        self.entry("segment_alloc", segment.address, size, stream)
        self.reserved.add(size)
        return segment.blocks[0]

    def request(self, block: Block) -> None:
        block.state = "active_pending_free"
        self.entry("free_requested", block.address, block.requested, block.segment.stream)
        self.allocated.add(-up(block.requested, 512))
        self.native_allocated.add(-block.size)

    def complete(self, block: Block) -> None:
        self.entry("free_completed", block.address, block.requested, block.segment.stream)
        self.active.add(-up(block.requested, 512))
        self.native_active.add(-block.size)
        block.state = "inactive"
        blocks = block.segment.blocks
        at = blocks.index(block)
        for neighbour in (at, at - 1):
            if 0 <= neighbour < len(blocks) - 1:
                left, right = blocks[neighbour], blocks[neighbour + 1]
                if left.state == right.state == "inactive":
                    left.size += right.size
                    del blocks[neighbour + 1]

    def free(self, block: Block) -> None:
        self.request(block)
        self.complete(block)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            if [block.state for block in segment.blocks] == ["inactive"]:
                self.segments.remove(segment)
                self.entry("segment_free", segment.address, segment.size, segment.stream)
                self.reserved.add(-segment.size)

    def end_segments(self) -> list[dict[str, Any]]:
        return [
            {
                "device": self.device,
                "address": segment.address,
                "total_size": segment.size,
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": False,
                "frames": [],
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested,
                        "state": block.state,
                        "frames": [],
                    }
                    for block in segment.blocks
                ],
            }
            for segment in sorted(self.segments, key=lambda one: one.address)
        ]


def snapshot_of(*recorders: Recorder) -> dict[str, Any]:
    devices = max(recorder.device for recorder in recorders) + 1
    traces: list[list[Any]] = [[] for _ in range(devices)]
    for recorder in recorders:
        traces[recorder.device] = recorder.entries
    return {
        "segments": [one for recorder in recorders for one in recorder.end_segments()],
        "device_traces": traces,
        "allocator_settings": {"max_split_size": -1, "expandable_segments": False},
        "external_annotations": [],
    }


def write(path: Path, snapshot: Any, compressed: bool = False) -> str:
    data = pickle.dumps(snapshot)
    path.write_bytes(gzip.compress(data) if compressed else data)
    return str(path)


def refusal(path: Path | str, content: bytes | None = None, load: Any = load_snapshot) -> str:
    """The one line that a file, of this content, is refused with, behind its name."""
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")
