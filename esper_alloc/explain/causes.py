"""What may be the cause that a request failed, as the recording shows it."""

from __future__ import annotations

import numpy as np

from ..replay.reader import DEFAULT_POOL, PoolId
from ..view.places import NO_STACK
from .job import ALLOC, FREE, FREE_PENDING, GRANULE, Ints, Job, Mask

#: A line keeps memory step after step if so many of its blocks, or more, each are of another step,
#: the last of them near the end of the recording; and if they are so large a share of what is live.
_FEWEST, _LAST, _SHARE = 4, 0.8, 0.1
#: A step frees so many blocks, or more, and so many times the bytes of the block that stays.
_STEP_BLOCKS, _STEP_BYTES = 3, 4


def growing_lines(job: Job) -> list[int]:
    """The lines whose live memory grew while other memory came and went, the largest first.

    Two blocks are of different steps if memory of other lines was freed in between. What forward
    keeps for backward grows within a step, so of that there must be blocks that outlived a backward
    pass. Weights and the optimizer's state are made once.
    """
    held, live_bytes = job.held_by_line(), int(job.sizes[job.live].sum())
    kind = job.operations["kind"]
    born = _born(job)
    backward = born[job.in_category("backward")]
    lasting = job.in_category("weights", "optimizer")
    found = []
    for line in np.argsort(-held, kind="stable").tolist():
        if not held[line] or held[line] < _SHARE * live_bytes:
            break
        slots = np.flatnonzero(job.live & (job.line == line))
        at = np.sort(born[slots])
        steps = 1 + np.count_nonzero(_freed_between(job, line, at)[0])
        after_backward = ((backward > at[0]) & (backward < at[-1])).any()
        within = job.in_category("forward", "backward")[slots].all() and not after_backward
        goes_on = at[-1] >= _LAST * len(kind)
        grows = steps >= _FEWEST and goes_on and not within and not lasting[slots].all()
        if job.lines[line] != NO_STACK and grows:
            found.append(line)
    return found


def leaking_lines(job: Job) -> list[int]:
    """Those of the growing lines between whose blocks the program did steps.

    While weights are loaded, memory comes and goes as well: each passes through a buffer or two,
    which are larger by the types at most. A step runs backward or the optimizer, or takes data; or
    it frees several blocks, and many times the bytes that stay.
    """
    born, found = _born(job), []
    of_steps = np.sort(born[job.in_category("backward", "optimizer", "data")])
    for line in growing_lines(job):
        slots = np.flatnonzero(job.live & (job.line == line))
        slots = slots[np.argsort(born[slots], kind="stable")]
        blocks, size = _freed_between(job, line, born[slots])
        seen = np.diff(np.searchsorted(of_steps, born[slots])) > 0
        kept = job.sizes[slots[1:]]
        seen |= (blocks >= _STEP_BLOCKS) & (size >= _STEP_BYTES * kept)
        steps = np.count_nonzero(seen & (blocks > 0))
        if steps >= _FEWEST - 1 and 2 * steps >= np.count_nonzero(blocks):
            found.append(line)
    return found


def _born(job: Job) -> Ints:
    """The operation that made each slot."""
    kind = job.operations["kind"]
    born = np.zeros(len(job.sizes), np.int64)
    born[job.slots[kind == ALLOC]] = np.flatnonzero(kind == ALLOC)
    return born


def _freed_between(job: Job, line: int, at: Ints) -> tuple[Ints, Ints]:
    """Blocks and bytes of other lines that were freed between each operation and the next."""
    frees = np.isin(job.operations["kind"], (FREE, FREE_PENDING)) & (job.line[job.slots] != line)
    size = np.where(frees, job.sizes[job.slots], 0)
    return np.diff(np.cumsum(frees)[at]), np.diff(np.cumsum(size)[at])


def is_longest_so_far(job: Job) -> bool:
    """Whether the request's line has asked for various sizes, of which this is the largest, and
    which came and went. Weights and the optimizer's state do not."""
    mine = ((job.line == job.request.line) & (job.born < job.request.entry))[:-1]
    before = job.sizes[:-1][mine]
    went = np.count_nonzero(job.freed[:-1][mine] < job.request.entry)
    return (
        not asks_for_weights(job)
        and len(np.unique(before)) >= 4
        and job.request.size >= int(before.max())
        and bool(went > len(before) / 2)
    )


def asks_for_weights(job: Job) -> bool:
    """Whether the request is for weights or the optimizer's state."""
    return bool(job.in_category("weights", "optimizer")[-1])


def free_of_pool(job: Job) -> tuple[int, int]:
    """Free bytes that the request could have if they were in one piece, and the largest piece."""
    room = max(job.room.capacity - job.reserved, 0) // GRANULE * GRANULE
    return sum(job.own_gaps) + room, max([*job.own_gaps, room])


def free_of_other_streams(job: Job) -> int:
    """Free bytes in the default pool's segments of other streams."""
    return sum(job.gaps.get(DEFAULT_POOL, [])) - sum(job.own_gaps)


def kept_by_pools(job: Job) -> dict[PoolId, int]:
    """Free bytes of the other pools, whether the history knows them or not."""
    found = {pool: sum(gaps) for pool, gaps in job.gaps.items() if pool != DEFAULT_POOL}
    return {pool: size for pool, size in sorted(found.items()) if size >= GRANULE}


def kept_by_forward(job: Job) -> Mask:
    """The slots that forward made and that are live."""
    return job.live & job.in_category("forward")


def keeps_for_backward(job: Job) -> bool:
    """Whether what forward keeps may be for backward: there is a backward pass, or the first
    forward has not ended.

    It has if some line outside of forward made memory, forward made some, and then both did again.
    """
    if job.in_category("backward")[:-1].any():
        return True
    born = _born(job)
    forward = job.in_category("forward")
    outside = ~forward & ~job.in_category("weights", "optimizer")
    made = np.flatnonzero(job.operations["kind"] == ALLOC)
    slots = job.slots[made]
    at = np.sort(born[slots[forward[slots]]])
    after = np.searchsorted(at, made)  # blocks of forward before each
    mine = outside[slots] & (after < len(at))
    pairs = np.unique(np.stack([job.line[slots[mine]], after[mine]]), axis=1)
    return not job.lost_beginning and bool((np.bincount(pairs[0], minlength=1) < 2).all())


def scales(job: Job) -> Mask:
    """The slots whose sizes go with the batch's: what forward, backward and data make, and lines
    that free something; but neither weights and optimizer state nor blocks of their sizes, such as
    gradients, nor what stays."""
    lasting = job.in_category("weights", "optimizer")
    frees = np.zeros(len(job.lines), np.bool_)
    frees[job.line[(job.freed < job.request.entry) & ~lasting]] = True
    frees[job.request.line] = True
    passing = job.in_category("forward", "backward", "data") | frees[job.line]
    growing = np.isin(job.line, growing_lines(job))
    growing[-1] = False
    return passing & ~growing & ~np.isin(job.sizes, job.sizes[lasting])
