"""The recorded job replayed with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..replay.reader import DEFAULT_POOL, PoolId
from ..replay.replay import ReplayError, Segments
from .job import (
    ALLOC,
    DONE,
    EMPTY,
    FREE,
    FREE_PENDING,
    OPERATION,
    RELEASE,
    Ints,
    Job,
    Mask,
)


@dataclass(frozen=True)
class Change:
    """What is other than it was. Nothing is by default.

    kind: of segments. allowance: bytes; -1: the host is not held back beyond what was recorded.
    taken, limit: as in Room; -1: as it was, and a limit of None: none. unlimited: the device has
    all the memory that it needs. scaled: slots whose sizes are multiplied by `factor`. absent:
    slots that are never allocated. one_at_a_time: lines that free each block before they make the
    next. uses_end: memory is over when it is freed. released: a pool that is dropped after its last
    use. emptied: the cache is emptied before this operation.
    """

    kind: Segments | None = None
    allowance: int = -1
    taken: int = -1
    limit: int | None = -1
    unlimited: bool = False
    scaled: Mask | None = None
    factor: float = 1.0
    absent: Mask | None = None
    one_at_a_time: tuple[int, ...] = ()
    uses_end: bool = False
    released: PoolId | None = None
    emptied: int = -1


@dataclass(frozen=True)
class Outcome:
    """passes: the request is served. peak: the most reserved bytes; 0: it failed. early: it failed
    before the request came."""

    passes: bool
    peak: int = 0
    early: bool = False


def attempt(job: Job, change: Change) -> Outcome:
    """Replays the job up to and with the request. What pools hold of which the history has no
    block is taken. Raises ReplayError where the replay itself fails."""
    room = job.room
    taken = room.taken or 0 if change.taken < 0 else change.taken
    limit = room.limit if change.limit == -1 else change.limit
    unknown = job.reserved_by_unknown_pools(change.released)
    taken, limit = taken + unknown, limit and max(limit - unknown, 1)
    operations = _operations(job, change)
    try:
        ran = _core.replay(
            operations.tobytes(),
            start=0,
            slots=len(job.sizes),
            streams=job.streams,
            uses=job.uses,
            pools=job.pools or [DEFAULT_POOL],
            segments=change.kind or job.segments,
            device="sim",
            total=0 if change.unlimited else room.total,
            taken=0 if change.unlimited else taken,
            limit=0 if change.unlimited else limit or 0,
            allowance=change.allowance,
            timed=False,
        )
    except RuntimeError as error:
        message, status, operation = error.args
        if status != "ESPER_OUT_OF_MEMORY":
            raise ReplayError(f"{job.path}: device {job.device}: {message}") from None
        return Outcome(False, early=operation != len(operations) - 1)
    return Outcome(True, ran["peak_reserved"] + unknown)


def _operations(job: Job, change: Change) -> NDArray[Any]:
    """What is replayed: the operations as changed, with the request at their end."""
    slots, request = job.slots, len(job.sizes) - 1
    operations = np.empty(len(slots) + 1, OPERATION)
    operations[:-1] = job.operations
    operations[-1] = (ALLOC, request, job.request_stream, 0, job.sizes[-1])
    slots = np.append(slots, request)
    kept = np.ones(len(slots), np.bool_)
    kind = operations["kind"]
    if change.uses_end:
        kind[kind == FREE_PENDING] = FREE
        kept &= kind != DONE
    else:  # what is pending to the last serves nobody, as if it were live
        kept &= (kind != FREE_PENDING) | (job.over[slots] < job.request.entry)
    if change.absent is not None:
        kept &= ~change.absent[slots]
    if change.scaled is not None:
        scaled = change.scaled[slots] & (kind == ALLOC)
        size = operations["size"]
        size[scaled] = np.maximum(size[scaled] * change.factor, 1)
    before: list[Ints] = []  # which operations
    more: list[NDArray[Any]] = []
    for line in change.one_at_a_time:
        nexts, frees = _freed_before_the_next(job, line, operations, slots, kept)
        before.append(nexts)
        more.append(frees)
    if change.released in job.pools:
        number = job.pools.index(change.released)
        mine = np.flatnonzero(job.pool[slots] == number)
        if len(mine):
            before.append(mine[-1:] + 1)
            more.append(np.array([(RELEASE, 0, 0, number, 0)], OPERATION))
    if change.emptied >= 0:
        before.append(np.array([change.emptied]))
        more.append(np.array([(EMPTY, 0, 0, 0, 0)], OPERATION))
    if not more:
        return operations[kept]
    # Those that are added come first where they stand.
    at = np.concatenate([*before, np.flatnonzero(kept)])
    return np.concatenate([*more, operations[kept]])[np.argsort(at, kind="stable")]


def _freed_before_the_next(
    job: Job, line: int, operations: NDArray[Any], slots: Ints, kept: Mask
) -> tuple[Ints, NDArray[Any]]:
    """Frees to be added for the blocks of a line that live longer, and before which operations;
    their own frees are not kept."""
    mine = (job.line[slots] == line) & kept
    allocs = np.flatnonzero(mine & (operations["kind"] == ALLOC))
    frees = np.flatnonzero(mine & np.isin(operations["kind"], (FREE, FREE_PENDING)))
    freed_at = np.full(len(job.sizes), len(slots))
    freed_at[slots[frees]] = frees
    late = freed_at[slots[allocs[:-1]]] > allocs[1:]
    longer = np.zeros(len(job.sizes), np.bool_)
    longer[slots[allocs[:-1]][late]] = True
    kept &= ~(longer[slots] & (operations["kind"] != ALLOC))
    added = np.zeros(np.count_nonzero(late), OPERATION)
    added["kind"], added["slot"] = FREE, slots[allocs[:-1][late]]
    return allocs[1:][late], added
