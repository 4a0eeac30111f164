"""What normalising observations costs, beside the plain PyTorch way of doing it.

Plain is what esper-lite does: mean and variance of the batch, their merge into
float32 statistics, and the normalisation, as operations of their own. Each worker
measures both in turn. Also here, once and not in every round: how far 10^6 batches end
up from float64, and how many of 10^9 samples are missing from the count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from common import (
    NATIVE,
    Results,
    alternate,
    column,
    machine,
    nothing_measurable,
    parser,
    report,
    use_allocator,
)

#: Rows and features, and the largest part of the plain version's time that is fine.
SIZES = {(64, 64): 1 / 8, (1024, 128): 1 / 8, (65536, 64): 1 / 5}
REPEATS = 11
CALLS = 500
REPLAYS = 50  # of a graph of ten calls
PRECISION_BATCHES = 10**6
COUNTED = 10**9
COUNTED_ROWS = 10**4


def microseconds(
    calls: dict[str, Callable[[], object]], calls_at_once: int = CALLS
) -> dict[str, float]:
    """Median us of each call, a block of calls of each in turn."""
    import torch

    for call in calls.values():
        for _ in range(50):
            call()
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(calls_at_once):
                call()
            torch.cuda.synchronize()
            figures[name].append((time.perf_counter_ns() - begin) / calls_at_once / 1000)
    return {name: statistics.median(values) for name, values in figures.items()}


def plain_class() -> type:
    """Running statistics by separate operations, rebound at each update."""
    import torch

    class Plain:
        def __init__(self, features: int) -> None:
            self.mean = torch.zeros(features, device="cuda")
            self.var = torch.ones(features, device="cuda")
            self.count = torch.tensor(1e-4, device="cuda")

        @torch.inference_mode()
        def update(self, x: torch.Tensor) -> None:
            batch_mean, batch_var, n = x.mean(dim=0), x.var(dim=0, unbiased=False), x.shape[0]
            delta = batch_mean - self.mean
            total = self.count + n
            spread = self.var * self.count + batch_var * n
            spread = spread + delta**2 * self.count * n / total
            self.mean = self.mean + delta * n / total
            self.var = spread / total
            self.count = total

        def normalize(self, x: torch.Tensor) -> torch.Tensor:
            return torch.clamp((x - self.mean) / torch.sqrt(self.var + 1e-4), -10.0, 10.0)

    return Plain


def measure(allocator: str) -> dict:
    """Every duration, in this process, as {name: us}."""
    use_allocator(allocator)
    import torch

    from esper_alloc import RunningMeanStd
    from esper_alloc.helpers import kernels

    if not kernels.usable(0):
        raise RuntimeError("without kernels there is nothing to measure")
    plain_type = plain_class()
    figures: dict[str, float] = {}
    gc.disable()
    for rows, features in SIZES:
        x = torch.randn(rows, features, device="cuda")
        ours, plain = RunningMeanStd(features, device="cuda"), plain_type(features)
        captured, held = plain_type(features), []

        def plain_both(x: torch.Tensor = x, plain: object = plain) -> None:
            plain.update(x)
            plain.normalize(x)

        def ours_both(x: torch.Tensor = x, ours: RunningMeanStd = ours) -> None:
            ours.update(x)
            ours.normalize(x)

        def plain_captured(x: torch.Tensor = x, plain: object = captured) -> None:
            held.append((plain.mean, plain.var, plain.count))  # the graph reads the last
            plain_both(x, plain)

        found = microseconds(
            {
                "update_and_normalize": lambda: ours.update_and_normalize(x),
                "plain": plain_both,
                "update, normalize": ours_both,
                "normalize": lambda: ours.normalize(x),
                "plain normalize": lambda: plain.normalize(x),
            }
        ) | microseconds(
            {
                "on the GPU": in_a_graph(lambda: ours.update_and_normalize(x)),
                "plain on the GPU": in_a_graph(plain_captured),
            },
            REPLAYS,
        )
        figures |= {f"{name} {rows}x{features}": value for name, value in found.items()}
    return {"machine": machine(), "figures": figures}


def exactness(allocator: str) -> dict:
    """What does not depend on time, as {name: value}."""
    use_allocator(allocator)
    return {"figures": precision() | counted(plain_class())}


def in_a_graph(call: Callable[[], object]) -> Callable[[], None]:
    """Replays ten calls; what microseconds() finds for it is ten times what one costs
    without its launches."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return graph.replay


def precision() -> dict[str, float]:
    """Largest relative error of mean and variance after a million batches."""
    import torch

    from esper_alloc import RunningMeanStd

    pool = torch.randn(1000, 64, 8, device="cuda") * torch.logspace(-3, 3, 8, device="cuda")
    pool = pool + pool.std((0, 1)) * 100
    rms = RunningMeanStd(8, device="cuda")
    batches = list(pool.unbind(0))
    for _ in range(PRECISION_BATCHES // len(batches)):
        for batch in batches:
            rms.update(batch)
    samples = pool.double().reshape(-1, 8)
    seen, weight = float(int(rms.count)), float(int(rms.count)) + 1e-4
    mean = samples.mean(0) * seen / weight
    spread = ((samples - mean) ** 2).sum(0) * (seen / samples.shape[0]) + 1e-4 * (1 + mean**2)
    exact = torch.stack([mean, spread / weight])
    error = ((rms._moments[:2] - exact).abs() / exact.abs()).max()
    return {"relative error": float(error)}


def counted(plain_type: type) -> dict[str, float]:
    """How many of 10^9 samples are missing from the count."""
    import torch

    from esper_alloc import RunningMeanStd

    x = torch.randn(COUNTED_ROWS, 1, device="cuda")
    ours, plain = RunningMeanStd(1, device="cuda"), plain_type(1)
    for _ in range(COUNTED // COUNTED_ROWS):
        ours.update(x)
        plain.update(x)
    return {
        "missing": abs(COUNTED - float(int(ours.count))),
        "plain missing": abs(COUNTED - float(plain.count)),
    }


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        report((exactness if options.exact else measure)(options.worker))
        return 0

    if nothing_measurable():
        return 1
    found = alternate(__file__, (NATIVE,), options.rounds, seconds=options.seconds)
    if NATIVE not in found:
        print("nothing was measured")
        return 1
    results = Results("normalize", options.out)
    results.describe(found[NATIVE][0]["machine"])
    figures = [one["figures"] for one in found[NATIVE]]
    exact = alternate(__file__, (NATIVE,), 1, ("--exact",))
    figures += [one["figures"] for one in exact.get(NATIVE, [])]

    def row(name: str, unit: str, ours: str, peer: str, goal: float | None = None) -> None:
        results.row(name, unit, column(figures, ours), column(figures, peer), "plain PyTorch", goal)

    for (rows, features), goal in SIZES.items():
        size = f"{rows}x{features}"
        row(
            f"update_and_normalize, {size}",
            "us",
            f"update_and_normalize {size}",
            f"plain {size}",
            goal,
        )
        row(f"update, then normalize, {size}", "us", f"update, normalize {size}", f"plain {size}")
        row(f"normalize, {size}", "us", f"normalize {size}", f"plain normalize {size}")
        row(f"ten in a CUDA graph, {size}", "us", f"on the GPU {size}", f"plain on the GPU {size}")
    errors = column(figures, "relative error")
    results.row("relative error, 10^6 batches", "", errors, [0.0], "float64 at once", 1e-6)
    row("missing of 10^9 samples", "samples", "missing", "plain missing", 0.0)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
