"""The statistics of a normaliser: buffers that move with a module and can be written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ...installation.bools import checked_bool
from ...installation.callers import user_stacklevel
from ...installation.pytorch import untyped
from .. import kernels
from . import moments
from .checks import as_numbers, checked_count, checked_epsilon, checked_momentum
from .moments import CENTERED

Self = TypeVar("Self", bound="Statistics")


class Statistics(nn.Module):
    """What was seen so far."""

    #: The kernels, or None.
    _compiled: Any = kernels.load()

    _scaling = CENTERED
    _warm_up = 0.0  # weight from which scaling and momentum act
    _mean_name, _var_name = "mean", "var"
    #: What the constructor checks and the user may assign.
    _checked: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "epsilon": checked_epsilon,
        "momentum": checked_momentum,
        "strict_device": partial(checked_bool, "strict_device"),
    }

    shape: torch.Size
    epsilon: float
    momentum: float | None
    strict_device: bool
    frozen: bool
    _prior: float
    _has_kernels: bool
    _moments: Tensor
    _shared: Tensor
    _shared_count: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        epsilon: float,
        device: str | torch.device,
        momentum: float | None,
        prior: float,
        strict_device: bool,
    ) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        self.epsilon = epsilon
        self.momentum = momentum
        self.strict_device = strict_device
        self.frozen = False
        self._own_prior = prior
        self._prior = prior  # weight that was there before any sample
        self._warned: set[tuple[str, str]] = set()
        persistent = self._mean_name == "mean"
        with torch.inference_mode(False), torch.no_grad():
            zeros = torch.zeros(self.shape, dtype=torch.float64, device=device)
            start = torch.stack([zeros, zeros + 1.0, zeros + prior])
            count = torch.zeros((), dtype=torch.int64, device=device)
            # register_buffer() refuses the names of properties.
            self._buffers[self._mean_name] = zeros.to(torch.float32)
            self._buffers[self._var_name] = start[1].to(torch.float32)
            self._buffers["count"] = count
            self._buffers["_moments"] = start
            # What all ranks knew when they were last synchronised.
            self._buffers["_shared"] = start.clone()
            self._buffers["_shared_count"] = count.clone()
        self._non_persistent_buffers_set |= {"_moments", "_shared", "_shared_count"}
        if not persistent:
            self._non_persistent_buffers_set |= {self._mean_name, self._var_name}
        self._choose_kernels()

    # --- what there is to know ------------------------------------------------

    # Reading copies, since updates write into the buffers.

    @property
    def mean(self) -> Tensor:
        return self._held("mean").clone()

    @mean.setter
    def mean(self, value: Any) -> None:
        self._write("mean", value)

    @property
    def var(self) -> Tensor:
        return self._held("var").clone()

    @var.setter
    def var(self, value: Any) -> None:
        self._write("var", value)

    @property
    def count(self) -> Tensor:
        return self._held("count").clone()

    @count.setter
    def count(self, value: Any) -> None:
        self._write("count", value)

    @property
    def device(self) -> torch.device:
        """Where the statistics are."""
        return self._moments.device

    def extra_repr(self) -> str:
        said = [f"shape={tuple(self.shape)}", f"epsilon={self.epsilon}"]
        if self.momentum is not None:
            said.append(f"momentum={self.momentum}")
        if self.strict_device:
            said.append("strict_device=True")
        if self.frozen:
            said.append("frozen")
        return ", ".join(said)

    # --- freezing, resetting ----------------------------------------------------

    def freeze(self: Self) -> Self:
        """From here on batches leave the statistics as they are, in training mode too.

        :meth:`merge`, :meth:`all_reduce`, :meth:`reset`, loading and assigning still
        change them.
        """
        self.frozen = True
        return self

    def unfreeze(self: Self) -> Self:
        """Undoes :meth:`freeze`."""
        self.frozen = False
        return self

    def reset(self) -> None:
        """Back to before the first sample, in place."""
        self._prior = self._own_prior
        with torch.no_grad():
            self._moments[0].zero_()
            self._moments[1].fill_(1.0)
            self._moments[2].fill_(self._prior)
            self._held("count").zero_()
            self._moments_are_set()

    def reset_parameters(self) -> None:
        """What ``to_empty()`` asks for: :meth:`reset`."""
        self.reset()

    def _moments_are_set(self) -> None:
        """Brings the rest of the state in line with moments and count."""
        self._held("mean").copy_(self._moments[0])
        self._held("var").copy_(self._moments[1])
        self._shared.copy_(self._moments)
        self._shared_count.copy_(self._held("count"))

    # --- devices ------------------------------------------------------------------

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        # Statistics move with their module and keep their precision: half() and
        # to(dtype) of a model are not about them. Nor may they become inference
        # tensors, which could not be written outside of inference mode, nor take the memory
        # format of images: of a shape [C, H, W] the moments have four dimensions.
        before = dict(self._buffers)
        with torch.inference_mode(False):
            untyped(super())._apply(fn, recurse)
            for name, old in before.items():
                new = self._buffers[name]
                if old is not None and new is not None and new.dtype != old.dtype:
                    new = old.to(new.device)
                self._buffers[name] = None if new is None else new.contiguous()
        self._choose_kernels()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        untyped(super()).__setstate__(state)
        # A copy that was made in inference mode must be one that can be written.
        with torch.inference_mode(False):
            for name, held in self._buffers.items():
                if held is not None and held.is_inference():
                    self._buffers[name] = held.clone()
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        device = self._moments.device
        self._has_kernels = self._compiled is not None and device.type == "cpu"
        if device.type == "cuda" and kernels.usable(device.index):
            self._compiled.normalizer_allow(device.index)
            self._has_kernels = True

    def _must_leave_graph(self, x: Tensor) -> bool:
        """Inside a compiled region: whether the statistics have to move first.

        Then the graph ends here, or compilation fails with this message where it
        must not end. The move and what was asked for run outside of graphs, and from
        the next call on there is nothing to move and one whole graph.
        """
        if (
            not torch.compiler.is_compiling()
            or not isinstance(x, Tensor)
            or x.device == self._moments.device
            or self.strict_device
        ):
            return False
        torch._dynamo.graph_break(msg=f"{self._mismatch(x.device)}. {self._remedy(x.device)}")
        return True

    def _mismatch(self, device: torch.device) -> str:
        return (
            f"{type(self).__name__} has its statistics on {self._moments.device} and was given "
            f"values on {device}"
        )

    def _remedy(self, device: torch.device) -> str:
        return f"Create it with device='{device}', or call .to('{device}') before its first use."

    def _is_at_start(self) -> bool:
        mean, var, weight = self._moments
        return not bool(mean.any() | (var != 1).any() | (weight != self._own_prior).any())

    def _move_to_values(self, device: torch.device) -> None:
        """The statistics are not where the values are: warns and moves, or raises."""
        here = self._moments.device
        found = self._mismatch(device)
        remedy = self._remedy(device)
        if self.strict_device:
            raise RuntimeError(f"{found}; with strict_device=True it does not move them. {remedy}")
        if "cuda" in (here.type, device.type) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{found}; they cannot be moved while a graph is captured. {remedy}")
        if device.type == "meta" and not self._is_at_start():
            raise RuntimeError(
                f"{found}, which has no data: they would be lost. Pass values that have memory, or "
                "pass these to a copy.deepcopy() of it that was moved .to('meta')"
            )
        if (str(here), str(device)) not in self._warned:
            self._warned.add((str(here), str(device)))
            warnings.warn(
                f"{found}: it moves them, which waits for the device, and breaks the graph of a "
                f"compiled region. {remedy}",
                UserWarning,
                stacklevel=user_stacklevel(),
            )
        if here.type == "meta":  # it has no data, and is at its start
            self.to_empty(device=device)
            self.reset()
        else:
            self.to(device)

    # --- moments ------------------------------------------------------------------

    def _known(self) -> Tensor:
        """The moments, float64, after what the user may have written."""
        return moments.known(self._moments, self._held("mean"), self._held("var"))

    def _held(self, name: str) -> Tensor:
        """The buffer of the "mean" or the "var", float32, or of the "count", int64."""
        names = {"mean": self._mean_name, "var": self._var_name}
        held = self._buffers[names.get(name, name)]
        assert held is not None
        return held

    def _moment(self, name: str, value: Any, exact: Tensor | None = None) -> Tensor:
        """A moment from elsewhere, checked: float64, on the CPU. Where it is the float32 of
        `exact`, which is finite, it may be infinite."""
        given = as_numbers(name, value)
        if given.is_complex() or given.is_meta:
            raise ValueError(f"{name} must be real numbers, not {given!r}")
        found = given.detach().to("cpu", torch.float64)
        if found.shape != self.shape:
            raise ValueError(
                f"{name} has shape {tuple(found.shape)}, and the normaliser {tuple(self.shape)}"
            )
        wrong = ~torch.isfinite(found)
        if exact is not None:
            wrong &= found != exact.to("cpu", torch.float32)
        if bool(wrong.any()) or (name != "mean" and bool((found < 0).any())):
            raise ValueError(f"{name} has values that a {name} cannot have")
        return found

    # --- writing attributes ---------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            # nn.Module would put another tensor into the buffer of that name.
            object.__setattr__(self, name, value)
            return
        if name in self._checked:
            value = self._checked[name](value)
        super().__setattr__(name, value)

    def _write(self, name: str, value: Any) -> None:
        """``rms.mean = x``: the buffer takes the value and keeps its address."""
        with torch.no_grad():
            if name == "count":
                total = checked_count(value)
                prior = 0.0 if total.is_floating_point() else self._prior
                self._moments[2].copy_(total + prior)
                self._shared[2].copy_(self._moments[2])
                self._held("count").copy_(total.round())
                self._shared_count.copy_(self._held("count"))
            else:
                row = ("mean", "var").index(name)
                found = self._moment(name, value)
                for one in (self._moments, self._shared):
                    one[row].copy_(found)
                self._held(name).copy_(found)
