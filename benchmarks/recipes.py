"""Two pipelines of docs/migrating.md: reducing gradients on a second stream, and offloading.

The code is that of examples/reduce_scatter.py and examples/offload_activations.py: a mark after
the last read, which is ``record_stream`` under PyTorch's own allocator, and for the first of the
two also the recipe by hand, with a stash of tensors and events.

  reduce-scatter  24 gradients of 64 MiB, each reduced to a shard
  offloading      a training step of 8 layers, whose saved tensors of 64 MiB wait on the host

Peaks are of active_bytes over what was active before, and for reduce-scatter without the
shards. Nobody waits within a measurement of time. Results are compared with those of one stream,
or of a step without offloading.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from common import (
    NATIVE,
    OURS,
    ROOT,
    Case,
    Results,
    Rounds,
    machine,
    nothing_measurable,
    parser,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
REPEATS = 7
RECORD_STREAM, BY_HAND, RECORD_USE = (
    "native, record_stream",
    "native, by hand",
    "esper_alloc, record_use",
)
ONE_LINE = Case(RECORD_USE, OURS, ("--way", "one_line"))
CASES = {
    "reduce-scatter": [
        Case(RECORD_STREAM, NATIVE, ("--way", "one_line")),
        Case(BY_HAND, NATIVE, ("--way", "by_hand")),
        ONE_LINE,
    ],
    "offloading": [Case(RECORD_STREAM, NATIVE, ("--way", "one_line")), ONE_LINE],
}


def example(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


def timed(step: Callable[[], object]) -> float:
    """Milliseconds of a step, the median of the repeats."""
    import torch

    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def differing(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> int:
    import torch

    return sum(not torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def reduce_scatter(way: str) -> dict[str, float]:
    import torch

    code = example("reduce_scatter")
    pipeline = code.by_hand if way == "by_hand" else code.by_record_use
    with torch.no_grad():
        torch.manual_seed(0)
        x = torch.randn(code.SIDE, code.SIDE, device="cuda")
        code.one_stream(x)  # loads kernels, allocates workspaces
        wanted, _ = code.measure(code.one_stream, x)
        torch.cuda.empty_cache()
        base = torch.cuda.memory_reserved()
        found, peak = code.measure(pipeline, x)
        reserved = torch.cuda.max_memory_reserved() - base
        return {
            "peak": peak,
            "reserved": reserved / MIB,
            "wrong": differing(found, wanted),
            "ms": timed(lambda: pipeline(x)),
        }


def offloading(way: str) -> dict[str, float]:
    import torch
    from torch import nn

    code = example("offload_activations")
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(code.LAYERS)
        for layer in (nn.Linear(code.WIDTH, code.WIDTH), nn.GELU())
    ]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(code.ROWS, code.WIDTH, device="cuda")
    code.train_step(model, x, offload=False)  # loads kernels, allocates workspaces
    gradients, _ = code.train_step(model, x, offload=False)
    wanted = [one.cpu() for one in gradients]
    del gradients
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    found, peak = code.train_step(model, x, offload=True)
    reserved = torch.cuda.max_memory_reserved() - base
    wrong = differing([one.cpu() for one in found], wanted)
    copies = torch.cuda.Stream()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with code.Offload(model, copies):
            loss = model(x).square().mean()
        loss.backward()

    return {"peak": peak, "reserved": reserved / MIB, "wrong": wrong, "ms": timed(step)}


JOBS: dict[str, Callable[[str], dict[str, float]]] = {
    "reduce-scatter": reduce_scatter,
    "offloading": offloading,
}


def measure(allocator: str, way: str, job: str) -> dict[str, Any]:
    """One process: ms a step, MiB, and how many results differ."""
    use_allocator(allocator)
    return {"machine": machine(), **JOBS[job](way)}


def add_rows(results: Results, job: str, rounds: Rounds) -> None:
    for peer in (case.name for case in CASES[job] if case.name != RECORD_USE):
        # By hand two gradients are in flight, and here one or more, as memory allows.
        goal = 1.0 if peer == RECORD_STREAM else None
        for name, unit, key, limit, judged in (
            ("peak active over base", "MiB", "peak", goal, "ratio"),
            ("reserved over base", "MiB", "reserved", None, "ratio"),
            ("step time", "ms", "ms", 1.02, "mean_ratio"),
            ("results that differ", "tensors", "wrong", 0.0, "ours"),
        ):
            results.compare(f"{job}: {name}", unit, rounds, key, RECORD_USE, peer, limit, judged)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--way", choices=("one_line", "by_hand"), default="one_line")
    arguments.add_argument("--job", choices=JOBS, action="append", help="default: both")
    options = arguments.parse_args()
    jobs = options.job or list(JOBS)
    if options.worker:
        take_turns(
            in_children(options.worker, lambda: measure(options.worker, options.way, jobs[0]))
        )
        return 0

    if nothing_measurable():
        return 1
    results = Results("recipes", options.out)
    for job in jobs:
        cases = [replace(case, args=(*case.args, "--job", job)) for case in CASES[job]]
        if not results.of_rounds(
            partial(
                turns_of_children,
                __file__,
                cases,
                options.rounds,
                seconds=options.seconds / len(jobs),
            ),
            partial(add_rows, results, job),
            ours=None,
        ):
            print(f"{job}: nothing was measured")
            return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
