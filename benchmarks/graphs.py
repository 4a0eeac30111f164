"""The simulator of examples/simulator.py: eager, compiled, and with CUDA graphs.

One run makes an image from two angles, in two compiled functions of which the second reads what
the first returned. Times are of whole runs, launches and the copies of cudagraph_outputs included;
images are checked against eager ones.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from measuring import example, machine, use_allocator

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SECONDS_PER_ITERATION = 0.4  # of each variant
BLOCKS = 20  # that the time of an iteration is cut into, the variants by turns

Run = Callable[[Any], Any]


def variants(size: int, device: str, dtype: torch.dtype) -> dict[str, Run]:
    """What is compared, eager first."""
    from esper_alloc import cudagraph_outputs

    simulator = partial(example("simulator").Simulator, size, device, dtype)
    made: dict[str, Run] = {"eager": simulator("eager"), "compiled": simulator("default")}
    if device == "cpu":
        return {**made, "wrapped": cudagraph_outputs(made["compiled"])}
    return {**made, "graphs": cudagraph_outputs(simulator("reduce-overhead"))}


def check(made: dict[str, Run], inputs: list[Any]) -> None:
    """Every variant's images are eager's, also after later runs. Warms everything."""
    expected = [made["eager"](one) for one in inputs]
    scale = max(float(image.abs().max()) for image in expected)
    tolerance = scale * (2e-2 if expected[0].dtype == torch.float32 else 1e-9)
    for name, run in made.items():
        images = [run(one) for one in inputs]
        for image, wanted in zip(images, expected, strict=True):
            worst = float((image - wanted).abs().max())
            if not worst <= tolerance:
                raise SystemExit(f"{name}: an image is wrong by {worst:g} of {scale:g}")


def milliseconds(run: Run, inputs: list[Any], count: int, wait: Any) -> float:
    begin = time.perf_counter()
    for turn in range(count):
        run(inputs[turn % len(inputs)])
    wait()
    return (time.perf_counter() - begin) * 1e3 / count


def measure_size(size: int, device: str, dtype: torch.dtype, iterations: int) -> dict[str, float]:
    """Median ms a run of each variant."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch._dynamo.reset()  # of the sizes before: there is a limit to recompilation
    angles = [[0.001 * turn, -0.002 * turn] for turn in range(8)]
    inputs = [torch.tensor(one, dtype=dtype, device=device) for one in angles]
    block = SECONDS_PER_ITERATION * 1e3 / BLOCKS
    with torch.no_grad():
        made = variants(size, device, dtype)
        check(made, inputs)
        counts = {
            name: max(1, int(block / milliseconds(run, inputs, 5, wait)))
            for name, run in made.items()
        }
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(iterations * BLOCKS):
            for name, run in made.items():
                times[name].append(milliseconds(run, inputs, counts[name], wait))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(
    allocator: str, dtype: str, sizes: Sequence[int], iterations: int, device: str
) -> dict[str, Any]:
    """SIZE: ... ms of each variant."""
    if device == "cuda":
        use_allocator(allocator)
        about = machine()
    else:
        cpu = f"none: CPU {platform.machine()}, {torch.get_num_threads()} threads"
        about = {"gpu": cpu, "driver": "none", "torch": torch.__version__}
    figures: dict[str, Any] = {"machine": about}
    for size in sizes:
        found = measure_size(size, device, DTYPES[dtype], iterations)
        figures |= {f"{size}: {name}": value for name, value in found.items()}
    return figures
