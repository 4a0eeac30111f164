"""What an allocation and its free cost in C++, beside native's two modes.

Measures ``raw_alloc`` + ``raw_delete`` pairs of 512 B, 1 MiB and 64 MiB. The goal:
0.4 of either's time.
"""

from __future__ import annotations

import statistics

from common import (
    EXPANDABLE,
    NATIVE,
    OURS,
    Case,
    Results,
    machine,
    parser,
    use_allocator,
)
from turns import in_children, measured_beside, take_turns

PEERS = (NATIVE, EXPANDABLE)
GOAL = 0.4  # of either peer's time

SIZES = {"512 B": 512, "1 MiB": 1 << 20, "64 MiB": 64 << 20}


def measure(allocator: str) -> dict:
    """Every figure, in this process, as {name: value}."""
    use_allocator(allocator)
    import loops

    module = loops.load()
    figures: dict[str, float] = {}
    for name, size in SIZES.items():
        module.pair_ns(size, 5000)
        figures[name] = statistics.median(module.pair_ns(size, 20000) for _ in range(15))
    return {"machine": machine(), "figures": figures}


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    options = arguments.parse_args()
    if options.worker:
        take_turns(in_children(options.worker, lambda: measure(options.worker)))
        return 0

    cases = [Case(name, name) for name in (OURS, *PEERS)]
    rounds, found = measured_beside(__file__, cases, options, "pair")
    if not found:
        return 1
    results = Results("pair", options.out)
    results.describe(found[0]["machine"])
    figures = [{case: one["figures"] for case, one in each.items()} for each in rounds]
    for peer in PEERS:
        for size in SIZES:
            results.compare(f"raw_alloc + raw_delete, {size}", "ns", figures, size, OURS, peer, GOAL)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
