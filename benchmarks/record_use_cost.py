"""What a mark costs: from Python beside torch's record_stream, from C beside the driver.

``call``: the call alone, on a tensor that lives on. ``cycle``: a tensor of
4 KiB is allocated, marked on another stream and dropped; record_stream's work
comes due at the drop, so only the cycle compares the two fairly. ``eight``: the
cycle of eight tensors that share one mark, for each of them.

``beside``: an allocation while 1,000 or 10,000 freed tensors are held up by
record_stream, whose stream is busy meanwhile.

``C``: the call alone beside a bare cuEventRecord on the same stream, by turns in
one process. Counts: what many marks leave behind, and what a million steps of
allocate, mark and free create.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    column,
    machine,
    parser,
    use_allocator,
)
from turns import CORES, in_children, measured_beside, take_turns

REPEATS = 15
CALLS = 2000
C_ROUNDS, C_CALLS = 15, 5000
STEADY_STEPS = 1_000_000
MOST_OVER_RECORD_STREAM = 300.0  # ns
HELD_UP = (1000, 10_000)  # tensors
HELD_UP_SIZE = 1 << 12  # bytes of each: all together are within the allowance
BESIDE = 200  # allocations


def nanoseconds(call: Callable[[], object], drain: Callable[[], object]) -> float:
    """Median ns of `call`; `drain` empties the device's queues between repeats."""
    for _ in range(200):
        call()
    drain()
    figures = []
    for _ in range(REPEATS):
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        figures.append((time.perf_counter_ns() - begin) / CALLS)
        drain()
    return statistics.median(figures)


def beside_pending(count: int) -> float:
    """ns an allocation beside `count` tensors that a busy stream holds up, the median."""
    import torch

    side = torch.cuda.Stream()
    figures = []
    for _ in range(5):
        held = [torch.empty(HELD_UP_SIZE, dtype=torch.uint8, device="cuda") for _ in range(count)]
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)  # longer than the rest takes
        for one in held:
            one.record_stream(side)
        del one
        held.clear()
        begin = time.perf_counter_ns()
        kept = [torch.empty(HELD_UP_SIZE, dtype=torch.uint8, device="cuda") for _ in range(BESIDE)]
        figures.append((time.perf_counter_ns() - begin) / BESIDE)
        if side.query():
            raise RuntimeError("the stream was idle before the allocations were over")
        del kept
        torch.cuda.synchronize()
    return statistics.median(figures)


def c_costs(loops: ModuleType) -> dict[str, float]:
    """ns a call, each the median of rounds in which the four took turns."""
    names = ("cuEventRecord", "esper_alloc_record_use", "esper_record_use", "eight blocks")
    columns = zip(*loops.mark_costs(C_ROUNDS, C_CALLS), strict=True)
    return {f"C, {name}": statistics.median(one) for name, one in zip(names, columns, strict=True)}


def counts(loops: ModuleType) -> dict[str, float]:
    """What marks leave behind and create, counted by the core."""
    import torch

    import esper_alloc
    from esper_alloc import _core

    sides = [torch.cuda.Stream() for _ in range(2)]
    found: dict[str, float] = {}
    eight = [torch.empty(1024, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    before = _core.driver_calls()["event_record"]
    esper_alloc.record_use(eight, sides[0])
    found["events for eight tensors"] = _core.driver_calls()["event_record"] - before
    del eight
    x = torch.empty(1024, device="cuda")
    torch.cuda.synchronize()
    esper_alloc.record_use(x, sides[1])  # so that what completed was looked at
    with torch.cuda.stream(sides[0]):
        torch.cuda._sleep(20_000_000)  # no mark completes meanwhile
    with torch.cuda.stream(sides[1]):
        torch.cuda._sleep(20_000_000)
    y = torch.empty(1024, device="cuda")
    before = _core.counters(0)["uses_pending"]
    for _ in range(1000):
        for side in sides:
            esper_alloc.record_use(y, side)
    found["uses after 1000 marks"] = (_core.counters(0)["uses_pending"] - before) / len(sides)
    torch.cuda.synchronize()
    loops.steady_ns(STEADY_STEPS // 5)  # warm
    before = _core.counters(0)
    found["steady step"] = loops.steady_ns(STEADY_STEPS)
    after = _core.counters(0)
    for key in ("events_created", "metadata_bytes"):
        found[f"steady, {key}"] = after[key] - before[key]
    return found


def measure(allocator: str) -> dict:
    """Every figure under one allocator, ns, as {name: value}."""
    use_allocator(allocator)
    import loops
    import torch

    module = loops.load()
    figures: dict[str, float] = {"event record, C++": module.event_record_ns(20000)}
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
    if allocator == OURS:
        with torch.no_grad():
            figures.update(c_costs(module))
            figures.update(counts(module))
    for count in HELD_UP:  # last: they leave thousands of blocks behind
        figures[f"beside {count:,}"] = beside_pending(count)
    return {"machine": machine(), "figures": figures}


def main() -> int:
    arguments = parser(__doc__)
    options = arguments.parse_args()
    if options.worker:
        take_turns(in_children(options.worker, lambda: measure(options.worker)), CORES)
        return 0

    results = Results("record_use_cost", options.out)
    cases = [Case(name, name) for name in (OURS, NATIVE)]
    add = partial(add_rows, results)
    if not measured_beside(__file__, cases, options, "pair", add, results):
        return 1
    return 0 if results.save() else 1


def add_rows(results: Results, rounds: Rounds) -> None:
    ours, native = (
        [one[name]["figures"] for one in rounds if name in one] for name in (OURS, NATIVE)
    )

    def row(name: str, key: str, peer: str, side: list[dict], where: str) -> None:
        results.row(name, "ns", column(ours, key), column(side, peer), where)

    for form in ("call", "cycle", "eight"):
        mark, old = f"record_use, {form}", f"record_stream, {form}"
        results.row(
            mark,
            "ns",
            column(ours, mark),
            column(native, old),
            "native, record_stream",
            goal=None if form == "eight" else MOST_OVER_RECORD_STREAM,
            judged="difference",
        )
        row(mark, mark, old, ours, "esper_alloc, record_stream")
    row("using, cycle", "using, cycle", "record_stream, cycle", native, "native, record_stream")
    row("allocate and drop, unmarked", "cycle, unmarked", "cycle, unmarked", native, NATIVE)
    for count in HELD_UP:
        results.row(
            f"allocate beside {count:,} tensors that record_stream holds up", "ns",
            column(ours, f"beside {count:,}"), column(native, f"beside {count:,}"), NATIVE, 1.0,
        )  # fmt: skip
    for name in ("event record, Python", "event record, C++"):
        row(f"record_use, call, beside an {name}", "record_use, call", name, ours, name)
    for name, goal in (
        ("esper_alloc_record_use", 1.5),
        ("esper_record_use", 1.5),
        ("eight blocks", None),
    ):
        bare = column(ours, "C, cuEventRecord")
        results.row(f"C, {name}", "ns", column(ours, f"C, {name}"), bare, "cuEventRecord", goal)
    row("allocate, mark and free, C++", "steady step", "C, cuEventRecord", ours, "cuEventRecord")
    for name, key, unit, allowed in (
        ("events recorded for a list of eight tensors", "events for eight tensors", "events", 1),
        ("uses a stream after 1,000 marks on one tensor", "uses after 1000 marks", "uses", 1),
        ("events created in 10^6 steady steps", "steady, events_created", "events", 0),
        ("memory taken by the core in 10^6 steady steps", "steady, metadata_bytes", "bytes", 0),
    ):
        results.row(name, unit, column(ours, key), [allowed], "at most", allowed, judged="ours")


if __name__ == "__main__":
    raise SystemExit(main())
