"""Scaling values and returns: :class:`ValueNormalizer`."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import ANY_CLIP
from .moments import SCALED
from .normalizer import Normalizer

__all__ = ["ValueNormalizer"]


class ValueNormalizer(Normalizer):
    """Scales values and returns by their running standard deviation; no mean is
    subtracted.

    The first 32 samples count alike and nothing is scaled. From then on each batch
    counts 1 - momentum (see :class:`RunningMeanStd`; None: every sample alike).

    Args:
        epsilon: added to the variance before its root.
        device: of the statistics.
        momentum: see above.
        strict_device: see :class:`RunningMeanStd`.

    Attributes:
        mean, var: of what was seen, ``[]``, float32.
        count: how many values were seen, int64, ``[]``.

    Raises:
        ValueError: `epsilon` or `momentum` is out of its range; also when it is assigned.
        TypeError: `strict_device` is no bool.

    Values may have any shape: each element is a sample.

    Example::

        norm = esper_alloc.ValueNormalizer()
        norm.update(torch.randn(64) * 100)
        loss = (predicted - norm.normalize(returns)).square().mean()
        values = norm.denormalize(predicted)
    """

    _scaling = SCALED
    _warm_up = 32.0

    def __init__(
        self,
        epsilon: float = 1e-4,
        device: str | torch.device = "cpu",
        momentum: float | None = 0.99,
        *,
        strict_device: bool = False,
    ) -> None:
        super().__init__((), epsilon, device, momentum, 0.0, strict_device)

    @property
    def std(self) -> Tensor:
        """``sqrt(var + epsilon)``, ``[]``, float32."""
        return (self._known()[1] + self.epsilon).sqrt().to(torch.float32)

    @property
    def has_valid_stats(self) -> bool:
        """Whether 32 samples were seen. Waits for the device."""
        return bool(self._moments[2].item() >= self._warm_up)

    def get_scale(self) -> float:
        """What :meth:`normalize` divides by; 1.0 during the first 32 samples. Waits
        for the device."""
        return self.std.item() if self.has_valid_stats else 1.0

    def update(
        self, returns: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> None:
        """Takes values of any shape in; mask and weights are of the same shape. See
        :meth:`RunningMeanStd.update`, for errors too."""
        self._update(returns, mask, weights)

    def normalize(self, returns: Tensor) -> Tensor:
        """``returns / sqrt(var + epsilon)``; the returns during the first 32 samples.

        Gradients pass. Returns the dtype of the returns; float32 for integers.

        Raises:
            TypeError, RuntimeError: as :meth:`update`.
        """
        return _like(returns, self._normalize(returns, ANY_CLIP))

    def denormalize(self, values: Tensor) -> Tensor:
        """``values * sqrt(var + epsilon)``; the values during the first 32 samples.

        Raises:
            TypeError, RuntimeError: as :meth:`update`.
        """
        return _like(values, self._normalize(values, ANY_CLIP, inverse=True))

    def update_and_normalize(
        self, returns: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """:meth:`update`, then :meth:`normalize`: on CUDA one launch for both.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`update`; the state is as it was.
        """
        return _like(returns, self._step(returns, ANY_CLIP, mask, weights))

    def forward(self, returns: Tensor) -> Tensor:
        """:meth:`update_and_normalize` in training mode, :meth:`normalize` else."""
        return _like(returns, self._step(returns, ANY_CLIP))


def _like(given: Tensor, result: Tensor) -> Tensor:
    """The result in the dtype of half-precision values that it came from."""
    return result.to(given.dtype) if given.dtype in (torch.float16, torch.bfloat16) else result
