"""How long the slowest mallocs of a job take, and all its mallocs and frees together.

    malloc_times.py              # the jobs that come along
    malloc_times.py FILE...      # others: what _dump_snapshot() wrote

The allocations and frees of recorded jobs (examples/traces, tests/traces, and the folder
that ESPER_TRACES names) run in C++ on PyTorch's current allocator, each one timed,
nothing running on the GPU. Per job:

  the whole job   from an emptied cache, so memory comes from the device on the way
  once warm       the same again and again, with the memory that is there

of which the median, the 99.9th percentile (goal for the whole job: 1.5 of native's), the
sum of all mallocs (goal for the whole job: at most native's) and that of mallocs and frees
are compared; medians over the repetitions in a process. --cold leaves out what is warm.
jobs.py --inside does it for its own jobs.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    empty_cache,
    machine,
    parser,
    peers_here,
    peers_of,
    use_allocator,
)
from replay_peaks import traces
from turns import CORES, in_children, measured_beside, take_turns

from esper_alloc.replay import replay
from esper_alloc.replay.operations import Operations
from esper_alloc.replay.snapshot import SnapshotError

REPETITIONS = 7
#: How much of native's time a figure may take.
GOALS = {"whole_slow_us": 1.5, "whole_sum_us": 1.0}


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(len(ordered) * share, 6)) - 1)]


#: ns of each malloc of a run, and of each free.
Run = tuple[Sequence[int], Sequence[int]]


def figures(timed: Sequence[Run], prefix: str) -> dict[str, float]:
    """Medians over runs of what each run's mallocs took, and with its frees: us."""
    runs = [mallocs for mallocs, _ in timed]
    return {
        f"{prefix}_inside_us": statistics.median(sum(a) + sum(b) for a, b in timed) / 1e3,
        f"{prefix}_median_us": statistics.median(percentile(one, 0.5) for one in runs) / 1e3,
        f"{prefix}_slow_us": statistics.median(percentile(one, 0.999) for one in runs) / 1e3,
        f"{prefix}_sum_us": statistics.median(sum(one) for one in runs) / 1e3,
    }


def whole_jobs(paths: Sequence[Path]) -> dict[str, Operations]:
    """The recorded jobs that are whole and on one device, by the names of their files."""
    found = {}
    for path in paths:
        jobs = [recording.operations for recording in replay.load_recordings(path)]
        if len(jobs) == 1 and not jobs[0].start:
            found[path.name.split(".")[0]] = jobs[0]
    return found


def measure(allocator: str, jobs: dict[str, Operations], cold: bool) -> dict[str, Any]:
    use_allocator(allocator)
    import loops
    import torch

    module = loops.load("malloc_times")
    torch.zeros(1, device="cuda")

    def run(job: Operations) -> Run:
        mallocs, frees = module.times_ns(job.packed, job.slots, max(job.streams, 1))
        return array("I", mallocs), array("I", frees)

    found: dict[str, dict[str, float]] = {}
    for name, job in jobs.items():
        whole = []
        for _ in range(REPETITIONS):
            torch.cuda.synchronize()
            empty_cache()
            whole.append(run(job))
        found[name] = figures(whole, "whole")
        if not cold:
            found[name] |= figures([run(job) for _ in range(REPETITIONS)], "warm")
        empty_cache()
    return {"machine": machine(), "jobs": found}


def rounds_of(
    name: str, rounds: Sequence[dict[str, dict[str, Any]]]
) -> list[dict[str, dict[str, float]]]:
    """The figures of one job alone."""
    return [
        {case: found["jobs"][name] for case, found in one.items() if name in found["jobs"]}
        for one in rounds
    ]


def add_rows(results: Results, rounds: Sequence[dict[str, dict[str, Any]]]) -> None:
    names = sorted({name for one in rounds for case in one.values() for name in case["jobs"]})
    for name in names:
        of_job = rounds_of(name, rounds)
        for peer in peers_of(of_job):
            for title, key in (
                ("malloc, the whole job, 99.9th percentile", "whole_slow_us"),
                ("malloc, the whole job, median", "whole_median_us"),
                ("malloc, the whole job, all together", "whole_sum_us"),
                ("malloc and free, the whole job, all together", "whole_inside_us"),
                ("malloc, once warm, 99.9th percentile", "warm_slow_us"),
                ("malloc, once warm, median", "warm_median_us"),
                ("malloc and free, once warm, all together", "warm_inside_us"),
            ):
                if not any(key in figures for one in of_job for figures in one.values()):
                    continue
                goal = GOALS.get(key) if peer == NATIVE else None
                results.compare(f"{name}: {title}", "us", of_job, key, OURS, peer, goal)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "files", metavar="FILE", nargs="*", type=Path, help="snapshots; default: as above"
    )
    arguments.add_argument("--cold", action="store_true", help="from an emptied cache only")
    arguments.add_argument("--segments", choices=("classic", "mapped"), help="of ours")
    options = arguments.parse_args()
    if options.worker:
        jobs: dict[str, Operations] = {}
        measured = in_children(
            options.worker,
            lambda: measure(options.worker, jobs, options.cold),
            lambda: jobs.update(whole_jobs(options.files or traces())),
        )
        take_turns(measured, CORES)
        return 0
    try:
        jobs = whole_jobs(options.files)
    except (OSError, SnapshotError) as error:
        print(f"malloc_times.py: {error}")
        return 2
    files = (*map(str, options.files), *(["--cold"] if options.cold else []))
    if options.files and not jobs:
        print("malloc_times.py: none of these is a whole job on one device")
        return 2
    chosen = {"ESPER_ALLOC_SEGMENTS": options.segments} if options.segments else {}
    peers, left_out = peers_here()
    cases = [Case(OURS, OURS, files, chosen), *(Case(peer, peer, files) for peer in peers)]
    results = Results("malloc_times", options.out)
    add = partial(add_rows, results)
    if not measured_beside(__file__, cases, options, "malloc_times", add, results, left_out):
        return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
