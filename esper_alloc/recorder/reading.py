"""The files of a black box, read and checked (csrc/black_box/read.c).

csrc/black_box/format.h describes the format.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .. import _core
from .words import printable

#: The kinds of events (csrc/black_box/format.h).
ALLOC, FREE, PENDING, AVAILABLE, USE = 1, 2, 3, 4, 5
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM, HELD_BACK = 6, 7, 8, 9, 10, 11
_OF_MEMORY = {ALLOC, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP}

#: How such a file begins.
MAGIC = b"ESPRBOX1"


class BlackBoxError(Exception):
    """The file cannot be read; the message is one line that names it and says why."""


class Lane(NamedTuple):
    """A stream of a device; of segments, with their pool."""

    device: int
    stream: int
    pool: tuple[int, int]
    #: Bytes of its segments when the events begin; of a snapshot 0.
    before: int


class Segment(NamedTuple):
    """A segment as it was when the file was written. Bytes."""

    address: int
    size: int
    device: int
    mapped: bool
    large: bool
    stream: int
    pool: tuple[int, int]


class Block(NamedTuple):
    """A block that was in use when the file was written, or waited for marked uses. Bytes."""

    address: int
    size: int
    requested: int
    stream: int
    pending: bool


@dataclass(frozen=True)
class BlackBox:
    """What a file tells. Times are nanoseconds since 1970.

    path: for messages. why: why it was written. begin: when the recording began; the events may
    begin later, since old ones are overwritten. complete: from then on all is there; before, there
    is only what was still live then, and part of the rest. end: when it was written. lost: events
    that could not be recorded. sites: the place in the program for each number, a string for each
    frame, the innermost first, such as ``"model.py:12 (Model.forward)"``; number 0 is unknown.

    Events, by time; for each its kind, time, address and bytes (OOM: bytes free and asked for;
    HELD_BACK: 512 times the microseconds, and bytes asked for), the index into lanes, the site
    and the thread. An ALLOC is of memory that is not live, a FREE of memory that is. partner: for
    an ALLOC the index of its FREE, for a FREE, PENDING, AVAILABLE and USE that of the ALLOC; -1:
    none.

    is_snapshot: PyTorch wrote it, which records neither threads nor why the host waited. has_times:
    else event n stands at n seconds.
    """

    path: str
    why: str
    pid: int
    begin: int
    complete: int
    end: int
    lost: int
    info: dict[str, Any]
    lanes: list[Lane]
    sites: list[tuple[str, ...]]
    segments: list[Segment]
    blocks: list[Block]
    kinds: memoryview[int]
    times: memoryview[int]
    addresses: memoryview[int]
    sizes: memoryview[int]
    lane_numbers: memoryview[int]
    site_numbers: memoryview[int]
    threads: memoryview[int]
    partners: memoryview[int]
    is_snapshot: bool = False
    has_times: bool = True

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def devices(self) -> list[int]:
        """The devices that have events. That of lane 0 is -1: unknown."""
        numbers = set(self.lane_numbers.tolist())
        return sorted({self.lanes[number].device for number in numbers} - {-1})


def is_black_box(path: str | os.PathLike[str]) -> bool:
    """Whether the file begins as those of a black box do. Raises OSError, or BlackBoxError for a
    pipe: what is read of it here would be missing later."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        name = printable(os.fsdecode(path))
        raise BlackBoxError(f"{name}: is a pipe: save it to a file first")
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def load_black_box(path: str | os.PathLike[str]) -> BlackBox:
    """Reads the file of a black box.

    Raises:
        BlackBoxError: it cannot be read, is no such file, or is damaged.
    """
    name = printable(os.fsdecode(path))
    try:
        with open(path, "rb") as file:
            found = _core.black_box_read(file.read())
        info = json.loads(found["info"] or "{}")
        if not isinstance(info, dict):
            raise ValueError("it is damaged: its description is no JSON object")
    except OSError as error:
        raise BlackBoxError(f"{name}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise BlackBoxError(f"{name}: it is damaged: its description is too deep") from None
    except (ValueError, MemoryError) as error:
        why = str(error) or "there is not enough host memory for it"
        raise BlackBoxError(f"{name}: {why}") from None

    def column(key: str, code: str) -> memoryview[int]:
        return memoryview(found[key]).cast(code)  # type: ignore[call-overload, no-any-return]

    kinds, sizes = column("kind", "B"), column("size", "Q")
    if 0 in sizes:  # quick, unlike what follows
        for index, (kind, size) in enumerate(zip(kinds, sizes)):
            if not size and kind in _OF_MEMORY:
                raise BlackBoxError(f"{name}: it is damaged: event {index} is of 0 bytes")
    return BlackBox(
        path=name,
        why=found["why"],
        pid=found["pid"],
        begin=found["begin"],
        complete=found["complete"],
        end=found["end"],
        lost=found["lost"],
        info=info,
        lanes=[
            Lane(device, stream, (first, second), before)
            for device, stream, first, second, before in struct.iter_unpack(
                "<i4xQQQq", found["lanes"]
            )
        ],
        sites=[(), *_sites(found["sites"], found["site_count"])],
        segments=[
            Segment(address, size, device, bool(flags & 1), bool(flags & 2), stream, (one, two))
            for address, size, device, flags, stream, one, two in struct.iter_unpack(
                "<QQiIQQQ", found["segments"]
            )
        ],
        blocks=[
            Block(address, size, requested, stream, bool(pending))
            for address, size, requested, stream, pending in struct.iter_unpack(
                "<QQQQI4x", found["blocks"]
            )
        ],
        kinds=kinds,
        times=column("ns", "q"),
        addresses=column("address", "Q"),
        sizes=sizes,
        lane_numbers=column("lane", "H"),
        site_numbers=column("site", "I"),
        threads=column("thread", "I"),
        partners=column("partner", "q"),
    )


def _sites(data: bytes, count: int) -> list[tuple[str, ...]]:
    sites, at = [], 0
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        sites.append(tuple(data[at : at + length].decode(errors="replace").split("\n")))
        at += length
    return sites
