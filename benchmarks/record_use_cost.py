"""What a mark costs from Python, beside torch's record_stream.

``call``: the call alone, on a tensor that lives on. ``cycle``: a tensor of
4 KiB is allocated, marked on another stream and dropped; record_stream's work
comes due at the drop, so only the cycle compares the two fairly. ``eight``: the
cycle of eight tensors that share one mark, for each of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from common import (
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

REPEATS = 15
CALLS = 2000


def nanoseconds(call: Callable[[], object], settle: Callable[[], object]) -> float:
    """Median ns of `call`; `settle` empties the device's queues between repeats."""
    for _ in range(200):
        call()
    settle()
    figures = []
    for _ in range(REPEATS):
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        figures.append((time.perf_counter_ns() - begin) / CALLS)
        settle()
    return statistics.median(figures)


def measure(allocator: str) -> dict:
    """Every figure under one allocator, ns, as {name: value}."""
    use_allocator(allocator)
    import loops
    import torch

    figures: dict[str, float] = {"event record, C++": loops.load().event_record_ns(20000)}
    side = torch.cuda.Stream()
    x = torch.empty(1024, device="cuda")
    event = torch.cuda.Event()

    def plain_cycle() -> None:
        torch.empty(1024, device="cuda")

    def stream_cycle() -> None:
        torch.empty(1024, device="cuda").record_stream(side)

    def stream_eight() -> None:
        for one in [torch.empty(1024, device="cuda") for _ in range(8)]:
            one.record_stream(side)

    cases: dict[str, Callable[[], object]] = {
        "event record, Python": lambda: event.record(side),
        "cycle, unmarked": plain_cycle,
        "record_stream, cycle": stream_cycle,
        "record_stream, eight": stream_eight,
        "record_stream, call": lambda: x.record_stream(side),
    }
    if allocator == OURS:
        import esper_alloc

        def use_cycle() -> None:
            esper_alloc.record_use(torch.empty(1024, device="cuda"), side)

        def use_eight() -> None:
            esper_alloc.record_use([torch.empty(1024, device="cuda") for _ in range(8)], side)

        def using_cycle() -> None:
            with esper_alloc.using(torch.empty(1024, device="cuda"), stream=side):
                pass

        y = torch.empty(1024, device="cuda")
        cases["record_use, call"] = lambda: esper_alloc.record_use(y, side)
        cases["record_use, cycle"] = use_cycle
        cases["record_use, eight"] = use_eight
        cases["using, cycle"] = using_cycle

    gc.disable()
    with torch.no_grad():
        for name, call in cases.items():
            figures[name] = nanoseconds(call, torch.cuda.synchronize)
    for name in ("record_stream, eight", "record_use, eight"):
        if name in figures:
            figures[name] /= 8
    return {"machine": machine(), "figures": figures}


def main() -> int:
    arguments = parser(__doc__)
    options = arguments.parse_args()
    if options.worker:
        report(measure(options.worker))
        return 0

    import loops

    loops.load()  # compile once, outside the workers' time
    found = alternate(__file__, (OURS, NATIVE), options.rounds, seconds=options.seconds)
    if OURS not in found:
        print("nothing was measured under esper_alloc")
        return 1
    results = Results("record_use_cost", options.out)
    results.describe(found[OURS][0]["machine"])
    ours, native = ([one["figures"] for one in found.get(name, [])] for name in (OURS, NATIVE))

    def row(name: str, key: str, peer: str, side: list[dict], where: str) -> None:
        results.row(name, "ns", column(ours, key), column(side, peer), where)

    for form in ("call", "cycle", "eight"):
        mark, old = f"record_use, {form}", f"record_stream, {form}"
        row(mark, mark, old, native, "native, record_stream")
        row(mark, mark, old, ours, "esper_alloc, record_stream")
    row("using, cycle", "using, cycle", "record_stream, cycle", native, "native, record_stream")
    row("allocate and drop, unmarked", "cycle, unmarked", "cycle, unmarked", native, NATIVE)
    for name in ("event record, Python", "event record, C++"):
        row(f"record_use, call, beside an {name}", "record_use, call", name, ours, name)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
