"""How long the slowest mallocs of a job take.

The allocations and frees of recorded jobs (examples/traces, tests/traces, and the folder
that ESPER_TRACES names) run in C++ on PyTorch's current allocator, each malloc timed,
nothing running on the GPU. Per job:

  the whole job   from an emptied cache, so memory comes from the device on the way
  once warm       the same again and again, with the memory that is there

of which the median, the 99.9th percentile (goal: at most native's, of the whole job)
and the sum of all are compared, medians over the repetitions in a process.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
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

REPETITIONS = 7


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(len(ordered) * share, 6)) - 1)]


def figures(runs: Sequence[Sequence[int]], prefix: str) -> dict[str, float]:
    """Medians over runs of what each run's mallocs took: us."""
    return {
        f"{prefix}_median_us": statistics.median(percentile(one, 0.5) for one in runs) / 1e3,
        f"{prefix}_slow_us": statistics.median(percentile(one, 0.999) for one in runs) / 1e3,
        f"{prefix}_sum_us": statistics.median(sum(one) for one in runs) / 1e3,
    }


def measure(allocator: str) -> dict[str, Any]:
    use_allocator(allocator)
    import loops
    import torch

    module = loops.load("malloc_times")
    torch.zeros(1, device="cuda")
    found: dict[str, dict[str, float]] = {}
    for path in traces():
        [recording, *more] = replay.load_recordings(path)
        operations = recording.operations
        if more or operations.start:
            continue  # several devices, or no whole job

        def run() -> array[int]:
            return array(
                "I",
                module.malloc_ns(operations.packed, operations.slots, max(operations.streams, 1)),
            )

        whole = []
        for _ in range(REPETITIONS):
            torch.cuda.synchronize()
            empty_cache()
            whole.append(run())
        warm = [run() for _ in range(REPETITIONS)]
        found[path.name.split(".")[0]] = {**figures(whole, "whole"), **figures(warm, "warm")}
        empty_cache()
    return {"machine": machine(), "jobs": found}


def add_rows(results: Results, rounds: Sequence[dict[str, dict[str, Any]]]) -> None:
    names = sorted({name for one in rounds for case in one.values() for name in case["jobs"]})
    for name in names:
        of_job = [
            {case: found["jobs"][name] for case, found in one.items() if name in found["jobs"]}
            for one in rounds
        ]
        for peer in peers_of(of_job):
            for title, key in (
                ("malloc, the whole job, 99.9th percentile", "whole_slow_us"),
                ("malloc, the whole job, median", "whole_median_us"),
                ("malloc, the whole job, all together", "whole_sum_us"),
                ("malloc, once warm, 99.9th percentile", "warm_slow_us"),
                ("malloc, once warm, median", "warm_median_us"),
            ):
                goal = 1.0 if (peer, key) == (NATIVE, "whole_slow_us") else None
                results.compare(f"{name}: {title}", "us", of_job, key, OURS, peer, goal)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--segments", choices=("classic", "mapped"), help="of ours")
    options = arguments.parse_args()
    if options.worker:
        take_turns(in_children(options.worker, lambda: measure(options.worker)), CORES)
        return 0
    chosen = {"ESPER_ALLOC_SEGMENTS": options.segments} if options.segments else {}
    peers, left_out = peers_here()
    cases = [Case(OURS, OURS, (), chosen), *(Case(peer, peer) for peer in peers)]
    rounds, found = measured_beside(__file__, cases, options, "malloc_times")
    if not found:
        return 1
    results = Results("malloc_times", options.out)
    results.describe(found[0]["machine"], left_out)
    add_rows(results, rounds)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
