"""The changes that may let a request through, each tried by replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..view.places import NO_STACK
from . import causes
from .job import ALLOC, FREE_PENDING, GRANULE, Job
from .trial import Change, Outcome, attempt

#: Lines that are tried without what they hold.
MOST_LINES = 5
ALLOWANCE = 128 << 20


@dataclass(frozen=True)
class Tried:
    """A change that was replayed. kind: one of KINDS. what: of it, for JSON: a line, a percentage,
    bytes."""

    kind: str
    what: dict[str, Any]
    outcome: Outcome


#: In the order in which they are told.
KINDS = (
    "free_each", "uses_end", "allowance", "segments", "release_pool", "fraction", "others",
    "checkpoint", "batch", "absent", "empty_cache",
)  # fmt: skip


def try_all(job: Job, tried: Callable[[int], None] = lambda count: None) -> list[Tried]:
    """Every change that could matter, whether it helps or not; `tried` is told how many so far.
    Raises ReplayError."""
    found = []
    for part in (_growing, _pending, try_policies, _pools, _room, _activations, _lines, _cache):
        for one in part(job):
            found.append(one)
            tried(len(found))
    return sorted(found, key=lambda one: KINDS.index(one.kind))


def _growing(job: Job) -> Iterator[Tried]:
    lines = causes.growing_lines(job)
    chosen = [tuple(causes.leaking_lines(job)), tuple(lines), *((one,) for one in lines)]
    for some in list(dict.fromkeys(one for one in chosen if one))[:5]:
        yield Tried("free_each", {"lines": list(some)}, attempt(job, Change(one_at_a_time=some)))


def _pending(job: Job) -> Iterator[Tried]:
    if (job.operations["kind"] == FREE_PENDING).any():
        yield Tried("uses_end", {}, attempt(job, Change(uses_end=True)))
        change = Change(allowance=ALLOWANCE)
        yield Tried("allowance", {"bytes": ALLOWANCE}, attempt(job, change))


def try_policies(job: Job) -> Iterator[Tried]:
    """Other segments, or instead of another allocator. Raises ReplayError."""
    for kind in ("mapped", "classic"):
        if kind != job.kind or not job.by_us:
            yield Tried("segments", {"segments": kind}, attempt(job, Change(kind=kind)))


def _pools(job: Job) -> Iterator[Tried]:
    for pool in causes.kept_by_pools(job):
        yield Tried("release_pool", {"pool": pool}, attempt(job, Change(released=pool)))


def _room(job: Job) -> Iterator[Tried]:
    total, taken, limit = job.room.total, job.room.taken or 0, job.room.limit
    if limit is not None and job.room.taken is not None:

        def with_fraction(percent: int) -> Outcome:
            limit = None if percent == 100 else total * percent // 100
            return attempt(job, Change(limit=limit))

        percent, outcome = _least(with_fraction, 1, 100)
        yield Tried("fraction", {"percent": percent}, outcome)
    if taken >= GRANULE:

        def with_less(parts: int) -> Outcome:
            return attempt(job, Change(taken=taken - taken * parts // 32))

        parts, outcome = _least(with_less, 1, 32)
        yield Tried("others", {"bytes": taken * parts // 32}, outcome)


def _least(run: Callable[[int], Outcome], first: int, last: int) -> tuple[int, Outcome]:
    """The least number that passes, if greater ones do as well; else the last."""
    best = run(last)
    while best.passes and first < last:
        middle = (first + last) // 2
        outcome = run(middle)
        if outcome.passes:
            last, best = middle, outcome
        else:
            first = middle + 1
    return last, best


def _activations(job: Job) -> Iterator[Tried]:
    kept = causes.kept_by_forward(job)
    for_backward = causes.keeps_for_backward(job)
    held = np.bincount(job.line[kept], job.sizes[kept], len(job.lines))
    lines = np.argsort(-held, kind="stable")[: min(MOST_LINES, np.count_nonzero(held))].tolist()
    # As few lines as possible: what a layer gives to the next stays.
    for count in range(1, len(lines) + 1):
        outcome = attempt(job, Change(one_at_a_time=tuple(lines[:count])))
        if outcome.passes or count == len(lines):
            kind = "checkpoint" if for_backward else "free_each"
            yield Tried(kind, {"lines": lines[:count]}, outcome)
            break
    growing = set(causes.growing_lines(job)) - set(causes.leaking_lines(job))
    if causes.asks_for_weights(job) or job.request.line in growing:
        return
    scaled = causes.scales(job)

    def with_less(less: int) -> Outcome:
        return attempt(job, Change(scaled=scaled, factor=(100 - less) / 100))

    less, outcome = _least(with_less, 1, 99)
    what = {"percent": 100 - less, "bytes": int(job.sizes[scaled & job.live].sum())}
    yield Tried("batch", what, outcome)


def _lines(job: Job) -> Iterator[Tried]:
    """Neither the request's own line nor one that holds all: without it no program is left."""
    held = job.held_by_line()
    all_live = int(held.sum())
    for line in np.argsort(-held, kind="stable")[:MOST_LINES].tolist():
        own = line == job.request.line
        if 0 < held[line] < all_live and not own and job.lines[line] != NO_STACK:
            absent = Change(absent=job.line == line)
            yield Tried("absent", {"lines": [line]}, attempt(job, absent))


def _cache(job: Job) -> Iterator[Tried]:
    """Emptied when least was live, after the most had been."""
    if job.kind == "mapped" and job.by_us:
        return
    kind = job.operations["kind"]
    change = np.where(kind == ALLOC, 1, np.where(kind <= FREE_PENDING, -1, 0))
    live = np.cumsum(change * job.sizes[job.slots] * (kind <= FREE_PENDING))
    after = int(np.argmax(live)) if len(live) else 0
    if after + 1 < len(live):
        at = after + int(np.argmin(live[after:]))
        following = np.flatnonzero(kind[at:] == ALLOC)
        line = int(job.line[job.slots[at + following[0]]]) if len(following) else job.request.line
        yield Tried("empty_cache", {"lines": [line]}, attempt(job, Change(emptied=at + 1)))
