"""What happened on one device, rebuilt from a snapshot's entries and segments.

The entries are a ring: when it wrapped, its beginning is lost. But the state
at the end is known (the snapshot's segments), so walking back from it gives
the segments at the start; and an address that is freed without having been
allocated was live at the start, as is what the segments hold at the end
without any entry having named it.

Everything that can contradict is checked here and in pytorch_peaks.py, before
anything is replayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from .ranges import PoolId, Range, RangeError, Ranges
from .snapshot import Snapshot, SnapshotError

# What an entry does to memory.
ALLOC, REQUEST, COMPLETE, GROW, SHRINK, NOTHING = range(6)

_ACTIONS = {
    "alloc": ALLOC,
    "free_requested": REQUEST,
    "free_completed": COMPLETE,
    "segment_alloc": GROW,
    "segment_map": GROW,
    "segment_free": SHRINK,
    "segment_unmap": SHRINK,
    # These change nothing: a failed request took no memory.
    "oom": NOTHING,
    "snapshot": NOTHING,
    "user_defined": NOTHING,
    "annotate": NOTHING,  # what a live block is for; newer than PyTorch 2.11
}
# Of these a recording has some, if it has any of the others.
_BELONG_TOGETHER = {ALLOC: "alloc", REQUEST: "free_requested", COMPLETE: "free_completed"}
_MAPPED = ("segment_map", "segment_unmap")
_LIVE_STATE = "active_allocated"
_PENDING_STATES = ("active_pending_free", "active_awaiting_free")  # new and old name

DEFAULT_POOL: PoolId = (0, 0)
GRANULARITY = 512
NEVER = -1
BEFORE = -2  # before the first entry
_MAX_SIZE = 1 << 60
_MAX_ADDRESS = 1 << 64


def rounded(size: int) -> int:
    """Bytes up to a multiple of 512: how traced sizes are added up."""
    return (size + GRANULARITY - 1) & -GRANULARITY


@dataclass(frozen=True)
class Settings:
    """The recording allocator's options that shape its blocks. Bytes.

    roundup: for each power of two of MiB, divisions; see pytorch_peaks.py.
    """

    expandable: bool = False
    max_split_size: int | None = None
    roundup: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StartBlock:
    """Memory that was in use when the recording began.

    block_size: of native's block, where the segments at the end still have it.
    """

    slot: int
    address: int
    pending: bool
    block_size: int | None


@dataclass
class History:
    """One device. A slot is one allocation, from its alloc to its end.

    steps: for each entry (ALLOC..NOTHING, address, bytes, slot); the slot is
    -1 where the entry has none. times: microseconds, for each entry.
    The lists by slot: traced bytes, stream handle, index into pools, and the
    entries that requested and completed its free, NEVER or BEFORE.
    mapped_steps: entries about pages of expandable segments. peak_segments: the
    most segments at once, mapped pages that touch counting as one.
    """

    path: str
    device: int
    settings: Settings
    steps: list[tuple[int, int, int, int]]
    times: array[int]
    sizes: list[int]
    streams: list[int]
    pool_indexes: list[int]
    requested_at: list[int]
    completed_at: list[int]
    pools: list[PoolId]
    start: list[StartBlock]
    start_ranges: list[Range]
    mapped_steps: set[int]
    peak_segments: int = 0

    def contradiction(self, entry: int | None, what: str) -> NoReturn:
        """Raises SnapshotError for an entry (None: the state at the end)."""
        fail(self.path, self.device, entry, what)

    @property
    def allocations(self) -> int:
        """How many entries allocate."""
        return len(self.sizes) - len(self.start)


def fail(path: str, device: int, entry: int | None, what: str) -> NoReturn:
    """Raises SnapshotError, naming file, device and entry (counted from 0)."""
    where = "at the end" if entry is None else f"entry {entry}"
    raise SnapshotError(f"{path}: device {device}, {where}: {what}")


def rebuild(snapshot: Snapshot) -> Iterator[History]:
    """The history of each device that has entries. Raises SnapshotError."""
    for device, entries in enumerate(snapshot.traces):
        if entries:
            yield _Rebuild(snapshot, device).run()


@dataclass(frozen=True)
class _EndBlock:
    """An allocation in the segments at the end; size: of native's block."""

    address: int
    size: int
    requested: int
    stream: int
    pending: bool


class _Rebuild:
    """Builds one History, in the order in which its methods stand."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        self.entries = snapshot.traces[device]
        self.end_blocks: list[_EndBlock] = []
        self.last: dict[int, int] = {}  # address: the last slot there
        self.pool_numbers: dict[PoolId, int] = {DEFAULT_POOL: 0}
        self.codes: set[int] = set()  # of the entries

    def run(self) -> History:
        end_ranges = self.read_segments()
        steps, times, moves = self.read_entries()
        self.codes = {code for code, *_ in steps}
        start_ranges, grown_pools = self.walk_back(end_ranges, moves)
        self.history = History(
            path=self.snapshot.path,
            device=self.device,
            settings=self.read_settings(end_ranges),
            steps=steps,
            times=times,
            sizes=[],
            streams=[],
            pool_indexes=[],
            requested_at=[],
            completed_at=[],
            pools=[],
            start=[],
            start_ranges=start_ranges,
            mapped_steps={entry for entry, mapped in moves if mapped},
        )
        self.start_ranges = Ranges(start_ranges)
        self.walk_forward(grown_pools)
        self.meet_the_end()
        self.history.pools = list(self.pool_numbers)
        return self.history

    def fail(self, entry: int | None, what: str) -> NoReturn:
        fail(self.snapshot.path, self.device, entry, what + self.skipped_hint())

    def skipped_hint(self) -> str:
        """What may be behind a contradiction, once the entries are read."""
        missing = [name for code, name in _BELONG_TOGETHER.items() if code not in self.codes]
        if not missing or not self.codes:
            return ""
        return (
            f"; it has no {', no '.join(missing)} at all: if it was recorded with skip_actions, "
            f"record it again without"
        )

    # The state at the end.

    def read_segments(self) -> Ranges:
        ranges = Ranges()
        for number, segment in enumerate(self.snapshot.segments):
            try:
                if segment.get("device", 0) != self.device:
                    continue
                start, size = segment["address"], segment["total_size"]
                _require_range(start, size)
                pool = _pool_id(segment.get("segment_pool_id", DEFAULT_POOL))
                mapped = bool(segment.get("is_expandable", False))
                stream = _integer(segment.get("stream", 0))
                self.read_blocks(start, start + size, stream, segment["blocks"])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self.fail(None, f"segment {number} is malformed: {_why(error)}")
            try:
                ranges.add(Range(start, start + size, pool, mapped))
            except RangeError as error:
                self.fail(None, f"segment {number} contradicts another: {error}")
        return ranges

    def read_blocks(self, start: int, end: int, stream: int, blocks: Any) -> None:
        address = start
        for block in blocks:
            size, state = block["size"], block["state"]
            address = block.get("address", address)  # older versions leave it out
            _require_range(address, size)
            if address < start or address + size > end:
                raise ValueError(f"its block at {address:#x} lies outside of it")
            if state == _LIVE_STATE or state in _PENDING_STATES:
                requested = _integer(block.get("requested_size", size)) or size
                self.end_blocks.append(
                    _EndBlock(address, size, requested, stream, state != _LIVE_STATE)
                )
            address += size

    def read_settings(self, end_ranges: Ranges) -> Settings:
        given = self.snapshot.settings
        limit = given.get("max_split_size", -1)
        roundup = given.get("roundup_power2_divisions")
        try:
            divisions = {int(key): int(value) for key, value in (roundup or {}).items()}
        except (AttributeError, TypeError, ValueError):
            divisions = {}
        return Settings(
            expandable=bool(
                given.get("expandable_segments", any(one.mapped for one in end_ranges))
            ),
            max_split_size=limit if type(limit) is int and limit > 0 else None,
            roundup={mib: count for mib, count in divisions.items() if mib > 0 and count > 1},
        )

    # The entries, one by one.

    def read_entries(
        self,
    ) -> tuple[list[tuple[int, int, int, int]], array[int], list[tuple[int, bool]]]:
        """Steps without slots, times, and the entries that move segments."""
        steps: list[tuple[int, int, int, int]] = []
        times = array("q")
        moves: list[tuple[int, bool]] = []
        codes = _ACTIONS
        time = 0
        for number, entry in enumerate(self.entries):
            try:
                action = entry["action"]
                if type(action) is not str:
                    raise TypeError  # hashing a tuple can take for ever
                code = codes[action]
                if code == NOTHING:
                    steps.append((NOTHING, 0, 0, NEVER))
                else:
                    address, size = entry["addr"], entry["size"]
                    if (
                        type(address) is not int
                        or type(size) is not int
                        or not 0 < size <= _MAX_SIZE
                        or not 0 < address <= _MAX_ADDRESS - size
                    ):
                        self.fail(number, f"{action} of {_shown(size)} bytes at {_shown(address)}")
                    steps.append((code, address, size, NEVER))
                    if code >= GROW:
                        moves.append((number, action in _MAPPED))
                time = entry.get("time_us", time)
                times.append(time)
            except (AttributeError, KeyError, TypeError, OverflowError) as error:
                if isinstance(entry, dict) and "action" in entry:
                    if not isinstance(entry["action"], str) or entry["action"] not in codes:
                        self.fail(number, f"unknown action {_shown(entry['action'])}")
                self.fail(number, f"malformed: {_why(error)}")
        return steps, times, moves

    # Backwards: the segments at the start, and the pool of each that came.

    def walk_back(
        self, end_ranges: Ranges, moves: list[tuple[int, bool]]
    ) -> tuple[list[Range], dict[int, PoolId | None]]:
        ranges = Ranges(end_ranges)
        pools: dict[int, PoolId | None] = {}
        for number, mapped in reversed(moves):
            entry = self.entries[number]
            start, end = entry["addr"], entry["addr"] + entry["size"]
            try:
                if _ACTIONS[entry["action"]] == GROW:
                    pools[number] = ranges.remove(start, end, mapped).pool
                else:
                    ranges.add(Range(start, end, _pool_beside(ranges, start, end, mapped), mapped))
            except RangeError as error:
                self.fail(
                    number,
                    f"{entry['action']} of {entry['size']} bytes at {start:#x} "
                    f"contradicts the segments at the end: {error}",
                )
        return list(ranges), pools

    # Forwards: who is live when.

    def walk_forward(self, grown_pools: dict[int, PoolId | None]) -> None:
        history, entries, last = self.history, self.entries, self.last
        steps, sizes = history.steps, history.sizes
        requested_at, completed_at = history.requested_at, history.completed_at
        ranges = Ranges(history.start_ranges)
        history.peak_segments = len(ranges)
        for number, (code, address, size, _) in enumerate(steps):
            if code <= COMPLETE:
                slot = last.get(address, NEVER)
                if code == ALLOC:
                    if slot != NEVER and completed_at[slot] == NEVER:
                        self.fail_alloc(number, address, slot)
                    slot = self.new_slot(address, size, entries[number].get("stream", 0), ranges)
                    if slot == NEVER:
                        self.fail(number, f"alloc of {size} bytes at {address:#x}, in no segment")
                elif slot == NEVER:
                    slot = self.start_slot(number, address, size, code == COMPLETE)
                elif sizes[slot] != size:
                    self.fail(
                        number,
                        f"free of {size} bytes at {address:#x}, where {sizes[slot]} were allocated",
                    )
                if code == REQUEST:
                    if requested_at[slot] != NEVER:
                        self.fail_free(number, address, slot)
                    requested_at[slot] = number
                elif code == COMPLETE:
                    if requested_at[slot] == NEVER or completed_at[slot] != NEVER:
                        self.fail_free(number, address, slot)
                    completed_at[slot] = number
                steps[number] = (code, address, size, slot)
            elif code != NOTHING:
                mapped = number in history.mapped_steps
                if code == GROW:
                    ranges.add(Range(address, address + size, grown_pools[number], mapped))
                    history.peak_segments = max(history.peak_segments, len(ranges))
                else:
                    ranges.remove(address, address + size, mapped)

    def new_slot(self, address: int, size: int, stream: Any, ranges: Ranges) -> int:
        """The slot of an allocation that lies in one segment, else NEVER."""
        home = ranges.find(address)
        if home is None or address + rounded(size) > home.end:
            return NEVER
        history = self.history
        slot = len(history.sizes)
        history.sizes.append(size)
        history.streams.append(stream if type(stream) is int else 0)
        pool = home.pool or DEFAULT_POOL
        history.pool_indexes.append(self.pool_numbers.setdefault(pool, len(self.pool_numbers)))
        history.requested_at.append(NEVER)
        history.completed_at.append(NEVER)
        self.last[address] = slot
        return slot

    def start_slot(
        self,
        number: int | None,
        address: int,
        size: int,
        pending: bool,
        stream: int | None = None,
        block_size: int | None = None,
    ) -> int:
        """The slot of a block that was in use before the first entry."""
        history = self.history
        if stream is None:
            assert number is not None
            stream = self.entries[number].get("stream", 0)
        slot = self.new_slot(address, size, stream, self.start_ranges)
        if slot == NEVER:
            self.fail(
                number,
                f"{size} bytes at {address:#x} were in use when the recording began, "
                "in no segment of that time",
            )
        if pending:
            history.requested_at[slot] = BEFORE
        history.start.append(StartBlock(slot, address, pending, block_size))
        return slot

    def fail_alloc(self, number: int, address: int, slot: int) -> NoReturn:
        requested = self.history.requested_at[slot]
        if requested == NEVER:
            self.fail(number, f"alloc on a live address: {address:#x} has not been freed")
        self.fail(
            number,
            f"alloc on an address in use: the free of {address:#x} "
            f"({self.entry_name(requested)}) has not completed",
        )

    def fail_free(self, number: int, address: int, slot: int) -> NoReturn:
        requested = self.history.requested_at[slot]
        if requested == NEVER:
            self.fail(number, f"free_completed of {address:#x}, whose free was not requested")
        self.fail(
            number,
            f"second free: {address:#x} was freed already ({self.entry_name(requested)})",
        )

    @staticmethod
    def entry_name(number: int) -> str:
        return "before the first entry" if number == BEFORE else f"entry {number}"

    # The end again: it must be what the entries lead to.

    def meet_the_end(self) -> None:
        history, last = self.history, self.last
        stayed: dict[int, int] = {}  # slot: bytes of native's block
        left = {address for address, slot in last.items() if history.completed_at[slot] == NEVER}
        for block in self.end_blocks:
            slot = last.get(block.address, NEVER)
            if slot == NEVER:
                self.start_slot(
                    None, block.address, block.requested, block.pending, block.stream, block.size
                )
                continue
            state = "pending" if block.pending else "live"
            if block.address not in left:
                self.fail(
                    None,
                    f"{block.address:#x} is {state} in the segments, but its free completed at "
                    f"{self.entry_name(history.completed_at[slot])}",
                )
            if block.pending != (history.requested_at[slot] != NEVER):
                self.fail(
                    None,
                    f"{block.address:#x} is {state} in the segments, but "
                    + ("nobody asked to free it" if block.pending else "its free was requested"),
                )
            left.discard(block.address)
            stayed[slot] = block.size
        if left:
            address = min(left)
            self.fail(
                None,
                f"{address:#x} is in use after the last entry, but not in the segments",
            )
        # Blocks of the start that stayed to the end show their size there.
        history.start = [
            replace(block, block_size=stayed.get(block.slot, block.block_size))
            for block in sorted(history.start, key=lambda block: block.address)
        ]


def _pool_beside(ranges: Ranges, start: int, end: int, mapped: bool) -> PoolId | None:
    """Whose a range was that is gone at the end: mapped pages lay beside others
    of their segment; nothing tells of a segment that was freed as a whole."""
    if mapped:
        for address in (start - 1, end):
            beside = ranges.find(address)
            if beside is not None and beside.mapped:
                return beside.pool
    return None


def _shown(value: Any) -> str:
    """A value of the file for a message. A container is not written out: it may hold
    another one again and again, and so be longer than any memory."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__}"
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python does not print all the digits
        return "a huge number"


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{_shown(value)} is not a number")
    return value


def _require_range(start: Any, size: Any) -> None:
    if _integer(start) <= 0 or not 0 < _integer(size) <= min(_MAX_SIZE, _MAX_ADDRESS - start):
        raise ValueError(f"{_shown(size)} bytes at {_shown(start)}")


def _pool_id(value: Any) -> PoolId:
    first, second = value
    if not (0 <= _integer(first) < 1 << 64 and 0 <= _integer(second) < 1 << 64):
        raise ValueError(f"pool ({_shown(first)}, {_shown(second)})")
    return first, second


def _why(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
