"""What an allocation and its free cost, beside every peer.

In C++ ``raw_alloc`` + ``raw_delete`` pairs of 512 B, 1 MiB and 64 MiB (goal: 0.4 of
the time of either of native's modes), and ``allocate()``, which tensors call; in Python
``torch.empty`` (goal: no slower), most of which is PyTorch's own. What is allocated is
dropped at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

from common import (
    EXPANDABLE,
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    machine,
    parser,
    peers_here,
    peers_of,
    use_allocator,
)
from turns import CORES, in_children, measured_beside, take_turns

SIZES = {"512 B": 512, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
#: What is measured, and at most how much of either's time it may take.
HAVE_GOALS = (NATIVE, EXPANDABLE)
GOALS = {
    **{f"raw_alloc + raw_delete, {size}": 0.4 for size in SIZES},
    "allocate() and drop, 4 KiB": None,
    "torch.empty and drop, 4 KiB": 1.0,
}
TENSOR = 4096  # bytes


def empty_ns(count: int) -> float:
    import torch

    begin = time.perf_counter()
    for _ in range(count):
        torch.empty(TENSOR // 4, device="cuda")
    return (time.perf_counter() - begin) * 1e9 / count


def measure(allocator: str) -> dict:
    """Every figure, in this process, as {name: value}."""
    use_allocator(allocator)
    import loops

    module = loops.load()
    pairs = [partial(module.pair_ns, size) for size in SIZES.values()]
    timed = dict(
        zip(GOALS, [*pairs, partial(module.data_pointer_ns, TENSOR), empty_ns], strict=True)
    )
    figures: dict[str, float] = {}
    for name, ns in timed.items():
        ns(5000)
        figures[name] = statistics.median(ns(20000) for _ in range(15))
    return {"machine": machine(), "figures": figures}


def add_rows(results: Results, rounds: Sequence[dict[str, dict[str, float]]]) -> None:
    for peer in peers_of(rounds, HAVE_GOALS):
        for name, goal in GOALS.items():
            wanted = goal if peer in HAVE_GOALS else None
            results.compare(name, "ns", rounds, name, OURS, peer, wanted)


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    options = arguments.parse_args()
    if options.worker:
        take_turns(in_children(options.worker, lambda: measure(options.worker)), CORES)
        return 0

    peers, left_out = peers_here()
    cases = [Case(name, name) for name in (OURS, *peers)]
    results = Results("pair", options.out)

    def add(rounds: Rounds) -> None:
        figures = [{case: one["figures"] for case, one in each.items()} for each in rounds]
        add_rows(results, figures)

    if not measured_beside(__file__, cases, options, "pair", add, results, left_out):
        return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
