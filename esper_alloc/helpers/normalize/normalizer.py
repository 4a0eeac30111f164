"""What the three normalisers have in common: taking values in, and scaling them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...installation.pytorch import untyped
from . import moments
from .checks import ANY_CLIP, check_clip
from .ranks import SharedStatistics

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


_forward_ad: Any = untyped(forward_ad)


def _forward_derivatives() -> bool:
    """Whether tensors may carry tangents (forward-mode differentiation)."""
    level: int = _forward_ad._current_level
    return level >= 0


def _wants_gradient(x: Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return not torch.compiler.is_compiling() and _forward_derivatives()


_outside_graphs: Any = untyped(torch.compiler).disable(
    _call, reason="a normaliser's statistics have to be moved"
)


class Normalizer(SharedStatistics):
    """Values go through the kernels where there are some, else through `moments`."""

    def _check_values(self, x: Tensor) -> None:
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} takes a tensor, not {type(x).__name__}")
        if x.dtype not in (*_FLOATS, *_INTEGERS) or x.layout != torch.strided or x.is_nested:
            layout, remedy = str(x.layout), ".float()"
            if x.is_nested:
                layout, remedy = "nested", "torch.cat(x.unbind())"
            raise TypeError(
                f"{name} takes dense values of float32, float64, float16, bfloat16 or integers, "
                f"not {x.dtype} ({layout}); convert them, for example with {remedy}"
            )

    def _samples(self, x: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
        """[..., *shape]: values to be taken in, checked. What does not end in the shape is
        [rows, ...] and is broadcast to [rows, *shape]; [rows] only where the shape is of one
        element, for it may be a feature that was left out."""
        self._check_values(x)
        dims = len(self.shape)
        if not self._ends_in_shape(x):
            fewest = 1 if self.shape.numel() == 1 else 2
            if not fewest <= x.dim() <= dims + 1:
                raise self._other_shape(x)
            rows = x.reshape(len(x), *[1] * (dims + 1 - x.dim()), *x.shape[1:])
            try:
                x = rows.expand(len(x), *self.shape)
            except RuntimeError:
                raise self._other_shape(x) from None
        self._check_selection(x, mask, weights)
        return self._admitted(x)

    def _admitted(self, x: Tensor) -> Tensor:
        """Moves the statistics to x if they must. Returns x; integers as float64, which has
        all of them up to 2**53."""
        if x.device != self._moments.device:
            self._move_to_values(x.device)
        return x.to(torch.float64) if x.dtype in _INTEGERS else x

    def _ends_in_shape(self, x: Tensor) -> bool:
        first = x.dim() - len(self.shape)
        return first >= 0 and x.shape[first:] == self.shape

    def _check_broadcasts(self, x: Tensor) -> None:
        """Raises ValueError unless values of this shape can be normalised."""
        try:
            untyped(torch).broadcast_shapes(x.shape, self.shape)
        except RuntimeError:
            raise self._other_shape(x) from None

    def _other_shape(self, x: Tensor) -> ValueError:
        return ValueError(
            f"{type(self).__name__} of shape {tuple(self.shape)} was given values of shape "
            f"{tuple(x.shape)}: its last dimensions must be the normaliser's shape, or broadcast "
            f"with it"
        )

    def _check_selection(self, x: Tensor, mask: Tensor | None, weights: Tensor | None) -> None:
        rows = x.shape[: x.dim() - len(self.shape)]
        for name, given in (("mask", mask), ("weights", weights)):
            if given is None:
                continue
            if not isinstance(given, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(given).__name__}")
            if given.shape != rows and given.shape != x.shape:
                raise ValueError(
                    f"{name} has shape {tuple(given.shape)}; give one for each row, "
                    f"{tuple(rows)}, or one for each value, {tuple(x.shape)}"
                )
            if given.device != x.device:
                raise ValueError(f"{name} is on {given.device}, the values are on {x.device}")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(
                f"mask must be of booleans, true where a value counts, not {mask.dtype}"
            )
        if weights is not None and not weights.dtype.is_floating_point:
            raise TypeError(f"weights must be floating-point numbers, not {weights.dtype}")

    def _update(self, x: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        if not self.training or self.frozen:
            return
        if self._must_leave_graph(x):
            _outside_graphs(self._update, x, mask, weights)
            return
        if (
            self._compiled is not None
            and isinstance(x, Tensor)  # the kernels also take a number, for rewards
            and mask is None
            and weights is None
            and not torch.compiler.is_compiling()
        ):
            held = self._buffers
            done = self._compiled.normalizer_step(
                held["_moments"],
                held[self._mean_name],
                held[self._var_name],
                held["count"],
                x,
                self.momentum,
                self._warm_up,
                self.epsilon,
                ANY_CLIP,
                self._scaling,
                False,
            )
            if done is not NotImplemented:
                return
        x = self._samples(x, mask, weights)
        operators = torch.ops.esper_alloc if self._has_kernels else moments
        operators.normalizer_update_(
            self._moments,
            self._held("mean"),
            self._held("var"),
            self._held("count"),
            x.detach(),
            mask,
            None if weights is None else weights.detach(),
            -1.0 if self.momentum is None else self.momentum,
            self._warm_up,
        )

    def _normalize(self, x: Tensor, clip: float, inverse: bool = False) -> Tensor:
        check_clip(clip)
        if self._must_leave_graph(x):
            return _outside_graphs(self._normalize, x, clip, inverse)  # type: ignore[no-any-return]
        if (
            self._compiled is not None
            and not torch.compiler.is_compiling()
            and not _forward_derivatives()
        ):
            held = self._buffers
            result: Any = self._compiled.normalizer_apply(
                held["_moments"],
                held[self._mean_name],
                held[self._var_name],
                x,
                self._warm_up,
                self.epsilon,
                clip,
                self._scaling,
                inverse,
            )
            if result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        self._check_values(x)
        self._check_broadcasts(x)
        values = self._admitted(x)
        # The operators have no gradient and do not broadcast; the composition does both.
        by_operator = self._has_kernels and self._ends_in_shape(x) and not _wants_gradient(x)
        operators = torch.ops.esper_alloc if by_operator else moments
        normalized: Tensor = operators.normalizer_apply(
            self._moments,
            self._held("mean"),
            self._held("var"),
            values,
            self._warm_up,
            self.epsilon,
            float(clip),
            self._scaling,
            inverse,
        )
        return normalized.to(torch.float32) if x.dtype in _INTEGERS else normalized

    def _step(
        self, x: Tensor, clip: float, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if not self.training or self.frozen:
            return self._normalize(x, clip)
        check_clip(clip)
        if self._must_leave_graph(x):
            return _outside_graphs(self._step, x, clip, mask, weights)  # type: ignore[no-any-return]
        if (
            self._compiled is not None
            and isinstance(x, Tensor)  # the kernels also take a number, for rewards
            and mask is None
            and weights is None
            and not torch.compiler.is_compiling()
            and not _forward_derivatives()
        ):
            held = self._buffers
            result: Any = self._compiled.normalizer_step(
                held["_moments"],
                held[self._mean_name],
                held[self._var_name],
                held["count"],
                x,
                self.momentum,
                self._warm_up,
                self.epsilon,
                clip,
                self._scaling,
                True,
            )
            if result is not NotImplemented:
                return result  # type: ignore[no-any-return]
        self._check_values(x)
        self._check_broadcasts(x)
        values = self._samples(x, mask, weights)
        if not self._has_kernels or _wants_gradient(x) or values is not x:
            self._update(x, mask, weights)
            return self._normalize(x, clip)
        normalized: Tensor = torch.ops.esper_alloc.normalizer_step_(
            self._moments,
            self._held("mean"),
            self._held("var"),
            self._held("count"),
            x,
            mask,
            None if weights is None else weights.detach(),
            -1.0 if self.momentum is None else self.momentum,
            self._warm_up,
            self.epsilon,
            float(clip),
            self._scaling,
        )
        return normalized
