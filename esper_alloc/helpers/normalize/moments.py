"""Moments of batches, and how they combine, in plain PyTorch operations.

What the kernels of the normalisers do, for where there are none, and
for values that need a gradient. Everything is in float64, works on every device,
waits for none, and can be traced by ``torch.compile``.

Formulas:

- A batch's mean is corrected by the mean of the deviations from it, and its
  variance is that of deviations: the corrected two-pass algorithm of T. F. Chan,
  G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance", The
  American Statistician 37 (1983). No large sums of squares are subtracted.
- Two sets are merged by the same authors' pairwise formula.

`moments` is a tensor of 3 x shape: means, population variances, weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: How a normaliser scales; csrc/kernels/normalize.h has the same numbers.
CENTERED, SCALED, SAMPLE = 0, 1, 2
#: Values beyond it do not count: their squares would be infinite, and the variance then
#: NaN. csrc/kernels/moments.h has the same number.
LARGEST = 1e140


@dataclass
class Batch:
    """What a batch amounts to: tensors of the normaliser's shape, float64."""

    weight: Tensor  # how many values contribute, or the sum of their weights
    mean: Tensor
    spread: Tensor  # sum of weight * (value - mean)^2


def contributions(x: Tensor, dim: int, mask: Tensor | None, weights: Tensor | None) -> Tensor:
    """The weight of each value, float64: 0 where the value is not finite or beyond
    LARGEST, where the mask says so, or where the weight given is not a finite number
    above 0.

    x: [..., *shape], where shape has `dim` dimensions. mask (bool), weights: like
    x, or of its leading dimensions.
    """
    counts = x.abs() <= LARGEST if x.dtype == torch.float64 else torch.isfinite(x)
    if mask is not None:
        counts = counts & _like(mask, x, dim)
    if weights is None:
        return counts.to(torch.float64)
    given = _like(weights, x, dim).to(torch.float64)
    counts = counts & torch.isfinite(given) & (given > 0)
    return torch.where(counts, given, 0.0)


def _like(given: Tensor, x: Tensor, dim: int) -> Tensor:
    if given.shape == x.shape:
        return given
    return given.reshape(*given.shape, *([1] * dim)).expand(x.shape)


def _as_rows(x: Tensor, dim: int) -> Tensor:
    """[rows, *shape] of [..., *shape]. (reshape(-1, ...) fails for a shape with a 0.)"""
    leading = x.dim() - dim
    return x.flatten(0, leading - 1) if leading > 0 else x.unsqueeze(0)


def batch_moments(x: Tensor, weight: Tensor, dim: int) -> Batch:
    """Moments over the leading dimensions of x: [..., *shape]; weight is like it."""
    weight = _as_rows(weight, dim)
    values = torch.where(weight > 0, _as_rows(x, dim).to(torch.float64), 0.0)
    total = weight.sum(0)
    divisor = torch.where(total > 0, total, 1.0)
    mean = (weight * values).sum(0) / divisor
    deviation = torch.where(weight > 0, values - mean, 0.0)
    offset = (weight * deviation).sum(0) / divisor
    deviation = torch.where(weight > 0, deviation - offset, 0.0)
    return Batch(total, mean + offset, (weight * deviation * deviation).sum(0))


def merged(moments: Tensor, batch: Batch, momentum: float = -1.0, warm_up: float = 0.0) -> Tensor:
    """`moments` with a batch taken in: by its weight, or where `momentum` is not below
    0 and the weight so far reaches `warm_up`, as 1 - momentum. The variance is moved
    and not rebuilt from a sum of squares: it keeps its precision however large the
    weight is."""
    mean, variance, weight = moments.unbind(0)
    total = weight + batch.weight
    some = batch.weight > 0
    divisor = torch.where(some, total, 1.0)
    keep, share = weight / divisor, batch.weight / divisor
    if momentum >= 0:
        averages = weight >= warm_up
        keep = torch.where(averages, momentum, keep)
        share = torch.where(averages, 1.0 - momentum, share)
    delta = batch.mean - mean
    spread = batch.spread / torch.where(some, batch.weight, 1.0)
    moved = _blend(variance, spread, keep, share) + keep * share * delta * delta
    return torch.stack(
        [
            torch.where(some, _blend(mean, batch.mean, keep, share), mean),
            torch.where(some, moved, variance),
            total,
        ]
    )


def _blend(a: Tensor, b: Tensor, keep: Tensor, share: Tensor) -> Tensor:
    """Between a and b; exact at both ends, and precise near each."""
    return torch.where(share < 0.5, a + share * (b - a), b + keep * (a - b))


def difference(moments: Tensor, base: Tensor) -> Batch:
    """What has come to `base` to make it `moments`: the inverse of `merged`.

    What rounding costs here is lost in proportion to the base's weight, so that
    merging the difference back is as precise as never having taken it apart.
    """
    mean, variance, weight = moments.unbind(0)
    base_mean, base_variance, base_weight = base.unbind(0)
    added = (weight - base_weight).clamp(min=0.0)
    some = added > 0
    divisor = torch.where(some, added, 1.0)
    moved = (mean - base_mean) * weight / divisor  # the batch's mean from the base's
    between = base_weight * (added / torch.where(some, weight, 1.0)) * moved * moved
    spread = (weight * variance - base_weight * base_variance - between).clamp(min=0.0)
    return Batch(
        added,
        torch.where(some, base_mean + moved, 0.0),
        torch.where(some, spread, 0.0),
    )


def _believed(exact: Tensor, rounded: Tensor) -> Tensor:
    """A rounded moment that does not fit the exact one was written by the user."""
    fits = (exact.to(torch.float32) == rounded) | torch.isnan(exact)
    return torch.where(fits, exact, rounded.to(torch.float64))


def known(moments: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The moments, after what the user may have written into mean and variance."""
    return torch.stack([_believed(moments[0], mean), _believed(moments[1], variance), moments[2]])


def deviation(moments: Tensor, warm_up: float, epsilon: float, scaling: int) -> Tensor:
    """What values are divided by, float64: [*shape]."""
    _, variance, weight = moments.unbind(0)
    if scaling == SAMPLE:
        above = weight - 1.0
        some = above > 0
        sample = variance * (weight / torch.where(some, above, 1.0))
        result = torch.where(some, sample, 0.0).sqrt().clamp(min=epsilon)
    else:
        result = (variance + epsilon).sqrt()
    return result if scaling == CENTERED else torch.where(weight < warm_up, 1.0, result)


# The operators' counterparts; csrc/kernels/normalize_op.cpp has the same arguments.


def normalizer_update_(
    moments: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    momentum: float,
    warm_up: float,
) -> None:
    """Takes a batch into a state, in place. momentum below 0: none."""
    dim = mean.dim()
    weight = contributions(x, dim, mask, weights)
    batch = batch_moments(x, weight, dim)
    now = merged(known(moments, mean, variance), batch, momentum, warm_up)
    counts = weight > 0
    for _ in range(dim):
        counts = counts.any(-1)
    moments.copy_(now)
    mean.copy_(now[0])
    variance.copy_(now[1])
    count.add_(counts.sum())


def normalizer_apply(
    moments: Tensor,
    mean: Tensor,
    variance: Tensor,
    x: Tensor,
    warm_up: float,
    epsilon: float,
    clip: float,
    scaling: int,
    inverse: bool,
) -> Tensor:
    """Normalises x: [..., *shape] by a state, or undoes it.

    Returns float64 for float64, else float32. NaN stays NaN.
    """
    believed = known(moments, mean, variance)
    divisor = deviation(believed, warm_up, epsilon, scaling)
    result = torch.float64 if x.dtype == torch.float64 else torch.float32
    x = x.contiguous()
    # The center in two parts: nothing of it is lost in single precision.
    center = believed[0] if scaling == CENTERED else torch.zeros_like(believed[0])
    high = center.to(result)
    low = (center - high.to(torch.float64)).to(result)
    if inverse:
        return x.to(result) * divisor.to(result) + low + high
    z = ((x.to(result) - high) - low) * divisor.reciprocal().to(result)
    if clip > torch.finfo(result).max:
        clip = math.inf
    return z.clamp(-clip, clip)


def normalizer_step_(
    moments: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    momentum: float,
    warm_up: float,
    epsilon: float,
    clip: float,
    scaling: int,
) -> Tensor:
    """Both, in that order."""
    normalizer_update_(moments, mean, variance, count, x, mask, weights, momentum, warm_up)
    return normalizer_apply(moments, mean, variance, x, warm_up, epsilon, clip, scaling, False)
