"""What automatic uses cost an operator, beside the same process with marked uses.

``one stream``: no other stream exists, so nothing is registered (goal: within 1%), for
an allocation, an operator and a training step of GPT-2 (train.py's).
``at home``: there is another stream, and the operator's tensors belong to the current one.
``elsewhere``: they belong to another one, and were noted before.
``dropped``: the same with a new tensor each time, which is dropped at once: its event is
recorded at the drop.

``prefetching GPT-2 step``: each batch copied on a stream of its own (goal: within 1%).

Marked and automatic uses take turns in one process. Goal: 150 ns an operator.

``--cpu`` measures without a GPU what the callback costs an operator on CPU tensors, and prints
it; there is no result file.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from common import OURS, Case, Results, Rounds, column, machine, parser
from turns import CORES, compare_children, in_children, take_turns
from workloads import import_job

REPEATS, CALLS = 31, 2000
STEP_REPEATS, STEPS = 15, 5
MOST_NS = 150.0  # an operator
MOST_TIMES = 1.01  # of one stream, and of a step
KINDS = ("marked", "automatic")
OPERATORS = ("add", "view", "add of lists, a tensor")
LIST = 100  # tensors
ONE_STREAM = ("torch.empty and drop", "add")
ONE_STREAM_STEP, STEP = "GPT-2 step, one stream", "prefetching GPT-2 step"

Loop = Callable[[], object]


def by_turns(
    choose: Callable[[str], None], call: Loop, drain: Loop, whole: bool = False, calls: int = 0
) -> dict[str, float]:
    """Median ns of `call` with each kind of uses; `drain` empties the device's queues. `whole`:
    `call` is a step of a job, and is over when the queues are empty. `calls`: CALLS by default."""
    figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
    repeats, calls = (STEP_REPEATS, STEPS) if whole else (REPEATS, calls or CALLS)
    for repeat in range(repeats + 1):
        for kind in KINDS if repeat % 2 else reversed(KINDS):
            choose(kind)
            drain()
            begin = time.perf_counter_ns()
            for _ in range(calls):
                call()
            if whole:
                drain()
            taken = (time.perf_counter_ns() - begin) / calls
            drain()
            if repeat:  # the first is to warm up
                figures[kind].append(taken)
    return {kind: statistics.median(taken) for kind, taken in figures.items()}


def operators(device: str) -> dict[str, Loop]:
    """Calls of one operator each, on tensors that are made here."""
    import torch

    a, b, out = (torch.ones(16, device=device) for _ in range(3))
    many = [torch.ones(16, device=device) for _ in range(LIST)]

    def add_lists() -> None:
        torch._foreach_add_(many, 1.0)

    loops: tuple[Loop, ...] = (lambda: torch.add(a, b, out=out), lambda: a.view(4, 4), add_lists)
    return dict(zip(OPERATORS, loops, strict=True))


def observe(kind: str) -> None:
    """From now on operators are seen, or not."""
    from esper_alloc import _torch

    _torch.automatic_uses(kind == "automatic")
    if kind == "automatic":
        _torch.observe_now()


def measure_operators(
    figures: dict[str, float], where: str, calls: dict[str, Loop], drain: Loop
) -> None:
    for name, call in calls.items():
        tensors = LIST if "lists" in name else 1
        for kind, ns in by_turns(observe, call, drain, calls=CALLS * 10 // (9 + tensors)).items():
            figures[f"{name}, {where}, {kind}"] = ns / tensors


def prefetching() -> Loop:
    """A training step whose batch is copied on a stream of its own, and marked."""
    import torch
    from train import gpt2

    import esper_alloc
    from esper_alloc import _torch

    step = gpt2(False)
    host = torch.randint(50257, (8, 1024)).pin_memory()
    tokens = torch.empty_like(host, device="cuda")
    copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()

    def call() -> None:
        with torch.cuda.stream(copies):
            batch = host.to("cuda", non_blocking=True)
        compute.wait_stream(copies)
        tokens.copy_(batch)
        step()
        if not _torch.is_observing():
            esper_alloc.record_use(batch, compute)

    return call


def measure() -> dict:
    """Every figure, in this process, as {name: value}."""
    import torch
    from train import gpt2

    import esper_alloc
    from esper_alloc import _torch

    esper_alloc.enable(uses="automatic")
    torch.cuda.init()
    gc.disable()
    figures: dict[str, float] = {}
    synchronize = torch.cuda.synchronize
    with torch.no_grad():
        calls = operators("cuda")
        alone: dict[str, Loop] = {
            ONE_STREAM[0]: lambda: torch.empty(1024, device="cuda"),
            ONE_STREAM[1]: calls["add"],
        }

        def choose(kind: str) -> None:
            _torch.automatic_uses(kind == "automatic")

        for name, call in alone.items():
            for kind, ns in by_turns(choose, call, synchronize).items():
                figures[f"{name}, one stream, {kind}"] = ns
    for kind, ns in by_turns(choose, gpt2(False), synchronize, whole=True).items():
        figures[f"{ONE_STREAM_STEP}, {kind}"] = ns / 1e6
    assert not _torch.is_observing()
    with torch.no_grad():
        side = torch.cuda.Stream()
        measure_operators(figures, "at home", calls, synchronize)
        with torch.cuda.stream(side):
            measure_operators(figures, "elsewhere", calls, synchronize)

        x = torch.ones(16, device="cuda")

        def use_and_drop() -> None:
            y = torch.empty(16, device="cuda")
            with torch.cuda.stream(side):
                torch.add(x, x, out=y)

        measure_operators(figures, "dropped", {"add": use_and_drop}, synchronize)
    for kind, ns in by_turns(observe, prefetching(), synchronize, whole=True).items():
        figures[f"{STEP}, {kind}"] = ns / 1e6
    return {"machine": machine(), "figures": figures}


def add_rows(results: Results, rounds: Rounds) -> None:
    ours = [one[OURS]["figures"] for one in rounds if OURS in one]

    def row(name: str, goal: float | None, judged: str = "difference", unit: str = "ns") -> None:
        automatic, marked = (column(ours, f"{name}, {kind}") for kind in reversed(KINDS))
        results.row(name, unit, automatic, marked, "marked uses", goal, judged)

    for name in ONE_STREAM:
        row(f"{name}, one stream", MOST_TIMES, "ratio")
    for where in ("at home", "elsewhere"):
        for name in OPERATORS:
            row(f"{name}, {where}", MOST_NS)
    row("add, dropped", None)
    for name in (ONE_STREAM_STEP, STEP):
        row(name, MOST_TIMES, "ratio", "ms")


def on_the_cpu() -> None:
    """Prints what the callback costs where no tensor has memory of the GPU."""
    import torch

    figures: dict[str, float] = {}
    with torch.no_grad():
        measure_operators(figures, "CPU", operators("cpu"), lambda: None)
    for name in OPERATORS:
        marked, automatic = (figures[f"{name}, CPU, {kind}"] for kind in KINDS)
        print(f"{name}: {automatic:.0f} ns, marked {marked:.0f}, more {automatic - marked:.0f}")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--cpu", action="store_true", help="without a GPU; no result file")
    options = arguments.parse_args()
    if options.cpu:
        on_the_cpu()
        return 0
    if options.worker:
        take_turns(in_children(OURS, measure, lambda: import_job("gpt2")), CORES)
        return 0

    return compare_children(__file__, [Case(OURS, OURS)], options, add_rows)


if __name__ == "__main__":
    raise SystemExit(main())
