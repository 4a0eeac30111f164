"""Scaling rewards: :class:`RewardNormalizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor

from .checks import ANY_CLIP, checked_clip, checked_count, is_number
from .moments import SAMPLE
from .normalizer import Normalizer

__all__ = ["RewardNormalizer"]


class RewardNormalizer(Normalizer):
    """Scales rewards by their running standard deviation; no mean is subtracted.

    ``reward / max(epsilon, s)``, clipped, where s is the sample standard deviation
    (by count - 1) of all rewards so far; the reward itself while there is only one.

    Args:
        clip: results are held within -clip and clip.
        epsilon: the smallest number that rewards are divided by.
        device: of the statistics.
        strict_device: see :class:`RunningMeanStd`.

    Attributes:
        mean: of the rewards, a float, or ``[]``, float64.
        m2: sum of squared deviations from it, likewise.
        count: how many there were, an int, or int64, ``[]``.

    A reward is a number, and the result then a float (which waits for the device),
    or a tensor of any shape: all of its elements are taken in before the first is
    scaled. The attributes and the state of a normaliser by itself are Python numbers
    too (which waits for the device) until it took in a tensor, or loaded a state of
    tensors; from then on, and on meta, they are tensors. Attributes are copies, and all
    three can be assigned to.

    Raises:
        ValueError: `clip` or `epsilon` is below 0 or no number; also when it is assigned.
        TypeError: `strict_device` is no bool.

    Example::

        scale = esper_alloc.RewardNormalizer()
        for reward in (1.0, 3.0, 5.0):
            scaled = scale.update_and_normalize(reward)
        assert scaled == 2.5  # 5 / the deviation of the three
    """

    _scaling = SAMPLE
    _warm_up = 2.0
    _mean_name, _var_name = "_mean", "_var"
    _checked = Normalizer._checked | {"clip": checked_clip}

    def __init__(
        self,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        *,
        device: str | torch.device = "cpu",
        strict_device: bool = False,
    ) -> None:
        super().__init__((), epsilon, device, None, 0.0, strict_device)
        self.clip = clip
        self._m2_without_count = 0.0  # assigned before the count was
        self._numbers = True  # no tensor came in

    @property
    def mean(self) -> Any:
        return self._shown("mean")

    @mean.setter
    def mean(self, value: Any) -> None:
        self._write("mean", value)

    @property
    def m2(self) -> Any:
        return self._shown("m2")

    @m2.setter
    def m2(self, value: Any) -> None:
        total = self._moments[2].item()
        found = self._moment("m2", value)
        if total:
            self._write("var", found / total)
        else:
            self._m2_without_count = float(found.item())

    @property
    def count(self) -> Any:
        return self._shown("count")

    @count.setter
    def count(self, value: Any) -> None:
        self._write("count", value)

    def _shown(self, name: str) -> Any:
        held = self._named_state()[name]
        return held.item() if self._numbers and not held.is_meta else held

    def update(
        self,
        reward: Tensor | float,
        *,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Takes rewards in. See :meth:`RunningMeanStd.update`, for errors too."""
        self._update(self._as_tensor(reward), mask, weights)
        self._took_in(reward)

    @overload
    def update_and_normalize(
        self, reward: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor: ...
    @overload
    def update_and_normalize(
        self, reward: float, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> float: ...
    def update_and_normalize(
        self,
        reward: Tensor | float,
        *,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | float:
        """Takes rewards in and scales them. A number gives a float, a tensor one.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`update`; the state is as it was.
        """
        if isinstance(reward, Tensor):
            scaled = self._step(reward, self.clip, mask, weights)
            self._took_in(reward)
            return scaled
        if mask is None and weights is None and self.training and not self.frozen:
            held = self._buffers
            if self._compiled is not None and not torch.compiler.is_compiling():
                result = self._compiled.normalizer_step(
                    held["_moments"],
                    held["_mean"],
                    held["_var"],
                    held["count"],
                    reward,
                    None,
                    self._warm_up,
                    self.epsilon,
                    self.clip,
                    self._scaling,
                    True,
                )
                if result is not NotImplemented:
                    return float(result)
        return float(self._step(self._as_tensor(reward), self.clip, mask, weights).item())

    @overload
    def normalize_only(self, reward: Tensor) -> Tensor: ...
    @overload
    def normalize_only(self, reward: float) -> float: ...
    def normalize_only(self, reward: Tensor | float) -> Tensor | float:
        """Scales rewards by the statistics as they are.

        Raises:
            TypeError, RuntimeError: as :meth:`update`.
        """
        result = self._normalize(self._as_tensor(reward), self.clip)
        return result if isinstance(reward, Tensor) else float(result.item())

    @overload
    def forward(self, reward: Tensor) -> Tensor: ...
    @overload
    def forward(self, reward: float) -> float: ...
    def forward(self, reward: Tensor | float) -> Tensor | float:
        """:meth:`update_and_normalize` in training mode, :meth:`normalize_only` else."""
        return self.update_and_normalize(reward)

    @overload
    def denormalize(self, reward: Tensor) -> Tensor: ...
    @overload
    def denormalize(self, reward: float) -> float: ...
    def denormalize(self, reward: Tensor | float) -> Tensor | float:
        """Reverses the scaling.

        Raises:
            TypeError, RuntimeError: as :meth:`update`.
        """
        result = self._normalize(self._as_tensor(reward), ANY_CLIP, inverse=True)
        return result if isinstance(reward, Tensor) else float(result.item())

    def _write(self, name: str, value: Any) -> None:
        m2 = self._named_state()["m2"]
        super()._write(name, value)
        if name == "count":
            self._m2_without_count = 0.0
            with torch.no_grad():  # m2 is what stays, as in esper-lite
                total = self._moments[2]
                self._moments[1].copy_(torch.where(total > 0, m2 / total, 1.0))
                self._moments_are_set()

    def reset(self) -> None:
        """Forgets all rewards, in place."""
        self._m2_without_count = 0.0
        self._numbers = True
        super().reset()

    def _took_in(self, reward: Any) -> None:
        if isinstance(reward, Tensor) and self.training and not self.frozen:
            self._numbers = False

    def _as_tensor(self, reward: Tensor | float) -> Tensor:
        if isinstance(reward, Tensor):
            return reward
        if not is_number(reward):
            raise TypeError(f"a reward must be a number or a tensor, not {type(reward).__name__}")
        return torch.tensor(float(reward), dtype=torch.float64, device=self._moments.device)

    def _named_state(self) -> dict[str, Tensor]:
        total = self._moments[2]
        m2 = torch.where(total > 0, self._moments[1] * total, self._m2_without_count)
        return {"mean": self._moments[0].clone(), "m2": m2, "count": self._held("count").clone()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix == "" and self._numbers:  # a model's state holds tensors
            destination.update({name: self._shown(name) for name in ("mean", "m2", "count")})

    def _loaded_alone(self, mean: Any) -> None:
        if isinstance(mean, Tensor) or is_number(mean):
            self._numbers = not isinstance(mean, Tensor)

    def _state_names(self, keys: Mapping[str, Any]) -> tuple[str, str, str]:
        if "m2" not in keys and ("var" in keys or "running_var" in keys):
            return super()._state_names(keys)  # of somebody else
        return "mean", "m2", "count"

    def _load_statistics(
        self,
        names: tuple[str, str, str],
        mean: Any,
        m2: Any,
        count: Any,
        extra: Any,
        onto: torch.device | None,
    ) -> None:
        variance = m2
        if names[1] == "m2":
            # The extra state has the weight that m2 is of: with weights it is not the count.
            full = None if extra is None else self._parsed_extra(extra)[1]
            total = float(checked_count(count) if full is None else full[2])
            spread = self._moment("m2", m2)
            variance = spread / total if total > 0 else torch.ones_like(spread)
        super()._load_statistics(names, mean, variance, count, extra, onto)
        self._m2_without_count = 0.0
