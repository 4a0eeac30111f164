"""A history as the operations that the compiled replay runs."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from .history import History
from .reader import ALLOC, COMPLETE, REQUEST, PoolId

# As replay.c has them.
_ALLOC, _FREE, _FREE_PENDING, _DONE = range(4)
_PACK = struct.Struct("=IIIIQ").pack


@dataclass(frozen=True)
class Operations:
    """packed: what ``_core.replay`` takes; the first `start` build the state at
    the start. entries: for each later operation the entry it comes from.
    slots, streams, uses: how many there are; pools: their ids."""

    packed: bytes
    start: int
    entries: array[int]
    slots: int
    streams: int
    uses: int
    pools: list[PoolId]

    def entry_of(self, operation: int | None) -> int | None:
        """The entry an operation comes from; None for those before the first."""
        if operation is None or operation < self.start:
            return None
        return self.entries[operation - self.start]


class _Uses:
    """Unnamed streams, as few as there can be: a core asks each that is busy at every malloc.
    The uses on one end in the order in which they begin. Between two allocs any order will do."""

    def __init__(self, history: History) -> None:
        self.completed_at = history.completed_at
        self.allocs = array("Q", accumulate(code == ALLOC for code, *_ in history.steps))
        self.ends: list[int] = []  # of the last use of each stream, the earliest first
        self.streams: list[int] = []
        self.by_slot: dict[int, int] = {}

    def begin(self, slot: int) -> int:
        completed = self.completed_at[slot]
        end = self.allocs[completed] if completed >= 0 else len(self.allocs)
        at = bisect_right(self.ends, end) - 1
        if at < 0:
            at = 0
            self.ends.insert(0, end)
            self.streams.insert(0, len(self.streams))
        self.ends[at] = end
        self.by_slot[slot] = self.streams[at]
        return self.streams[at]


def make_operations(history: History) -> Operations:
    """Frees whose completion follows at once are plain frees. The others are
    pending on an unnamed stream until their completion, or for good."""
    streams: dict[int, int] = {}
    stream_numbers = [streams.setdefault(one, len(streams)) for one in history.streams]
    completed_at = history.completed_at
    pool_indexes = history.pool_indexes
    uses = _Uses(history)
    packed: list[bytes] = []
    entries = array("Q")

    for block in history.start:
        slot = block.slot
        size = history.sizes[slot]
        packed.append(_PACK(_ALLOC, slot, stream_numbers[slot], pool_indexes[slot], size))
        if block.pending:
            packed.append(_PACK(_FREE_PENDING, slot, uses.begin(slot), 0, 0))
    start = len(packed)

    for entry, (code, _, size, slot) in enumerate(history.steps):
        if code == ALLOC:
            packed.append(_PACK(_ALLOC, slot, stream_numbers[slot], pool_indexes[slot], size))
        elif code == REQUEST:
            if completed_at[slot] == entry + 1:
                packed.append(_PACK(_FREE, slot, 0, 0, 0))
            else:
                packed.append(_PACK(_FREE_PENDING, slot, uses.begin(slot), 0, 0))
        elif code == COMPLETE:
            use = uses.by_slot.get(slot)
            if use is None:
                continue
            packed.append(_PACK(_DONE, slot, use, 0, 0))
        else:
            continue
        entries.append(entry)

    return Operations(
        packed=b"".join(packed),
        start=start,
        entries=entries,
        slots=len(history.sizes),
        streams=len(streams),
        uses=len(uses.streams),
        pools=history.pools,
    )
