"""What it costs to be there: importing, an idle process, the first allocation.

Fresh processes on ours and on native, in turn. Each imports torch and, on ours,
then esper_alloc; makes its CUDA context; and allocates a tensor and fills it.

  import      of torch and esper_alloc, over torch alone in the same process (goal:
              30 ms more at most); enable(), which loads the compiled part, besides
  idle        the device's memory in use once the context is there and nothing was
              allocated (goal: no more than native), and after one tensor came and went
  first       from the first allocation to the end of the first kernel, the context
              being there (goal: no worse than native)
"""

from __future__ import annotations

import time
from typing import Any

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    alternate_cases,
    column,
    device_used_mib,
    gpu_missing,
    machine,
    parser,
    report,
)

ELEMENTS = 1 << 20  # of float32: 4 MiB


def measure(allocator: str) -> dict[str, Any]:
    """Milliseconds and MiB of this process, which must not have imported torch."""
    begin = time.perf_counter()
    import torch

    imported = time.perf_counter()
    figures: dict[str, Any] = {"torch_ms": (imported - begin) * 1e3}
    if allocator == OURS:
        import esper_alloc

        there = time.perf_counter()
        esper_alloc.enable()
        enabled = time.perf_counter()
        figures["import_ms"] = (there - begin) * 1e3
        figures["enabled_ms"] = (enabled - begin) * 1e3
    begin = time.perf_counter()
    torch.cuda.init()
    torch.cuda.synchronize()  # makes the context
    figures["context_ms"] = (time.perf_counter() - begin) * 1e3
    figures["idle_mib"] = device_used_mib()
    begin = time.perf_counter()
    x = torch.empty(ELEMENTS, device="cuda")
    allocated = time.perf_counter()
    x.fill_(1.0)
    torch.cuda.synchronize()
    figures["first_ms"] = (time.perf_counter() - begin) * 1e3
    figures["first_allocation_us"] = (allocated - begin) * 1e6
    del x
    torch.cuda.empty_cache()
    figures["after_mib"] = device_used_mib()
    return {"machine": machine(), **figures}


def add_rows(results: Results, rounds: list[dict[str, dict[str, Any]]]) -> None:
    ours = [one[OURS] for one in rounds if OURS in one]
    torch_alone = column(ours, "torch_ms")
    results.row(
        "import torch and esper_alloc", "ms", column(ours, "import_ms"), torch_alone,
        "import torch", 30.0, "difference",
    )  # fmt: skip
    results.row(
        "the same, and enable()", "ms", column(ours, "enabled_ms"), torch_alone, "import torch"
    )
    for name, unit, key, goal, judged in (
        ("idle device memory", "MiB", "idle_mib", 1.0, "ratio"),
        ("the same, after a tensor came and went", "MiB", "after_mib", None, "ratio"),
        ("first allocation to the end of the first kernel", "ms", "first_ms", 1.0, "no_worse"),
        ("first allocation", "us", "first_allocation_us", None, "ratio"),
        ("making the context", "ms", "context_ms", None, "ratio"),
    ):
        results.compare(name, unit, rounds, key, OURS, NATIVE, goal, judged)


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=12)
    options = arguments.parse_args()
    if options.worker:
        report(measure(options.worker))
        return 0
    why = gpu_missing()
    if why:
        print(f"nothing can be measured: {why}")
        return 1
    cases = [Case(OURS, OURS), Case(NATIVE, NATIVE)]
    rounds = alternate_cases(__file__, cases, options.rounds, seconds=options.seconds)
    found = [one[OURS] for one in rounds if OURS in one]
    if not found:
        print("nothing was measured under esper_alloc")
        return 1
    results = Results("startup", options.out)
    results.describe(found[0]["machine"])
    add_rows(results, rounds)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
