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
from itertools import repeat
from typing import TYPE_CHECKING, NoReturn, TypeVar

from .ranges import Range, RangeError, Ranges
from .reader import ACTIONS, ALLOC, COMPLETE, DEFAULT_POOL, GROW, NOTHING, REQUEST, SHRINK, PoolId
from .snapshot import Snapshot, SnapshotError, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Also many numbers at once.
_Bytes = TypeVar("_Bytes", int, "NDArray[np.int64]")

_NAMES = tuple(ACTIONS)
# Of these a recording has some, if it has any of the others.
_BELONG_TOGETHER = {ALLOC: "alloc", REQUEST: "free_requested", COMPLETE: "free_completed"}
_MAPPED = ("segment_map", "segment_unmap")

GRANULARITY = 512
NEVER = -1
BEFORE = -2  # before the first entry


def rounded(size: _Bytes) -> _Bytes:
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
    most segments at once, mapped pages that touch counting as one. segment_pools: for each entry
    about segments the pool that they are of; the default one where nothing tells.
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
    segment_pools: dict[int, PoolId] = field(default_factory=dict)

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
    for trace in snapshot.traces:
        yield _Rebuild(snapshot, trace).run()


class _Rebuild:
    """Builds one History, in the order in which its methods stand."""

    def __init__(self, snapshot: Snapshot, trace: Trace) -> None:
        self.snapshot = snapshot
        self.trace = trace
        self.last: dict[int, int] = {}  # address: the last slot there
        self.pool_numbers: dict[PoolId, int] = {DEFAULT_POOL: 0}

    def run(self) -> History:
        end_ranges = self.place_segments()
        steps, moves = self.read_entries()
        start_ranges, grown_pools = self.walk_back(end_ranges, moves)
        expandable = self.snapshot.expandable
        self.history = History(
            path=self.snapshot.path,
            device=self.trace.device,
            settings=Settings(
                any(one.mapped for one in end_ranges) if expandable is None else expandable,
                self.snapshot.max_split_size,
                self.snapshot.roundup,
            ),
            steps=steps,
            times=self.trace.times,
            sizes=[],
            streams=[],
            pool_indexes=[],
            requested_at=[],
            completed_at=[],
            pools=[],
            start=[],
            start_ranges=start_ranges,
            mapped_steps={entry for entry in moves if self.action(entry) in _MAPPED},
        )
        self.start_ranges = Ranges(start_ranges)
        self.walk_forward(grown_pools)
        self.meet_the_end()
        self.history.pools = list(self.pool_numbers)
        return self.history

    def fail(self, entry: int | None, what: str) -> NoReturn:
        fail(self.snapshot.path, self.trace.device, entry, what + self.skipped_hint())

    def skipped_hint(self) -> str:
        """What may be behind a contradiction."""
        effects = {ACTIONS[_NAMES[action]] for action in set(self.trace.actions)}
        missing = [name for code, name in _BELONG_TOGETHER.items() if code not in effects]
        if not missing:
            return ""
        return (
            f"; it has no {', no '.join(missing)} at all: if it was recorded with skip_actions, "
            f"record it again without"
        )

    def action(self, entry: int) -> str:
        """Its name."""
        return _NAMES[self.trace.actions[entry]]

    # The state at the end, and the entries.

    def place_segments(self) -> Ranges:
        ranges = Ranges()
        for number, start, end, pool, mapped, _ in self.trace.segments:
            try:
                ranges.add(Range(start, end, pool, mapped))
            except RangeError as error:
                self.fail(None, f"segment {number} contradicts another: {error}")
        return ranges

    def read_entries(self) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """Steps without slots, and the entries that move segments."""
        trace, codes = self.trace, tuple(ACTIONS.values())
        effects = [codes[action] for action in trace.actions]
        steps = list(zip(effects, trace.addresses, trace.sizes, repeat(NEVER)))
        return steps, [entry for entry, code in enumerate(effects) if code in (GROW, SHRINK)]

    # Backwards: the segments at the start, and the pool of each that came.

    def walk_back(
        self, end_ranges: Ranges, moves: list[int]
    ) -> tuple[list[Range], dict[int, PoolId | None]]:
        ranges = Ranges(end_ranges)
        pools: dict[int, PoolId | None] = {}
        for number in reversed(moves):
            action, size = self.action(number), self.trace.sizes[number]
            start, mapped = self.trace.addresses[number], action in _MAPPED
            end = start + size
            try:
                if ACTIONS[action] == GROW:
                    pools[number] = ranges.remove(start, end, mapped).pool
                else:
                    ranges.add(Range(start, end, pool_beside(ranges, start, end, mapped), mapped))
            except RangeError as error:
                self.fail(
                    number,
                    f"{action} of {size} bytes at {start:#x} "
                    f"contradicts the segments at the end: {error}",
                )
        return list(ranges), pools

    # Forwards: who is live when.

    def walk_forward(self, grown_pools: dict[int, PoolId | None]) -> None:
        history, streams, last = self.history, self.trace.streams, self.last
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
                    slot = self.new_slot(address, size, streams[number], ranges)
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
                    pool = grown_pools[number]
                    ranges.add(Range(address, address + size, pool, mapped))
                    history.peak_segments = max(history.peak_segments, len(ranges))
                else:
                    pool = ranges.remove(address, address + size, mapped).pool
                history.segment_pools[number] = pool or DEFAULT_POOL

    def new_slot(self, address: int, size: int, stream: int, ranges: Ranges) -> int:
        """The slot of an allocation that lies in one segment, else NEVER."""
        home = ranges.find(address)
        if home is None or address + rounded(size) > home.end:
            return NEVER
        history = self.history
        slot = len(history.sizes)
        history.sizes.append(size)
        history.streams.append(stream)
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
            stream = self.trace.streams[number]
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
        for address, size, requested, stream, pending, _ in self.trace.blocks:
            slot = last.get(address, NEVER)
            if slot == NEVER:
                self.start_slot(None, address, requested, pending, stream, size)
                continue
            state = "pending" if pending else "live"
            if address not in left:
                self.fail(
                    None,
                    f"{address:#x} is {state} in the segments, but its free completed at "
                    f"{self.entry_name(history.completed_at[slot])}",
                )
            if pending != (history.requested_at[slot] != NEVER):
                self.fail(
                    None,
                    f"{address:#x} is {state} in the segments, but "
                    + ("nobody asked to free it" if pending else "its free was requested"),
                )
            left.discard(address)
            stayed[slot] = size
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


def pool_beside(ranges: Ranges, start: int, end: int, mapped: bool) -> PoolId | None:
    """Whose a range was that is gone at the end: mapped pages lay beside others
    of their segment; nothing tells of a segment that was freed as a whole."""
    if mapped:
        for address in (start - 1, end):
            beside = ranges.find(address)
            if beside is not None and beside.mapped:
                return beside.pool
    return None
