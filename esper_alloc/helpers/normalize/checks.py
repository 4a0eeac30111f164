"""What normalisers accept as numbers: counts, shapes, bounds."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

ANY_CLIP = math.inf


def as_numbers(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be numbers, not {value!r}") from None


def checked_count(count: Any) -> Tensor:
    """A count as a tensor on the CPU, []; a whole one as int64, another as float64.

    Raises:
        TypeError, ValueError: it is no number from 0 to below 2^63.
    """
    number = count
    if not is_number(count):
        given = as_numbers("count", count)
        if given.numel() != 1 or given.is_complex() or given.is_meta:
            raise ValueError(f"count must be one number, not {count!r}")
        number = given.detach().reshape(()).item()
    if not 0 <= number < 2**63:
        raise ValueError(f"count must be at least 0 and below 2**63, not {number}")
    if isinstance(number, numbers.Integral):
        return torch.tensor(int(number), dtype=torch.int64, device="cpu")
    return torch.tensor(float(number), dtype=torch.float64, device="cpu")


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def checked_shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, numbers.Integral) else shape
    try:
        checked = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"shape must be an integer or a tuple of integers, not {shape!r}") from None
    if any(size < 0 for size in checked):
        raise ValueError(f"the sizes in shape must be 0 or more, not {shape!r}")
    return checked


def check_clip(clip: float) -> None:
    if not (is_number(clip) and clip >= 0):
        raise ValueError(f"clip must be 0 or more, not {clip!r}: use float('inf') to clip nothing")


def checked_clip(clip: float) -> float:
    check_clip(clip)
    return float(clip)


def checked_epsilon(epsilon: float) -> float:
    if not (is_number(epsilon) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon must be 0 or more, not {epsilon!r}")
    return float(epsilon)


def checked_momentum(momentum: float | None) -> float | None:
    if momentum is None:
        return None
    if not (is_number(momentum) and 0 <= momentum <= 1):
        raise ValueError(f"momentum must be None, or from 0 to 1, not {momentum!r}")
    return float(momentum)
