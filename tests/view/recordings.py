"""Files of the black box, written in Python (csrc/black_box/format.h)."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from esper_alloc.recorder import reading as box
from esper_alloc.replay.reader import ACTIONS
from esper_alloc.replay.replay import load

MIB = 2**20
ONE_WORD = {box.FREE, box.PENDING, box.AVAILABLE}
TIME = 12
#: Nanoseconds of a tick, and of the time of day when the recording begins.
TICK, BEGIN = 40, 1_700_000_000 * 10**9


class Writer:
    """Events in their order; each `step` ticks after the one before."""

    def __init__(self, step: int = 1000) -> None:
        self.step, self.now = step, 0
        self.chunks: list[tuple[int, int, list[int]]] = []  # ticks, thread, words
        self.sites: list[str] = []
        self.lanes: list[tuple[int, int, tuple[int, int], int]] = [(0, 0, (0, 0), 0)]
        self.segments: list[tuple[int, int, int, int, int, int, int]] = []
        self.why, self.info = "at exit", {}
        self.complete = 0  # ticks

    def site(self, *frames: str) -> int:
        text = "\n".join(frames)
        if text not in self.sites:
            self.sites.append(text)
        return self.sites.index(text) + 1

    def lane(self, device: int = 0, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> int:
        """The number of a lane, without segments at first."""
        for number, one in enumerate(self.lanes[1:], 1):
            if one[:3] == (device, stream, pool):
                return number
        self.lanes.append((device, stream, pool, 0))
        return len(self.lanes) - 1

    def event(
        self, kind: int, address: int, size: int = 0, lane: int = 1, site: int = 0, thread: int = 1
    ) -> None:
        self.now += self.step
        words = self.chunks[-1][2] if self.chunks and self.chunks[-1][1] == thread else None
        if words is None:
            words = []
            self.chunks.append((self.now, thread, words))
        words.append(TIME | self.now << 4)
        words.append(kind | address >> 9 << 24)
        if kind not in ONE_WORD:
            words.append(size | lane << 36 | site << 46)

    def write(self, path: Path) -> Path:
        def section(name: bytes, count: int, data: bytes) -> bytes:
            return struct.pack("<4sIQ", name, count, len(data)) + data + bytes(-len(data) % 8)

        end = self.now + self.step
        sites = [one.encode() for one in self.sites]
        out = struct.pack(
            "<8sIIQQQQQQQ64s", b"ESPRBOX1", 1, 136, 0, BEGIN, end, BEGIN + end * TICK, self.complete, 0,
            4242, self.why.encode(),
        )  # fmt: skip
        out += section(b"INFO", 1, json.dumps(self.info).encode())
        lanes = [struct.pack("<i4xQQQq", d, s, *pool, before) for d, s, pool, before in self.lanes]
        out += section(b"LANE", len(lanes), b"".join(lanes))
        out += section(b"SITE", len(sites), b"".join(struct.pack("<I", len(s)) + s for s in sites))
        for ticks, thread, words in self.chunks:
            head = struct.pack("<QII", ticks, thread, len(words))
            out += section(b"EVNT", 1, head + struct.pack(f"<{len(words)}Q", *words))
        if self.segments:
            rows = [struct.pack("<QQiIQQQ", *one) for one in self.segments]
            out += section(b"SEGM", len(rows), b"".join(rows))
        path.write_bytes(out + section(b"END ", 0, b""))
        return path


class Heap:
    """A first-fit heap over a Writer, whose segment grows as needed."""

    def __init__(self, writer: Writer, lane: int, base: int, page: int = 32 * MIB) -> None:
        self.writer, self.lane, self.base, self.page = writer, lane, base, page
        self.live: dict[int, int] = {}
        self.mapped = base

    def malloc(self, size: int, site: int = 0, thread: int = 1, lane: int | None = None) -> int:
        address = self.base
        for begin in sorted(self.live):
            if begin - address >= size:
                break
            address = begin + -(-self.live[begin] // 512) * 512
        while address + size > self.mapped:
            self.writer.event(box.SEGMENT_MAP, self.mapped, self.page, self.lane)
            self.mapped += self.page
        self.live[address] = size
        lane = self.lane if lane is None else lane
        self.writer.event(box.ALLOC, address, size, lane, site, thread)
        return address

    def free(self, address: int, thread: int = 1) -> None:
        self.writer.event(box.FREE, address, thread=thread)
        del self.live[address]

    def shrink(self) -> None:
        end = max((at + size for at, size in self.live.items()), default=self.base)
        while self.mapped - self.page >= end:
            self.mapped -= self.page
            self.writer.event(box.SEGMENT_UNMAP, self.mapped, self.page, self.lane)

    def segment(self) -> tuple[int, int, int, int, int, int, int]:
        device, stream, pool, _ = self.writer.lanes[self.lane]
        return (self.base, self.mapped - self.base, device, 3, stream, *pool)


TORCH = "/env/lib/python3.11/site-packages/torch"


def training(steps: int = 30, layers: int = 12, hostile: str = "") -> Writer:
    """A job that leaks into a list, is held back, waits for a copy, and runs out of memory."""
    w = Writer(step=200_000)
    heap = Heap(w, w.lane(), 0x7F0000000000)
    side = w.lane(stream=0x5A0)
    module = (f"{TORCH}/nn/modules/module.py:1773 (Module._wrapped_call_impl)",)
    main = ("/ada/train.py:88 (main)",)
    parameters = w.site(f"{TORCH}/nn/modules/linear.py:106 (Linear.__init__)",
                        "/ada/model.py:20 (Block.__init__)", *main)  # fmt: skip
    forward = [
        w.site(f"{TORCH}/nn/modules/linear.py:125 (Linear.forward)",
               f"/ada/{hostile}model.py:{40 + 2 * n} ({hostile}Block.forward)", *module, *main)
        for n in range(4)
    ]  # fmt: skip
    adam = w.site(f"{TORCH}/optim/adam.py:190 (Adam.step)", "/ada/train.py:61 (step)", *main)
    batch = w.site(f"{TORCH}/utils/data/_utils/pin_memory.py:60 (pin)",
                   "/ada/data.py:31 (Batches.__next__)", *main)  # fmt: skip
    leak = w.site("/ada/train.py:70 (log_loss)", *main)
    copy = w.site("/ada/data.py:44 (Batches.prefetch)", *main)
    for _ in range(layers):
        heap.malloc(24 * MIB, parameters)
    optimizer: list[int] = []
    for step in range(steps):
        inputs = heap.malloc(12 * MIB, batch)
        ahead = heap.malloc(20 * MIB, copy, lane=side)
        w.event(box.USE, ahead)
        kept = [heap.malloc((10 + 6 * (n % 4)) * MIB, forward[n % 4]) for n in range(2 * layers)]
        gradients = []
        for address in reversed(kept):
            if len(gradients) < layers:
                gradients.append(heap.malloc(24 * MIB, thread=2))
            heap.free(address, thread=2)
        if not optimizer:
            optimizer = [heap.malloc(24 * MIB, adam) for _ in range(2 * layers)]
        heap.malloc(7 * MIB + 100_000, leak)
        for address in gradients:
            heap.free(address)
        heap.free(inputs)
        size = heap.live[ahead]
        heap.free(ahead)
        w.event(box.PENDING, ahead)
        heap.live[ahead] = size  # nobody gets it
        if step % 7 == 6:
            w.now += (3000 + 500 * step) * 1000 // TICK
            w.event(box.HELD_BACK, (3000 + 500 * step) << 9, 20 * MIB, side)
        w.now += 500_000
        w.event(box.AVAILABLE, ahead)
        del heap.live[ahead]
        if step % 10 == 9:
            heap.shrink()
    for n in range(2 * layers):
        heap.malloc((10 + 6 * (n % 4)) * MIB, forward[n % 4])
    w.event(box.OOM, 100 * MIB, 640 * MIB)
    w.segments = [heap.segment()]
    w.why = "out of memory"
    w.info = {"torch": "2.11.0"}
    return w


def snapshot_like(file: Path) -> dict[str, Any]:
    """What PyTorch would have recorded of the history in a black box's file."""
    traces: list[list[Any]] = [[], []]
    segments = []
    for trace in load(file).traces:
        frames = [[re.fullmatch(r"(.*):(.*) \((.*)\)", one) for one in it] for it in trace.stacks]
        stacks = [
            [{"filename": m[1], "line": int(m[2]), "name": m[3]} for m in it] for it in frames
        ]
        names = "actions addresses sizes streams times places".split()
        for action, address, size, stream, time, place in zip(*(getattr(trace, n) for n in names)):
            traces[trace.device].append(
                {"action": list(ACTIONS)[action], "addr": address, "device_free": address, "size": size,
                 "stream": stream, "time_us": time, "frames": stacks[place]}
            )  # fmt: skip
        for _, start, end, pool, mapped, stream in trace.segments:
            blocks = [
                {"address": at, "size": size, "requested_size": requested, "frames": stacks[place],
                 "state": "active_pending_free" if pending else "active_allocated"}
                for at, size, requested, _, pending, place in trace.blocks if start <= at < end
            ]  # fmt: skip
            segments.append(
                {"device": trace.device, "address": start, "total_size": end - start, "stream": stream,
                 "segment_pool_id": pool, "is_expandable": mapped, "blocks": blocks}
            )  # fmt: skip
    return {"segments": segments, "device_traces": traces}
