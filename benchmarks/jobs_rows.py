"""The rows of whole jobs, made of what each pass reported."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import zip_longest

from common import NATIVE, OURS, PEERS, Options, Rounds, Row, medians

AGAIN = f"{NATIVE}, run again"
LEAST, FASTEST = "least peak allocated of any peer", "fastest peer"
GOAL, OR_MIB = 1.04, 256.0  # of peak reserved, whichever allows more
#: Figures of the whole process.
PEAKS = ("peak_allocated_mib", "peak_reserved_mib")


def title_of(job: str, segments: str | None) -> str:
    return f"{job}, {segments} segments" if segments else job


def passes(measured: Rounds) -> Rounds:
    """Rounds without the first pass. Each has the peaks of the whole process, and the first of them
    the first pass's step time as first_step_ms."""
    if len(measured) < 2:
        return []
    warm_up, *later = measured
    rounds = [{case: dict(figures) for case, figures in one.items()} for one in later]
    for one in rounds:
        for case, figures in one.items():
            figures |= {key: measured[-1].get(case, figures)[key] for key in PEAKS}
    for case, found in rounds[0].items():
        found["machine"] = warm_up[case].get("machine")
        found["first_step_ms"] = warm_up[case]["step_ms"]
    return rounds


def least(rounds: Rounds, key: str) -> str | None:
    """The peer whose median of a figure is the least; None: there is none."""
    peers = {one: value for one, value in medians(rounds, key).items() if one in PEERS}
    return min(peers, key=lambda case: peers[case], default=None)


def with_best(rounds: Rounds) -> Rounds:
    """The rounds, with the best peers under names of their own."""
    smallest, fastest = least(rounds, "peak_allocated_mib"), least(rounds, "step_ms")
    added = [dict(one) for one in rounds]
    for one in added:
        if smallest in one:
            allocated = one[smallest]["peak_allocated_mib"]
            one[LEAST] = {"peak_reserved_mib": allocated, "peak_allocated_mib": allocated}
        if fastest in one:
            one[FASTEST] = one[fastest]
    return added


def whole_job(rounds: Rounds, case: str) -> float:
    """The mean step time over the first pass and all later ones; 0: a pass is missing."""
    found = [one.get(case, {}).get("step_ms", 0.0) for one in rounds]
    found.append(rounds[0].get(case, {}).get("first_step_ms", 0.0))
    return statistics.fmean(found) if all(found) else 0.0


def output_differences(rounds: Rounds, *cases: str) -> list[int]:
    """How many outputs of these cases differ from those of native's same pass."""
    both = [(one[case]["outputs"], one[NATIVE]["outputs"])
            for one in rounds for case in cases if {case, NATIVE} <= one.keys()]  # fmt: skip
    return [sum(x != y for x, y in zip_longest(a, b)) for a, b in both]


def job_rows(job: str, by_place: bool, rounds: Rounds, options: Options) -> Iterator[Row]:
    """Every row of one job. `by_place`: what it computes may depend on where tensors lie, so where
    peers do not agree, nothing is asked of ours."""
    title = title_of(job, options.segments)
    reserved = ("peak reserved", "MiB", "peak_reserved_mib")
    live = medians(rounds, reserved[2]).get(LEAST)
    peak = {"peer_is": least(rounds, "peak_allocated_mib")}
    goal = max(GOAL, 1 + OR_MIB / live) if live else GOAL
    yield Row(f"{title}: peak reserved", *reserved[1:], OURS, LEAST, goal, more=peak)
    fastest = {"peer_is": least(rounds, "step_ms")}
    step = ("ms", "step_ms", OURS)
    yield Row(f"{title}: step time", *step, FASTEST, 1.0, "no_more", more=fastest)
    means = {case: whole_job(rounds, case) for case in (OURS, FASTEST, NATIVE, AGAIN)}
    over = f"{title}: step time over the whole job"
    if means[OURS] and means[FASTEST]:
        yield Row(over, "ms", "", means[OURS], means[FASTEST], 1.0, peer_name=FASTEST)
    if AGAIN in rounds[0]:
        name = f"{title}: step time of native, run again"
        yield Row(name, "ms", "step_ms", AGAIN, NATIVE)
        if all(means[case] for case in (OURS, NATIVE, AGAIN)):
            name, slower = f"{over}, within native's own spread", max(means[NATIVE], means[AGAIN])
            yield Row(name, "ms", "", means[OURS], slower, 1.0, peer_name="native's slower run")
    yield Row(f"{title}: peak allocated", "MiB", "peak_allocated_mib", OURS, LEAST)
    ours = output_differences(rounds, OURS)
    if ours:
        peers = output_differences(rounds, *(one for one in PEERS if one != NATIVE))
        agreed = bool(peers) and not any(peers)
        most = None if by_place and not agreed else 0.0
        yield Row(f"{title}: outputs that differ from native's", "outputs", "", ours, peers or [0],
                  most, "ours", peer_name="the other peers")  # fmt: skip
    for peer in PEERS:
        if any(peer in one for one in rounds):
            yield Row(f"{title}: peak reserved", *reserved[1:], OURS, peer)
            yield Row(f"{title}: step time", *step, peer)
