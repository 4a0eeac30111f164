"""What an audit with a fence costs: a training step of GPT-2 (124 M parameters) and the memory that
it reserves, without an audit, in an audit, and in an audit with a fence.

A fence is for finding errors, so there is no goal. Each kind runs in a fresh process.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

from common import (
    OURS,
    Case,
    Results,
    machine,
    parser,
    use_allocator,
)
from train import gpt2
from turns import compare_children, in_children, take_turns
from workloads import import_job

KINDS = ("no audit", "audit", "fence")
WARM_STEPS, TIMED_STEPS = 3, 10
MIB = 1 << 20


def measure(kind: str, small: bool) -> dict[str, Any]:
    import torch

    import esper_alloc

    use_allocator(OURS)
    step = gpt2(small)
    context: Any = contextlib.nullcontext()
    if kind != KINDS[0]:
        context = esper_alloc.audit(fence=kind == "fence")
    taken = []
    with context:
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(TIMED_STEPS):
            begin = time.perf_counter()
            step()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
        reserved = torch.cuda.max_memory_reserved() / MIB
    return {"machine": machine(), "step_ms": statistics.median(taken) * 1000, "mib": reserved}


def add_rows(results: Results, rounds: list[dict[str, dict[str, Any]]]) -> None:
    for name, key, unit in (("step", "step_ms", "ms"), ("peak reserved", "mib", "MiB")):
        for kind in KINDS[1:]:
            results.compare(f"{name}, {kind}", unit, rounds, key, kind, KINDS[0])


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--kind", choices=KINDS, default=KINDS[0], help="for a worker")
    arguments.add_argument("--small", action="store_true", help="a small model: to try the script")
    options = arguments.parse_args()
    if options.worker:
        take_turns(
            in_children(
                OURS, lambda: measure(options.kind, options.small), lambda: import_job("gpt2")
            )
        )
        return 0
    small = ("--small",) if options.small else ()
    cases = [Case(kind, OURS, ("--kind", kind, *small)) for kind in KINDS]
    return compare_children(__file__, cases, options, add_rows, ours=None)


if __name__ == "__main__":
    raise SystemExit(main())
