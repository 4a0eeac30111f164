"""The pipeline of streams.py on the simulated device: the same memory on the same streams.

Nothing is computed, and no work ends before the steps are over, as if the host were infinitely far
ahead.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT / "tests" / "shim"))
simulated = importlib.import_module("simulated")  # before torch; it chooses the allocator as well

import torch  # noqa: E402
from streams import SHAPES, TIMED_STEPS, Pipeline  # noqa: E402


class SimulatedPipeline(Pipeline):
    """Work that takes a while stands for what is computed."""

    def normal(self, scale: float, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def whole(self, layer: int) -> torch.Tensor:
        halves = self.shards[layer]
        w = halves[0].new_empty((len(halves) * halves[0].shape[0], *halves[0].shape[1:]))
        simulated.work(self.comm)
        return w

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.new_empty((x.shape[0], w.shape[1]))
        simulated.work(self.compute)
        return x


def pipeline(allocator: str, marks: str, small: bool = False) -> dict[str, Any]:
    """The peak, and active memory after each layer."""
    with torch.no_grad():
        job = SimulatedPipeline(marks, *SHAPES["small"][small])
        by_layer = job.by_layer(TIMED_STEPS)
    about = {"gpu": "none: the simulated device", "driver": "none", "torch": torch.__version__}
    return {"machine": about, **job.base.peaks(), "by_layer": by_layer}
