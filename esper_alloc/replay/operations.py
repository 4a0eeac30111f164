"""A history as the operations that the compiled replay runs."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

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
    """Numbers for unnamed streams, taken while their use lasts."""

    def __init__(self) -> None:
        self.made = 0
        self.idle: list[int] = []
        self.by_slot: dict[int, int] = {}

    def begin(self, slot: int) -> int:
        if self.idle:
            use = self.idle.pop()
        else:
            use, self.made = self.made, self.made + 1
        self.by_slot[slot] = use
        return use

    def end(self, slot: int) -> int | None:
        use = self.by_slot.pop(slot, None)
        if use is not None:
            self.idle.append(use)
        return use


def make_operations(history: History) -> Operations:
    """Frees whose completion follows at once are plain frees. The others are
    pending on an unnamed stream until their completion, or for good."""
    streams: dict[int, int] = {}
    stream_numbers = [streams.setdefault(one, len(streams)) for one in history.streams]
    completed_at = history.completed_at
    pool_indexes = history.pool_indexes
    uses = _Uses()
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
            use = uses.end(slot)
            if use is None:
                continue
            packed.append(_PACK(_DONE, 0, use, 0, 0))
        else:
            continue
        entries.append(entry)

    return Operations(
        packed=b"".join(packed),
        start=start,
        entries=entries,
        slots=len(history.sizes),
        streams=len(streams),
        uses=uses.made,
        pools=history.pools,
    )
