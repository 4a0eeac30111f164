"""A request that failed, explained: its causes, the first one first, and the changes that help."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..replay.history import rebuild
from ..replay.replay import MOST_RESERVED, load
from . import causes
from .changes import Tried, try_all, try_policies
from .job import Job, failures, job_of
from .trial import Change, Outcome, attempt

#: Kinds of changes against each cause.
_AGAINST = {
    "leak": ("free_each",), "growth": ("free_each",), "pending": ("uses_end", "allowance"),
    "fragmentation": ("segments",), "pool": ("release_pool",), "fraction": ("fraction",),
    "others": ("others",), "lengths": ("batch",), "large": ("batch",),
    "streams": ("segments",), "activations": ("checkpoint",), "returned": ("free_each",),
}  # fmt: skip
#: From these shares on: of the device, what others hold; of the capacity, one request; of what is
#: live, what forward keeps; of the request, free memory in pieces; of the capacity, gaps.
_OTHERS, _LARGE, _KEPT, _PIECES, _GAPS = 0.05, 0.4, 0.3, 0.1, 0.05
#: CUDA itself takes hundreds of MiB. From these bytes or this share of the device on, what others
#: hold is more than that.
_MUCH, _MUCH_OF_ALL = 1 << 30, 0.15
#: A driver does not give the last of what it calls free: it needs some for page tables, and some
#: lies in pieces that are smaller than a page. So much is a guess.
_NOT_GIVEN = 64 << 20


@dataclass(frozen=True)
class Explanation:
    """causes: kinds, the likeliest first; none but a leak where the replay serves the request as it
    was. as_it_was: the outcome without a change. enough: with all the memory that it needs. tried:
    changes; where the replay serves the request as it was, only another allocator."""

    job: Job
    causes: list[str]
    as_it_was: Outcome
    enough: Outcome
    tried: list[Tried]

    @property
    def helps(self) -> list[Tried]:
        """The changes that let the request through; first those that concern the first cause."""
        kinds = [kind for cause in self.causes for kind in _AGAINST.get(cause, ())]
        found = [one for one in self.tried if one.outcome.passes]
        return sorted(found, key=lambda one: [*kinds, one.kind].index(one.kind))


def explain_file(
    path: str | os.PathLike[str],
    report: Callable[[str], None] = lambda what: None,
) -> list[Explanation]:
    """The last request that failed, for each device of the file on which one did. Raises
    SnapshotError and ReplayError."""
    report(f"reading {path}")
    snapshot = load(path)
    found = []
    for trace, history in zip(snapshot.traces, rebuild(snapshot)):
        failed = failures(trace)
        if failed:
            what = f"explaining {path}, device {trace.device}"
            report(what)
            job = job_of(snapshot, trace, history, failed[-1])
            found.append(explain(job, partial(_tell, report, what)))
    return found


def _tell(report: Callable[[str], None], what: str, count: int) -> None:
    report(f"{what}: {count} changes tried")


def explain(job: Job, report: Callable[[int], None] = lambda count: None) -> Explanation:
    """`report` is told how many changes were tried so far. Raises ReplayError."""
    job, as_it_was = _as_it_was(job)
    if as_it_was.passes:  # then every change would seem to help
        tried = [] if job.by_us else list(try_policies(job))
        return Explanation(
            job, ["leak"] if causes.leaking_lines(job) else [], as_it_was, as_it_was, tried
        )
    tried = try_all(job, report)
    enough = Outcome(False)
    if job.reserved + job.request.size <= MOST_RESERVED:
        enough = attempt(job, Change(unlimited=True))
    return Explanation(job, _rank(job, tried), as_it_was, enough, tried)


def _as_it_was(job: Job) -> tuple[Job, Outcome]:
    """The replay without a change, and the job that it is of. It may serve the request by the last
    memory that was free. But the device refused, so it had less: then `taken` is raised until the
    request does not fit."""
    outcome, room = attempt(job, Change()), job.room
    left = room.total - (room.taken or 0) - outcome.peak
    if outcome.passes and job.by_us and left <= _NOT_GIVEN:
        tight = replace(job, room=replace(room, taken=room.total - outcome.peak + 1))
        again = attempt(tight, Change())
        if not again.passes and not again.early:
            return tight, again
    return job, outcome


def _rank(job: Job, tried: list[Tried]) -> list[str]:
    """What grows without end comes first, since with more memory it fails later; then what holds
    memory that nobody uses; then who else has it; then what the job needs itself; then what is in
    doubt."""
    helps = {one.kind for one in tried if one.outcome.passes}
    live, size = int(job.sizes[job.live].sum()), job.request.size
    free, largest = causes.free_of_pool(job)
    elsewhere = causes.free_of_other_streams(job)
    leaking = set(causes.leaking_lines(job))
    growing = set(causes.growing_lines(job))
    freed_each = [
        set(one.what["lines"]) for one in tried if one.outcome.passes and one.kind == "free_each"
    ]
    kept = causes.kept_by_forward(job)
    much = int(job.sizes[kept].sum()) >= _KEPT * live
    for_backward = causes.keeps_for_backward(job)
    returned = set(job.line[kept].tolist())
    taken, total = job.room.taken or 0, job.room.total
    much_taken = taken > _MUCH or taken >= _MUCH_OF_ALL * total
    fits = {
        "leak": any(one <= leaking for one in freed_each),
        "pending": "uses_end" in helps,
        "fragmentation": (
            free >= size > largest
            and free - largest >= _PIECES * size
            and ("segments" in helps or sum(job.own_gaps) >= _GAPS * job.room.capacity)
        ),
        "streams": (
            free < size <= free + elsewhere
            and ("segments" in helps or elsewhere >= _GAPS * job.room.capacity)
        ),
        "pool": "release_pool" in helps,
        "fraction": "fraction" in helps,
        "others": "others" in helps and taken >= _OTHERS * total,
        "lengths": "batch" in helps and causes.is_longest_so_far(job),
        "large": size >= _LARGE * job.room.capacity,
        "activations": "checkpoint" in helps and much,
        "returned": not for_backward and much and any(one <= returned for one in freed_each),
        "need": True,
        "growth": any(one & growing - leaking for one in freed_each),
    }
    found = [kind for kind, does in fits.items() if does]
    return found if much_taken else sorted(found, key="others".__eq__)


def largest_lines(job: Job, most: int = 5) -> list[tuple[int, int, int]]:
    """Lines with their live bytes and blocks, the largest first."""
    held = job.held_by_line()
    count = np.bincount(job.line[job.live], minlength=len(job.lines))
    order = np.argsort(-held, kind="stable")[:most].tolist()
    return [(line, int(held[line]), int(count[line])) for line in order if held[line]]
