"""Reads one snapshot file, as a script in a process of its own (``snapshot.py`` runs it):

    python -I -S reader.py LIMIT < FILE

A snapshot is a pickle, and even one that names no code can crash the interpreter, keep it inside a
C function for hours, or fill the memory. Here it can do no more than end this process, whose
memory the kernel limits to LIMIT bytes. The answer on stdout is marshalled: a string that says why
the file is refused, or :data:`Found`, whose numbers are all in their ranges. Imports the standard
library only.
"""

from __future__ import annotations

import ctypes
import gc
import gzip
import io
import marshal
import os
import pickle
import resource
import signal
import sys
from array import array
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, cast

# What an entry does to memory.
ALLOC, REQUEST, COMPLETE, GROW, SHRINK, NOTHING = range(6)

ACTIONS = {
    "alloc": ALLOC,
    "free_requested": REQUEST,
    "free_completed": COMPLETE,
    "segment_alloc": GROW,
    "segment_map": GROW,
    "segment_free": SHRINK,
    "segment_unmap": SHRINK,
    # These, the last ones, change nothing: a failed request took no memory.
    "oom": NOTHING,
    "snapshot": NOTHING,
    "user_defined": NOTHING,
    "annotate": NOTHING,  # newer than PyTorch 2.11
}
LIVE_STATE = "active_allocated"
PENDING_STATES = ("active_pending_free", "active_awaiting_free")  # new and old name

PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)

#: number, start, end, pool, whether it is of an expandable segment, stream.
Segment = tuple[int, int, int, PoolId, bool, int]
#: address, bytes, requested bytes, stream, whether its free is pending, and the index into the
#: stacks. In use at the end.
Block = tuple[int, int, int, int, bool, int]
#: Of each entry its position in ACTIONS (uint8), address and bytes (uint64; 0 for NOTHING),
#: stream and microseconds (int64), and the index into the stacks (uint32; 0: unknown). Of an "oom"
#: the device's free bytes stand for the address.
Columns = tuple[bytes, bytes, bytes, bytes, bytes, bytes]
#: Frames such as "model.py:12 (Model.forward)", the innermost first.
Stack = list[str]
#: expandable_segments, max_split_size, and the divisions of each power of two of MiB.
Options = tuple[bool | None, int | None, dict[int, int]]
#: The recording allocator's options, and for each device that has entries its number and these.
Found = tuple[Options, list[tuple[int, list[Segment], list[Block], Columns, list[Stack]]]]

_MAX_SIZE = 1 << 60
_MAX_ADDRESS = 1 << 63  # so the sizes of disjoint ranges add up to an int64
_MOST_DEVICES = 128  # PyTorch numbers devices in an int8
_MOST_FRAMES, _LONGEST_NAME = 64, 1000
_MAX_DIVIDED = 1 << 15  # the options name 1 MiB to 32 GiB
_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)

#: The most that the process that asked needs for an entry, segment or block. Bytes.
_BYTES_EACH = 1000

_GZIP_MAGIC = b"\x1f\x8b"
#: How other files begin that people have instead, and what they are.
_OTHERS = {
    b"PK": "a zip file: unpack it. If torch.save wrote it, it has tensors, not a snapshot",
    b"\xfd7zXZ": "an xz file: unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it first",
    b"BZh": "a bzip2 file: unpack it first",
    b"<": "a web page, such as a plot of a snapshot",
    b"{": "a JSON file, such as a trace of the profiler",
}
#: What torch.save wrote first before it wrote zip files.
_TORCH_SAVE = 0x1950A86A20F9469CFC6C
_PR_SET_PDEATHSIG = 1

REMEDY = "write the snapshot again with torch.cuda.memory._dump_snapshot()"
_PLAIN_ONLY = "and a memory snapshot contains only plain containers and scalars"
_NO_TRACE_REMEDY = (
    "call torch.cuda.memory._record_memory_history() before the job and _dump_snapshot() after it"
)


class Refusal(Exception):
    """The file is no snapshot that can be replayed; the message says why."""


def _not_snapshot(why: str) -> Refusal:
    return Refusal(f"not a memory snapshot: {why}; {REMEDY}")


# ---- loading it ---------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Builds containers and scalars; whatever has a name is refused, so nothing is called."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _not_snapshot(f"it asks for {_shown(f'{module}.{name}')}, {_PLAIN_ONLY}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _not_snapshot(f"it asks for an object outside the file, {_PLAIN_ONLY}")


def _load(file: io.BufferedReader) -> Any:
    """The pickled value; decompressed where the file is gzip, whatever its name."""
    head = file.peek(len(_GZIP_MAGIC))
    if not head:
        raise _not_snapshot("the file is empty")
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise _not_snapshot(f"it is {what}")
    source: BinaryIO = file
    if head.startswith(_GZIP_MAGIC):
        source = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 17))
    try:
        value = _Unpickler(source).load()
        source.read(1)  # at the end of gzip data this compares their checksum
        return value
    except (Refusal, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        why = " ".join(str(error).split())
        if isinstance(error, EOFError) or "truncated" in why or "exhausted" in why:
            raise _not_snapshot("truncated, as it ends before its pickle does") from None
        if not head.startswith(_GZIP_MAGIC) and head[:1] != pickle.PROTO:
            raise Refusal(f"neither a memory snapshot nor a black box's file; {REMEDY}") from None
        raise _not_snapshot(f"a damaged pickle ({why})") from None


# ---- taking from it what a replay needs ---------------------------------------


def _find(loaded: Any, limit: int) -> Found:
    if loaded == _TORCH_SAVE:
        raise _not_snapshot("it was written by torch.save")
    if not isinstance(loaded, dict):
        raise _not_snapshot(
            f"it holds a {type(loaded).__name__}, not a dict with 'segments' and 'device_traces'"
        )
    for key in ("segments", "device_traces"):
        if not isinstance(loaded.get(key), list):
            raise _not_snapshot(f"it has no list of {key!r}")
    segments, traces = loaded["segments"], loaded["device_traces"]
    if len(traces) > _MOST_DEVICES:
        raise _not_snapshot(f"it has {len(traces)} devices, and PyTorch {_MOST_DEVICES} at most")
    for device, entries in enumerate(traces):
        if not isinstance(entries, list):
            raise _not_snapshot(f"device_traces[{device}] is not a list")
    if not any(traces):
        raise Refusal(f"no trace in it: {_NO_TRACE_REMEDY}")
    count = sum(map(len, traces))
    devices = []
    for device, entries in enumerate(traces):
        if entries:
            stacks = _Stacks()
            ends, blocks = _read_segments(device, segments, stacks)
            count += len(ends) + len(blocks)
            if count * _BYTES_EACH > limit:
                raise MemoryError
            columns = _read_entries(device, entries, stacks)
            devices.append((device, ends, blocks, columns, stacks.found))
    return _read_options(loaded.get("allocator_settings")), devices


def _read_segments(
    device: int, segments: list[Any], stacks: _Stacks
) -> tuple[list[Segment], list[Block]]:
    found: list[Segment] = []
    blocks: list[Block] = []
    for number, segment in enumerate(segments):
        try:
            if _integer(segment.get("device", 0), _INT64) != device:
                continue
            start, size = segment["address"], segment["total_size"]
            _require_range(start, size)
            pool = _pool_id(segment.get("segment_pool_id", DEFAULT_POOL))
            mapped = bool(segment.get("is_expandable", False))
            stream = _integer(segment.get("stream", 0), _INT64)
            blocks += _read_blocks(start, start + size, stream, segment["blocks"], stacks)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refusal(
                f"device {device}, at the end: segment {number} is malformed: {_why(error)}"
            ) from None
        found.append((number, start, start + size, pool, mapped, stream))
    return found, blocks


def _read_blocks(
    start: int, end: int, stream: int, blocks: Any, stacks: _Stacks
) -> Iterator[Block]:
    address = start
    for block in blocks:
        size, state = block["size"], block["state"]
        address = block.get("address", address)  # older versions leave it out
        _require_range(address, size)
        if address < start or address + size > end:
            raise ValueError(f"its block at {address:#x} lies outside of it")
        if state == LIVE_STATE or state in PENDING_STATES:
            requested = _integer(block.get("requested_size", size), range(_MAX_SIZE + 1))
            place = stacks.number(block.get("frames"))
            yield address, size, requested or size, stream, state != LIVE_STATE, place
        address += size


class _Stacks:
    """Numbers for the stacks of entries, which share the lists that hold their frames."""

    def __init__(self) -> None:
        self.found: list[Stack] = [[]]
        self._by_list: dict[int, int] = {}
        self._by_text: dict[str, int] = {"": 0}

    def number(self, frames: Any) -> int:
        """0 for whatever has no frames of Python's."""
        if type(frames) is not list:
            return 0
        number = self._by_list.get(id(frames))
        if number is None:
            shown = [one for one in map(_frame, frames[:_MOST_FRAMES]) if one]
            number = self._by_text.setdefault("\n".join(shown), len(self.found))
            if number == len(self.found):
                self.found.append(shown)
            self._by_list[id(frames)] = number
        return number


def _frame(frame: Any) -> str:
    """Empty: it is none of Python's."""
    if type(frame) is not dict:
        return ""
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if type(file) is not str or type(line) is not int or type(name) is not str:
        return ""
    if line not in _INT64 or not file.endswith((".py", ">")):
        return ""
    return f"{file[-_LONGEST_NAME:]}:{line} ({name[:_LONGEST_NAME]})".replace("\n", " ")


def _read_entries(device: int, entries: list[Any], stacks: _Stacks) -> Columns:
    actions, addresses, sizes = bytearray(), array("Q"), array("Q")
    streams, times, places = array("q"), array("q"), array("I")
    positions = {name: position for position, name in enumerate(ACTIONS)}
    nothing = positions["oom"]  # and what follows it
    time = 0
    for number, entry in enumerate(entries):
        try:
            action = entry["action"]
            # A string only: hashing a tuple can take for ever.
            position = positions.get(action) if type(action) is str else None
            if position is None:
                raise Refusal(f"unknown action {_shown(action)}")
            if position >= nothing:
                address = size = stream = 0
                if position == nothing:
                    address, size = map(_bytes, (entry.get("device_free"), entry.get("size")))
                    stream = entry.get("stream", 0)
                    stream = stream if type(stream) is int and stream in _INT64 else 0
            else:
                address, size, stream = entry["addr"], entry["size"], entry.get("stream", 0)
                if (
                    type(address) is not int
                    or type(size) is not int
                    or not 0 < size <= _MAX_SIZE
                    or not 0 < address <= _MAX_ADDRESS - size
                ):
                    raise Refusal(f"{action} of {_shown(size)} bytes at {_shown(address)}")
                if type(stream) is not int or stream not in _INT64:
                    raise Refusal(f"{action} on stream {_shown(stream)}")
            time = entry.get("time_us", time)
            if type(time) is not int or time not in _INT64:
                raise Refusal(f"malformed: its time is {_shown(time)}")
        except Refusal as error:
            raise Refusal(f"device {device}, entry {number}: {error}") from None
        except (AttributeError, KeyError, TypeError) as error:
            raise Refusal(f"device {device}, entry {number}: malformed: {_why(error)}") from None
        actions.append(position)
        addresses.append(address)
        sizes.append(size)
        streams.append(stream)
        times.append(time)
        places.append(stacks.number(entry.get("frames")))
    return (
        bytes(actions),
        addresses.tobytes(),
        sizes.tobytes(),
        streams.tobytes(),
        times.tobytes(),
        places.tobytes(),
    )


def _bytes(value: Any) -> int:
    """0: it is no number of bytes."""
    return value if type(value) is int and 0 <= value <= _MAX_SIZE else 0


def _read_options(settings: Any) -> Options:
    """What cannot be understood counts as unknown."""
    given = settings if isinstance(settings, dict) else {}
    expandable = bool(given["expandable_segments"]) if "expandable_segments" in given else None
    limit = given.get("max_split_size")
    roundup = given.get("roundup_power2_divisions")
    try:
        divisions = {int(key): int(value) for key, value in (roundup or {}).items()}
    except (AttributeError, OverflowError, TypeError, ValueError):
        divisions = {}
    return (
        expandable,
        limit if type(limit) is int and 0 < limit <= _MAX_SIZE else None,
        {
            mib: count
            for mib, count in divisions.items()
            if 0 < mib <= _MAX_DIVIDED and 1 < count <= _MAX_SIZE
        },
    )


def _integer(value: Any, within: range) -> int:
    if type(value) is not int:
        raise ValueError(f"{_shown(value)} is not a number")
    if value not in within:
        raise ValueError(f"{_shown(value)} is out of range")
    return value


def _require_range(start: Any, size: Any) -> None:
    for value in (start, size):
        if type(value) is not int:
            raise ValueError(f"{_shown(value)} is not a number")
    if start <= 0 or not 0 < size <= min(_MAX_SIZE, _MAX_ADDRESS - start):
        raise ValueError(f"{_shown(size)} bytes at {_shown(start)}")


def _pool_id(value: Any) -> PoolId:
    first, second = value
    return _integer(first, _UINT64), _integer(second, _UINT64)


def _shown(value: Any) -> str:
    """A value of the file for a message. A container is not written out: it may hold
    another one again and again, and so be longer than any memory."""
    if isinstance(value, (int, float, str, bytes)) or value is None:
        try:
            return f"{value!r:.60}"
        except ValueError:  # Python does not print all the digits
            return "a huge number"
    return f"a {type(value).__name__}"


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


# ---- the process --------------------------------------------------------------


def _confine(limit: int) -> None:
    """Limits the memory, and ties this process to the one that asked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open("/proc/self/statm") as file:  # a sanitizer, say, has reserved much address space
        reserved = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or limit + reserved < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit + reserved, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> NoReturn:
    """Answers, and ends the process."""
    limit = int(sys.argv[1])
    _confine(limit)
    gc.disable()  # it would look again and again at what only grows
    too_large = marshal.dumps(
        f"loading it would take more than {limit / 2**30:.1f} GiB, three quarters of this "
        "machine's memory: unless it is damaged, record fewer entries (max_entries of "
        "torch.cuda.memory._record_memory_history())"
    )
    loaded: Any = None  # kept: to free it would only take time
    try:
        loaded = _load(cast(io.BufferedReader, sys.stdin.buffer))
        answer = marshal.dumps(_find(loaded, limit))
    except Refusal as error:
        answer = marshal.dumps(str(error))
    except MemoryError:
        answer = too_large
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
