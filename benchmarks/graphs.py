"""The simulator of examples/simulator.py: eager, compiled, and with CUDA graphs."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from measuring import example, machine, ms_a_step, use_allocator

SIZE = 1024  # pixels either way
BLOCKS, RUNS = 60, 50  # that the variants do by turns


@torch.no_grad()
def simulator(allocator: str) -> dict[str, Any]:
    """Median ms of a run of each variant, launches and the copies of cudagraph_outputs included.

    A run makes an image from two angles, in two compiled functions of which the second reads what
    the first returned. Every variant's images are eager's, also after later runs.
    """
    use_allocator(allocator)
    from esper_alloc import cudagraph_outputs

    make = example("simulator").Simulator
    run_by = {mode: make(SIZE, "cuda", torch.float32, mode)
              for mode in ("eager", "default", "reduce-overhead")}  # fmt: skip
    variants = {
        "eager": run_by["eager"],
        "compiled without graphs": run_by["default"],
        "graphs": cudagraph_outputs(run_by["reduce-overhead"]),
    }
    angles = [[0.001 * turn, -0.002 * turn] for turn in range(8)]
    inputs = [torch.tensor(one, device="cuda") for one in angles]
    expected = [variants["eager"](one) for one in inputs]
    tolerance = 2e-2 * max(float(image.abs().max()) for image in expected)
    for name, run in variants.items():
        images = [run(one) for one in inputs]
        for image, wanted in zip(images, expected, strict=True):
            worst = float((image - wanted).abs().max())
            if not worst <= tolerance:
                raise RuntimeError(f"{name}: an image is wrong by {worst:g}")
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(BLOCKS):
        for name, run in variants.items():
            one = inputs[block % len(inputs)]
            taken[name].append(ms_a_step(lambda: run(one), RUNS))
    return {"machine": machine(), **{name: statistics.median(ms) for name, ms in taken.items()}}
