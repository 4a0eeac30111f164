"""Many threads that allocate at once, each on a stream of its own, beside every peer.

In C++, for 1, 4 and 16 threads and blocks of 4 KiB and 1 MiB: how many pairs of an
allocation and its free all threads make in a second together,

  pairs          each thread frees what it allocated
  handed on      the next thread frees it; up to 16 blocks are on the way

Goals for 16 threads: 30 times native's pairs, 20 times where they are handed on. They
need a core for each thread; the result file says how many there are.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    machine,
    parser,
    peers_here,
    peers_of,
    use_allocator,
)
from turns import in_children, measured_beside, take_turns

SIZES = {"4 KiB": 4096, "1 MiB": 1 << 20}
THREADS = (1, 4, 16)
REPETITIONS = 3
#: By whether blocks are handed on: the title, and how often native's pairs 16 threads make.
KINDS = {False: ("pairs", 30.0), True: ("pairs, handed on", 20.0)}


def key_of(threads: int, size: str, handing: bool) -> str:
    return f"{KINDS[handing][0]}, {size}, {threads} threads"


def measure(allocator: str, most: int, milliseconds: int) -> dict[str, Any]:
    """Million pairs a second, the median of the repetitions, of at most `most` threads."""
    use_allocator(allocator)
    import loops

    module = loops.load("threads")
    figures: dict[str, float] = {}
    for name, size in SIZES.items():
        for handing in KINDS:
            for threads in THREADS:
                if threads <= most and threads > handing:
                    figures[key_of(threads, name, handing)] = statistics.median(
                        module.pairs_rate(threads, size, handing, milliseconds)
                        for _ in range(REPETITIONS)
                    )
    about = {**machine(), "cores": str(len(os.sched_getaffinity(0)))}
    return {"machine": about, "figures": figures}


def add_rows(results: Results, rounds: Sequence[dict[str, dict[str, Any]]]) -> None:
    figures = [{case: found["figures"] for case, found in one.items()} for one in rounds]
    known = {key for one in figures for found in one.values() for key in found}
    keys = [
        (key_of(threads, name, handing), goal if threads == max(THREADS) else None)
        for name in SIZES for handing, (_, goal) in KINDS.items() for threads in THREADS
    ]  # fmt: skip
    for peer in peers_of(figures):
        for key, goal in keys:
            if key in known:
                wanted = goal if peer == NATIVE else None
                results.compare(key, "million/s", figures, key, OURS, peer, wanted, "at_least")


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    arguments.add_argument("--most", type=int, default=max(THREADS), help="threads")
    arguments.add_argument(
        "--milliseconds", type=int, default=100, help="that each rate is measured for"
    )
    options = arguments.parse_args()
    if options.worker:
        take_turns(
            in_children(
                options.worker, lambda: measure(options.worker, options.most, options.milliseconds)
            )
        )
        return 0
    args = ("--most", str(options.most), "--milliseconds", str(options.milliseconds))
    peers, left_out = peers_here()
    cases = [Case(name, name, args) for name in (OURS, *peers)]
    results = Results("threads", options.out)
    add = partial(add_rows, results)
    if not measured_beside(__file__, cases, options, "threads", add, results, left_out):
        return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
