"""Normalising observations: :class:`RunningMeanStd`."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import ANY_CLIP, checked_epsilon, checked_shape
from .normalizer import Normalizer

__all__ = ["RunningMeanStd"]


class RunningMeanStd(Normalizer):
    """Normalises observations by the mean and standard deviation of all seen so far.

    Args:
        shape: of one observation; an int for one dimension.
        epsilon: added to the variance before its root; also the weight with which
            the initial mean 0 and variance 1 count (so that nothing is divided by 0).
        device: of the statistics.
        momentum: None: every sample counts alike. Else each batch counts
            1 - momentum: ``mean = m * mean + (1 - m) * batch_mean`` and ``var = m *
            var + (1 - m) * batch_var + m * (1 - m) * (mean - batch_mean)**2``, the moments of a
            mixture of both. Of a batch of one it is the exponentially weighted variance of
            T. Finch, "Incremental calculation of weighted mean and variance" (2009).
        strict_device: values on another device are an error. Else the statistics
            move to them, with a warning.

    Attributes:
        mean, var: of what was seen, ``[*shape]``, float32.
        count: how many observations were seen, int64, ``[]``. Reading any of the three
            gives a copy, assigning to it sets the statistics.

    Moments are float64 inside and merged by the formulas in `moments`.
    ``eval()`` and :meth:`freeze` keep the statistics as they are in every method.

    Raises:
        ValueError: a size in `shape`, `epsilon` or `momentum` is out of its range; the
            latter two also when they are assigned.
        TypeError: `shape` is no shape, or `strict_device` no bool.

    Example::

        rms = esper_alloc.RunningMeanStd(shape=(8,))
        normalized = rms.update_and_normalize(torch.randn(64, 8) * 3 + 7)
        assert int(rms.count) == 64
    """

    def __init__(
        self,
        shape: tuple[int, ...] | int,
        epsilon: float = 1e-4,
        device: str | torch.device = "cpu",
        momentum: float | None = None,
        *,
        strict_device: bool = False,
    ) -> None:
        size, prior = checked_shape(shape), checked_epsilon(epsilon)
        super().__init__(size, epsilon, device, momentum, prior, strict_device)

    def update(
        self, x: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> None:
        """Takes a batch in; nothing in ``eval()`` or after :meth:`freeze`.

        Args:
            x: ``[..., *shape]``, any number of leading dimensions; float32, float64,
                float16, bfloat16 or integers. Other shapes are ``[rows, ...]``, which
                is broadcast to ``[rows, *shape]``; ``[N]`` gives N samples to a
                normaliser of one element alone. An empty batch changes nothing. Of NaN and
                infinity see :mod:`esper_alloc.helpers.normalize`.
            mask: bool, of the leading dimensions or like x after broadcasting; false: does
                not count.
            weights: floating-point, of the same shapes. A value counts
                as many times as its weight says; not at all unless that is finite and above 0.
                In `count` each row is one, whatever its weight.

        Raises:
            TypeError, ValueError: not such a tensor; the state is as it was.
            RuntimeError: another device, with strict_device=True.
        """
        self._update(x, mask, weights)

    def normalize(self, x: Tensor, clip: float = 10.0) -> Tensor:
        """``clamp((x - mean) / sqrt(var + epsilon), -clip, clip)``.

        Args:
            x: ``[..., *shape]``, or what broadcasts with the shape; dtypes as for
                :meth:`update`. Gradients pass.
            clip: 0 or more.

        Returns:
            Like x, broadcast; float64 for float64, else float32.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`update`; ValueError also for `clip`.
        """
        return self._normalize(x, clip)

    def update_and_normalize(
        self,
        x: Tensor,
        clip: float = 10.0,
        *,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """:meth:`update`, then :meth:`normalize`: on CUDA one launch for both.

        Raises:
            ValueError, TypeError, RuntimeError: as these; the state is as it was.
        """
        return self._step(x, clip, mask, weights)

    def forward(self, x: Tensor) -> Tensor:
        """:meth:`update_and_normalize` in training mode, :meth:`normalize` else."""
        return self._step(x, 10.0)

    def denormalize(self, x: Tensor) -> Tensor:
        """``x * sqrt(var + epsilon) + mean``: undoes :meth:`normalize` where it did
        not clip.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`update`.
        """
        return self._normalize(x, ANY_CLIP, inverse=True)
