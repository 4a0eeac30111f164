"""What an allocation and its free cost in C++, beside native's two modes.

Measures ``raw_alloc`` + ``raw_delete`` pairs of 512 B, 1 MiB and 64 MiB (the
goal: half of native's default), churn among many live blocks, and pairs from
several threads, each on a stream of its own.
"""

from __future__ import annotations

import statistics

from common import (
    EXPANDABLE,
    NATIVE,
    OURS,
    Results,
    alternate,
    column,
    machine,
    parser,
    report,
    use_allocator,
)

SIZES = {"512 B": 512, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
LIVE = (100, 1000, 10000)
THREADS = (1, 4, 16)


def measure(allocator: str) -> dict:
    """Every figure, in this process, as {name: value}."""
    use_allocator(allocator)
    import loops

    module = loops.load()
    figures: dict[str, float] = {}
    for name, size in SIZES.items():
        module.pair_ns(size, 5000)
        figures[name] = statistics.median(module.pair_ns(size, 20000) for _ in range(15))
    for live in LIVE:
        figures[f"live {live}"] = statistics.median(module.churn_ns(live, 20000) for _ in range(3))
    for threads in THREADS:
        module.threads_rate(threads, 4096, 1000)
        figures[f"threads {threads}"] = statistics.median(
            module.threads_rate(threads, 4096, 20000) for _ in range(3)
        )
    return {"machine": machine(), "figures": figures}


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    options = arguments.parse_args()
    if options.worker:
        report(measure(options.worker))
        return 0

    import loops

    loops.load()  # compile once, outside the workers' time
    found = alternate(
        __file__, (OURS, NATIVE, EXPANDABLE), options.rounds, seconds=options.seconds
    )
    if OURS not in found:
        print("nothing was measured under esper_alloc")
        return 1
    results = Results("pair", options.out)
    results.describe(found[OURS][0]["machine"])
    figures = {name: [one["figures"] for one in ones] for name, ones in found.items()}
    for peer in (NATIVE, EXPANDABLE):
        others = figures.get(peer, [])

        def row(name: str, unit: str, key: str, goal: float | None = None) -> None:
            results.row(name, unit, column(figures[OURS], key), column(others, key), peer, goal)

        for size in SIZES:
            row(f"raw_alloc + raw_delete, {size}", "ns", size, 0.5 if peer == NATIVE else None)
        for live in LIVE:
            row(f"churn among {live} live blocks", "ns", f"live {live}")
        for threads in THREADS:
            row(f"pairs from {threads} threads", "million/s", f"threads {threads}")
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
