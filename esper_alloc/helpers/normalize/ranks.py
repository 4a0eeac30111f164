"""Statistics that are brought together: those of two normalisers, or of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import moments
from .checkpoints import SavedStatistics


class SharedStatistics(SavedStatistics):
    """Statistics that take in others."""

    def merge(self, other: SharedStatistics) -> None:
        """Takes in what `other` has seen, as if this one had seen it too.

        `other` stays as it is. Its statistics come to this one's device.

        Raises:
            TypeError: it is no normaliser of this kind.
            ValueError: it has another shape, or one of them has a momentum: then
                there is no telling what the samples weigh.
            NotImplementedError: `other` is on meta, where there is nothing to take in.
        """
        if not isinstance(other, type(self)):
            raise TypeError(f"merge takes a {type(self).__name__}, not {type(other).__name__}")
        if other.shape != self.shape:
            raise ValueError(f"cannot merge shape {tuple(other.shape)} into {tuple(self.shape)}")
        if self.momentum is not None or other.momentum is not None:
            raise ValueError(
                "normalisers with a momentum cannot be merged: they do not know how much each saw"
            )
        with torch.no_grad():
            theirs = other._known().to(self.device)
            base = torch.zeros_like(theirs)
            base[1] = 1.0
            base[2] = other._prior
            self._moments.copy_(moments.merged(self._known(), moments.difference(theirs, base)))
            self._held("count").add_(other._held("count").to(self.device))
            self._held("mean").copy_(self._moments[0])
            self._held("var").copy_(self._moments[1])

    def all_reduce(self, group: Any = None) -> None:
        """Gives every rank of a process group the statistics of all ranks' samples.

        Each rank contributes what it has seen since the last call (or since
        loading, or reset), so nothing counts twice, however often this is called.
        Moments travel as deviations in float64, counts as whole numbers: the result
        is that of one normaliser which saw everything. With a momentum, ranks are
        averaged as equals. Every rank has to call it. Two collectives of 2 x shape
        numbers; does not wait for the device.

        Ranks must have started alike, or loaded the same state. Statistics that were
        written since the last call must have been written on every rank.

        Raises:
            RuntimeError: torch.distributed is not initialised.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "all_reduce needs a process group: call torch.distributed.init_process_group first"
            )
        with torch.no_grad():
            mine = self._known()
            # What the user wrote is where everybody starts from, and no sample's doing.
            base = torch.where(mine == self._moments, self._shared, mine)
            if self.momentum is None:
                now = self._reduced(mine, base, group)
            else:
                now = self._averaged(mine, group)
            seen = self._held("count") - self._shared_count
            dist.all_reduce(seen, group=group)
            self._moments.copy_(now)
            self._held("count").copy_(self._shared_count + seen)
            self._moments_are_set()

    def _reduced(self, mine: Tensor, base: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        seen = moments.difference(mine, base)
        sums = torch.stack([seen.weight, seen.weight * (seen.mean - base[0])])
        dist.all_reduce(sums, group=group)
        divisor = torch.where(sums[0] > 0, sums[0], 1.0)
        mean = base[0] + sums[1] / divisor
        apart = seen.mean - mean
        spread = seen.spread + torch.where(seen.weight > 0, seen.weight * apart * apart, 0.0)
        dist.all_reduce(spread, group=group)
        return moments.merged(base, moments.Batch(sums[0], mean, spread))

    def _averaged(self, mine: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        ranks = dist.get_world_size(group)
        sums = torch.stack([mine[0], mine[2]]) / ranks
        dist.all_reduce(sums, group=group)
        apart = mine[0] - sums[0]
        variance = (mine[1] + apart * apart) / ranks
        dist.all_reduce(variance, group=group)
        return torch.stack([sums[0], variance, sums[1]])
