"""What it costs to be there: importing, an idle process, the first allocation.

  import      of torch and esper_alloc, over torch alone in the same process (goal:
              30 ms more at most); enable(), which loads the compiled part, besides.
              Fresh processes.
  idle        the device's memory in use once the context is there and nothing was
              allocated (goal: no more than native), and after one tensor came and went
  first       from the first allocation to the end of the first kernel, the context
              being there (goal: no worse than native)

The last two are of children of processes that imported torch, one on ours and one on
each peer in turn: each makes its CUDA context, allocates a tensor and fills it. The first round
is not counted: whoever is first in it has the driver's libraries read from the disk.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    alternate_cases,
    choose_allocator,
    column,
    device_used_mib,
    empty_cache,
    machine,
    nothing_measurable,
    parser,
    peers_here,
    peers_of,
    report,
)
from turns import CORES, in_children, take_turns, turns_of_children

ELEMENTS = 1 << 20  # of float32: 4 MiB
IMPORTS = 5  # fresh processes


def measure_import(allocator: str) -> dict[str, Any]:
    """Milliseconds of this process, which must not have imported torch."""
    begin = time.perf_counter()
    import torch  # noqa: F401

    figures = {"torch_ms": (time.perf_counter() - begin) * 1e3}
    if allocator == OURS:
        import esper_alloc

        figures["import_ms"] = (time.perf_counter() - begin) * 1e3
        esper_alloc.enable()
        figures["enabled_ms"] = (time.perf_counter() - begin) * 1e3
    return figures


def measure_first(allocator: str) -> dict[str, Any]:
    """Milliseconds and MiB of this process, in which CUDA was not used before."""
    import torch

    choose_allocator(allocator)
    begin = time.perf_counter()
    torch.cuda.init()
    torch.cuda.synchronize()  # makes the context
    figures: dict[str, Any] = {"context_ms": (time.perf_counter() - begin) * 1e3}
    figures["idle_mib"] = device_used_mib()
    begin = time.perf_counter()
    x = torch.empty(ELEMENTS, device="cuda")
    allocated = time.perf_counter()
    x.fill_(1.0)
    torch.cuda.synchronize()
    figures["first_ms"] = (time.perf_counter() - begin) * 1e3
    figures["first_allocation_us"] = (allocated - begin) * 1e6
    del x
    empty_cache()
    figures["after_mib"] = device_used_mib()
    return {"machine": machine(), **figures}


def add_rows(results: Results, imports: Rounds, rounds: Rounds) -> None:
    ours = [one[OURS] for one in imports if OURS in one]
    torch_alone = column(ours, "torch_ms")
    results.row(
        "import torch and esper_alloc", "ms", column(ours, "import_ms"), torch_alone,
        "import torch", 30.0, "difference",
    )  # fmt: skip
    results.row(
        "the same, and enable()", "ms", column(ours, "enabled_ms"), torch_alone, "import torch"
    )
    figures = (
        ("idle device memory", "MiB", "idle_mib", 1.0, "ratio"),
        ("the same, after a tensor came and went", "MiB", "after_mib", None, "ratio"),
        ("first allocation to the end of the first kernel", "ms", "first_ms", 1.0, "no_worse"),
        ("first allocation", "us", "first_allocation_us", None, "ratio"),
        ("making the context", "ms", "context_ms", None, "ratio"),
    )
    for peer in peers_of(rounds):
        for name, unit, key, goal, judged in figures:
            goal = goal if peer == NATIVE else None
            results.compare(name, unit, rounds, key, OURS, peer, goal, judged)


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=30)
    arguments.add_argument("--children", action="store_true", help="what a worker measures")
    options = arguments.parse_args()
    if options.worker:
        if options.children:
            take_turns(in_children(options.worker, lambda: measure_first(options.worker)), CORES)
        else:
            report(measure_import(options.worker))
        return 0
    if nothing_measurable():
        return 1
    begin = time.monotonic()
    imports = alternate_cases(__file__, [Case(OURS, OURS)], IMPORTS, seconds=options.seconds / 2)
    left = options.seconds - (time.monotonic() - begin)
    peers, left_out = peers_here()
    cases = [Case(name, name, ("--children",)) for name in (OURS, *peers)]
    results = Results("startup", options.out)
    if not results.of_rounds(
        partial(turns_of_children, __file__, cases, 1 + options.rounds, seconds=left),
        lambda rounds: add_rows(results, imports, rounds[1:]),
        left_out,
    ):
        print("nothing was measured under esper_alloc")
        return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
