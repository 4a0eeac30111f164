"""Running normalisation of observations, rewards and values.

:class:`RunningMeanStd`, :class:`RewardNormalizer` and :class:`ValueNormalizer` have
the interface of esper-lite's classes of these names, so that an import can be
swapped. They are ``nn.Module``: they move, save, freeze, compile and synchronise
with the model they belong to. They know nothing of the allocator and work without
it, on the CPU and on CUDA.

Moments are kept in float64 and counts in int64; formulas and their sources stand in
:mod:`esper_alloc.moments`. State lives in buffers at addresses that change only when
the module is moved, is written in place, and nothing here waits for a device, so
updates can be captured into CUDA graphs and compiled.

What contributes to the statistics: values that are finite, that the mask does not
leave out, and whose weight is a finite number above 0. So NaN and infinity never
reach them. Normalised, NaN stays NaN and an infinity becomes the clip bound. A row
counts when at least one of its values contributes.
"""

from __future__ import annotations

import math
import numbers
import operator
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from esper_alloc import kernels, moments
from esper_alloc.moments import CENTERED, SAMPLE, SCALED

__all__ = ["RewardNormalizer", "RunningMeanStd", "ValueNormalizer"]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COMPILED: Any = kernels.load()
_ANY_CLIP = math.inf
_STATE_VERSION = 1.0  # of the extra state
_HEADER = 4  # numbers in it before the moments: version, epsilon, momentum, prior

Self = TypeVar("Self", bound="_Normalizer")


def _untyped(value: Any) -> Any:
    """For parts of torch that have no annotations."""
    return value


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


_forward_ad: Any = _untyped(forward_ad)


def _forward_derivatives() -> bool:
    """Whether tensors may carry tangents (forward-mode differentiation)."""
    level: int = _forward_ad._current_level
    return level >= 0


def _wants_gradient(x: Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return not torch.compiler.is_compiling() and _forward_derivatives()


_outside_graphs: Any = _untyped(torch.compiler).disable(
    _call, reason="a normaliser's statistics have to be moved"
)


class _Normalizer(nn.Module):
    """What the three have in common: state, devices, checkpoints, ranks."""

    _scaling = CENTERED
    _warm_up = 0.0  # weight from which scaling and momentum act
    _mean_name, _var_name = "mean", "var"

    shape: torch.Size
    epsilon: float
    momentum: float | None
    strict_device: bool
    frozen: bool
    count: Tensor
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
        self.epsilon = _checked_epsilon(epsilon)
        self.momentum = _checked_momentum(momentum)
        self.strict_device = bool(strict_device)
        self.frozen = False
        self._own_prior = prior
        self._prior = prior  # weight that was there before any sample
        self._warned: set[tuple[str, str]] = set()
        persistent = self._mean_name == "mean"
        with torch.inference_mode(False), torch.no_grad():
            zeros = torch.zeros(self.shape, dtype=torch.float64, device=device)
            start = torch.stack([zeros, zeros + 1.0, zeros + prior])
            count = torch.zeros((), dtype=torch.int64, device=device)
            # register_buffer() would take `mean` for an attribute that is there.
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
            self.count.zero_()
            self._moments_are_set()

    def reset_parameters(self) -> None:
        """What ``to_empty()`` asks for: :meth:`reset`."""
        self.reset()

    def _moments_are_set(self) -> None:
        """Brings the rest of the state in line with moments and count."""
        self._rounded("mean").copy_(self._moments[0])
        self._rounded("var").copy_(self._moments[1])
        self._shared.copy_(self._moments)
        self._shared_count.copy_(self.count)

    # --- devices ------------------------------------------------------------------

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        # Statistics move with their module and keep their precision: half() and
        # to(dtype) of a model are not about them. Nor may they become inference
        # tensors, which could not be written outside of inference mode.
        before = dict(self._buffers)
        with torch.inference_mode(False):
            _untyped(super())._apply(fn, recurse)
            for name, old in before.items():
                new = self._buffers[name]
                if old is not None and new is not None and new.dtype != old.dtype:
                    self._buffers[name] = old.to(new.device)
        self._choose_kernels()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        _untyped(super()).__setstate__(state)
        self._choose_kernels()

    def _choose_kernels(self) -> None:
        device = self._moments.device
        self._has_kernels = _COMPILED is not None and device.type == "cpu"
        if device.type == "cuda" and kernels.usable(device.index):
            _COMPILED.normalizer_allow(device.index)
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
        return not bool((mean.any() | (var != 1).any() | (weight != self._own_prior).any()))

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
                f"{found}, where they would be lost: it holds no data. Give it values that have "
                "memory, or these to a copy.deepcopy() of it that was moved .to('meta')"
            )
        if (str(here), str(device)) not in self._warned:
            self._warned.add((str(here), str(device)))
            warnings.warn(
                f"{found}: it moves them, which waits for the device, and breaks the graph of a "
                f"compiled region. {remedy}",
                UserWarning,
                stacklevel=kernels.user_stacklevel(),
            )
        self.to(device)

    # --- values -------------------------------------------------------------------

    def _admit(self, x: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Raises unless x can be served; then moves the statistics to it if they must."""
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} takes a tensor, not {type(x).__name__}")
        if x.dtype not in _DTYPES or x.layout != torch.strided:
            raise TypeError(
                f"{name} takes dense values of float32, float64, float16 or bfloat16, not "
                f"{x.dtype} ({x.layout}); convert them, for example with .float()"
            )
        first = x.dim() - len(self.shape)
        if first < 0 or x.shape[first:] != self.shape:
            raise ValueError(
                f"{name} of shape {tuple(self.shape)} was given values of shape {tuple(x.shape)}: "
                f"its last dimensions must be the normaliser's shape"
            )
        self._check_selection(x, mask, weights)
        if x.device != self._moments.device:
            self._move_to_values(x.device)

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
            _COMPILED is not None
            and mask is None
            and weights is None
            and not torch.compiler.is_compiling()
        ):
            held = self._buffers
            done = _COMPILED.normalizer_step(
                held["_moments"],
                held[self._mean_name],
                held[self._var_name],
                held["count"],
                x,
                self.momentum,
                self._warm_up,
                self.epsilon,
                _ANY_CLIP,
                self._scaling,
                False,
            )
            if done is not NotImplemented:
                return
        self._admit(x, mask, weights)
        operators = torch.ops.esper_alloc if self._has_kernels else moments
        operators.normalizer_update_(
            self._moments,
            self._rounded("mean"),
            self._rounded("var"),
            self.count,
            x.detach(),
            mask,
            None if weights is None else weights.detach(),
            -1.0 if self.momentum is None else self.momentum,
            self._warm_up,
        )

    def _normalize(self, x: Tensor, clip: float, inverse: bool = False) -> Tensor:
        _check_clip(clip)
        if self._must_leave_graph(x):
            return _outside_graphs(self._normalize, x, clip, inverse)  # type: ignore[no-any-return]
        if (
            _COMPILED is not None
            and not torch.compiler.is_compiling()
            and not _forward_derivatives()
        ):
            held = self._buffers
            result: Any = _COMPILED.normalizer_apply(
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
        self._admit(x)
        # The operators have no gradient; the composition has all of them.
        by_operator = self._has_kernels and not _wants_gradient(x)
        operators = torch.ops.esper_alloc if by_operator else moments
        normalized: Tensor = operators.normalizer_apply(
            self._moments,
            self._rounded("mean"),
            self._rounded("var"),
            x,
            self._warm_up,
            self.epsilon,
            float(clip),
            self._scaling,
            inverse,
        )
        return normalized

    def _step(
        self, x: Tensor, clip: float, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if not self.training or self.frozen:
            return self._normalize(x, clip)
        _check_clip(clip)
        if self._must_leave_graph(x):
            return _outside_graphs(self._step, x, clip, mask, weights)  # type: ignore[no-any-return]
        if (
            _COMPILED is not None
            and mask is None
            and weights is None
            and not torch.compiler.is_compiling()
            and not _forward_derivatives()
        ):
            held = self._buffers
            result: Any = _COMPILED.normalizer_step(
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
        self._admit(x, mask, weights)
        if not self._has_kernels or _wants_gradient(x):
            self._update(x, mask, weights)
            return self._normalize(x, clip)
        normalized: Tensor = torch.ops.esper_alloc.normalizer_step_(
            self._moments,
            self._rounded("mean"),
            self._rounded("var"),
            self.count,
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

    def _known(self) -> Tensor:
        """The moments, float64, after what the user may have written."""
        return moments.known(self._moments, self._rounded("mean"), self._rounded("var"))

    # --- other normalisers ----------------------------------------------------------

    def merge(self, other: _Normalizer) -> None:
        """Takes in what `other` has seen, as if this one had seen it too.

        `other` stays as it is. Its statistics come to this one's device.

        Raises:
            TypeError: it is no normaliser of this kind.
            ValueError: it has another shape, or one of them has a momentum: then
                there is no telling what the samples weigh.
        """
        if not isinstance(other, type(self)):
            raise TypeError(f"merge takes a {type(self).__name__}, not {type(other).__name__}")
        if other.shape != self.shape:
            raise ValueError(f"cannot merge shape {tuple(other.shape)} into {tuple(self.shape)}")
        if self.momentum is not None or other.momentum is not None:
            raise ValueError("normalisers with a momentum cannot be merged: samples have no weight")
        with torch.no_grad():
            theirs = other._known().to(self.device)
            base = torch.zeros_like(theirs)
            base[1] = 1.0
            base[2] = other._prior
            self._moments.copy_(moments.merged(self._known(), moments.difference(theirs, base)))
            self.count.add_(other.count.to(self.device))
            self._rounded("mean").copy_(self._moments[0])
            self._rounded("var").copy_(self._moments[1])

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
            seen = self.count - self._shared_count
            dist.all_reduce(seen, group=group)
            self._moments.copy_(now)
            self.count.copy_(self._shared_count + seen)
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

    # --- checkpoints ------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """What the keys of the state do not hold, as one float64 tensor: epsilon,
        momentum, the weight before the first sample, the moments."""
        header = [
            _STATE_VERSION,
            self.epsilon,
            math.nan if self.momentum is None else self.momentum,
            self._prior,
        ]
        begin = torch.tensor(header, dtype=torch.float64, device=self.device)
        return torch.cat([begin, self._known().reshape(-1)])

    def set_extra_state(self, state: Any) -> None:
        """Loading sets this together with the rest of the state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in self._named_state().items():
            # A state is a snapshot: updates write into the buffers.
            destination[prefix + name] = value if keep_vars else value.detach().clone()
        destination[prefix + "_extra_state"] = self.get_extra_state()
        metadata = getattr(destination, "_metadata", None)
        if prefix == "" and metadata is not None:
            # The keys are exactly those of esper-lite; torch.save keeps metadata.
            metadata.setdefault("", {})["extra_state"] = destination.pop("_extra_state")

    def _named_state(self) -> dict[str, Tensor]:
        return {name: self._rounded(name) for name in ("mean", "var")} | {"count": self.count}

    def _rounded(self, name: str) -> Tensor:
        """The buffer of the mean or the variance, float32."""
        held = self._buffers[self._mean_name if name == "mean" else self._var_name]
        assert held is not None
        return held

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = {key[len(prefix) :]: key for key in state_dict if key.startswith(prefix)}
        wanted = self._state_names(keys)
        extra = state_dict.get(prefix + "_extra_state", local_metadata.get("extra_state"))
        if strict:
            known = {*wanted, "_extra_state"}
            unexpected_keys.extend(key for name, key in keys.items() if name not in known)
        missing = [prefix + name for name in wanted if name not in keys]
        if missing:
            missing_keys.extend(missing)
            return
        try:
            mean, spread, count = (state_dict[prefix + name] for name in wanted)
            self._load_statistics(wanted, mean, spread, count, extra)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix or type(self).__name__}: {error}")

    def _state_names(self, keys: Mapping[str, Any]) -> tuple[str, str, str]:
        """The names of mean, spread and count in a state with these keys."""
        if "running_mean" in keys:  # rl_games
            return "running_mean", "running_var", "count"
        return "mean", "var", "count"

    def _load_statistics(
        self, names: tuple[str, str, str], mean: Any, var: Any, count: Any, extra: Any
    ) -> None:
        """Checks all, then writes all. Raises TypeError or ValueError before."""
        mean64, var64 = self._moment("mean", mean), self._moment("var", var)
        total = _checked_count(count)
        exact = not total.is_floating_point()
        prior = self._own_prior
        from_games = names[0] == "running_mean"
        if from_games:
            prior = 1.0  # rl_games counts the statistics it begins with as a sample
        # A whole count is of samples; another includes what was there before them.
        of_samples = exact and not from_games
        weight = torch.full_like(mean64, float(total.item()) + (prior if of_samples else 0.0))
        samples = total.round().to(torch.int64)
        epsilon, momentum = self.epsilon, self.momentum
        now = torch.stack([mean64, var64, weight])
        if extra is not None:
            epsilon, momentum, prior, full = self._parsed_extra(extra)
            now = moments.known(full, mean64.to(torch.float32), var64.to(torch.float32))
        with torch.no_grad():
            self.epsilon, self.momentum, self._prior = epsilon, momentum, prior
            self._moments.copy_(now)
            self.count.copy_(samples)
            self._moments_are_set()

    def _moment(self, name: str, value: Any) -> Tensor:
        """A moment from elsewhere, checked: float64, on the CPU."""
        given = _as_numbers(name, value)
        if given.is_complex() or given.is_meta:
            raise ValueError(f"{name} must be real numbers, not {given!r}")
        found = given.detach().to("cpu", torch.float64)
        if found.shape != self.shape:
            raise ValueError(
                f"{name} has shape {tuple(found.shape)}, and the normaliser {tuple(self.shape)}"
            )
        if not bool(torch.isfinite(found).all()) or (name != "mean" and bool((found < 0).any())):
            raise ValueError(f"{name} holds numbers that are no {name}")
        return found

    def _parsed_extra(self, extra: Any) -> tuple[float, float | None, float, Tensor]:
        odd = "the extra state is not one that this version of esper_alloc wrote for this shape"
        if not isinstance(extra, Tensor) or extra.is_meta or extra.is_complex():
            raise ValueError(odd)
        values = extra.detach().to("cpu", torch.float64)
        size = 3 * self.shape.numel()
        if values.dim() != 1 or values.numel() != _HEADER + size or values[0] != _STATE_VERSION:
            raise ValueError(odd)
        _, epsilon, momentum, prior = values[:_HEADER].tolist()
        full = values[_HEADER:].reshape(3, *self.shape)
        possible = torch.isfinite(full).all() and (full[1:] >= 0).all() and 0 <= prior < math.inf
        if not possible:
            raise ValueError(f"{odd}: it holds numbers that are no moments")
        return (
            _checked_epsilon(epsilon),
            _checked_momentum(None if math.isnan(momentum) else momentum),
            prior,
            full,
        )

    def load_statistics(self, source: Any) -> None:
        """Takes over statistics from elsewhere: an object with ``mean``, ``var`` and
        ``count`` (``obs_rms`` of Stable-Baselines3 or Gymnasium), or a mapping of
        these, or of ``running_mean``, ``running_var`` and ``count`` (rl_games). What
        else it holds is not looked at.

        Raises:
            RuntimeError: they are not there, or do not fit; nothing has changed.
        """
        if not isinstance(source, Mapping):
            names = ("mean", "var", "count")
            source = {name: getattr(source, name) for name in names if hasattr(source, name)}
        wanted = self._state_names(source)
        self.load_state_dict({name: source[name] for name in wanted if name in source})

    # --- writing attributes ---------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("mean", "var", "count") and name in self.__dict__.get("_buffers", ()):
            self._write(name, value)
        else:
            super().__setattr__(name, value)

    def _write(self, name: str, value: Any) -> None:
        """``rms.mean = x``: the buffer takes the value and keeps its address."""
        with torch.no_grad():
            if name == "count":
                total = _checked_count(value)
                prior = 0.0 if total.is_floating_point() else self._prior
                self._moments[2].copy_(total + prior)
                self._shared[2].copy_(self._moments[2])
                self.count.copy_(total.round())
                self._shared_count.copy_(self.count)
            else:
                row = ("mean", "var").index(name)
                found = self._moment(name, value)
                for one in (self._moments, self._shared):
                    one[row].copy_(found)
                self._rounded(name).copy_(found)


def _as_numbers(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be numbers, not {value!r}") from None


def _checked_count(count: Any) -> Tensor:
    """A count as a tensor on the CPU, []; a whole one as int64, another as float64.

    Raises:
        TypeError, ValueError: it is no number from 0 to below 2^63.
    """
    number = count
    if not _is_number(count):
        given = _as_numbers("count", count)
        if given.numel() != 1 or given.is_complex() or given.is_meta:
            raise ValueError(f"count must be one number, not {count!r}")
        number = given.detach().reshape(()).item()
    if not 0 <= number < 2**63:
        raise ValueError(f"count must be a number from 0 on, and below 2**63, not {number}")
    if isinstance(number, numbers.Integral):
        return torch.tensor(int(number), dtype=torch.int64)
    return torch.tensor(float(number), dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, numbers.Integral) else shape
    try:
        checked = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"shape is an integer or a tuple of integers, not {shape!r}") from None
    if any(size < 0 for size in checked):
        raise ValueError(f"shape has sizes from 0 on, not {shape!r}")
    return checked


def _check_clip(clip: float) -> None:
    if clip is None or not clip > 0:
        raise ValueError(f"clip must be above 0, not {clip}: float('inf') clips nothing")


def _checked_epsilon(epsilon: float) -> float:
    if not (_is_number(epsilon) and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon is a number from 0 on, not {epsilon!r}")
    return float(epsilon)


def _checked_momentum(momentum: float | None) -> float | None:
    if momentum is None:
        return None
    if not (_is_number(momentum) and 0 <= momentum < 1):
        raise ValueError(f"momentum is None or a number from 0 to below 1, not {momentum!r}")
    return float(momentum)


class RunningMeanStd(_Normalizer):
    """Normalises observations by the mean and standard deviation of all seen so far.

    Args:
        shape: of one observation; an int for one dimension.
        epsilon: added to the variance before its root; also the weight with which
            the initial mean 0 and variance 1 count (so that nothing is divided by 0).
        device: of the statistics.
        momentum: None: every sample counts alike. Else each batch counts
            1 - momentum: ``mean = m * mean + (1 - m) * batch_mean`` and ``var = m *
            var + (1 - m) * batch_var + m * (1 - m) * (mean - batch_mean)**2``.
        strict_device: values on another device are an error. Else the statistics
            move to them, with a warning.

    Attributes:
        mean, var: of what was seen, ``[*shape]``, float32. Assigning to them, or
            writing into them, sets the statistics.
        count: how many observations were seen, int64, ``[]``.

    Moments are float64 inside and merged by the formulas of :mod:`esper_alloc.moments`.
    ``eval()`` and :meth:`freeze` keep the statistics as they are in every method.
    """

    mean: Tensor
    var: Tensor

    def __init__(
        self,
        shape: tuple[int, ...] | int,
        epsilon: float = 1e-4,
        device: str | torch.device = "cpu",
        momentum: float | None = None,
        *,
        strict_device: bool = False,
    ) -> None:
        size, prior = _checked_shape(shape), _checked_epsilon(epsilon)
        super().__init__(size, epsilon, device, momentum, prior, strict_device)

    def update(
        self, x: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> None:
        """Takes a batch in; nothing in ``eval()`` or after :meth:`freeze`.

        Args:
            x: ``[..., *shape]``, any number of leading dimensions; float32, float64,
                float16 or bfloat16. An empty batch changes nothing. Of NaN and
                infinity see the module's description.
            mask: bool, of the leading dimensions or like x; false: does not count.
            weights: floating-point, of the leading dimensions or like x. A value
                counts as so many; not at all unless finite and above 0.

        Raises:
            TypeError, ValueError: not such a tensor; the state is as it was.
            RuntimeError: another device, with strict_device=True.
        """
        self._update(x, mask, weights)

    def normalize(self, x: Tensor, clip: float = 10.0) -> Tensor:
        """``clamp((x - mean) / sqrt(var + epsilon), -clip, clip)``.

        Args:
            x: ``[..., *shape]``, as for :meth:`update`. Gradients pass.

        Returns:
            Like x; float64 for float64, else float32.
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
        """:meth:`update`, then :meth:`normalize`: on CUDA one launch for both."""
        return self._step(x, clip, mask, weights)

    def forward(self, x: Tensor) -> Tensor:
        """:meth:`update_and_normalize` in training mode, :meth:`normalize` else."""
        return self._step(x, 10.0)

    def denormalize(self, x: Tensor) -> Tensor:
        """``x * sqrt(var + epsilon) + mean``: undoes :meth:`normalize` where it did
        not clip."""
        return self._normalize(x, _ANY_CLIP, inverse=True)


class ValueNormalizer(_Normalizer):
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

    Values may have any shape: each element is a sample.
    """

    mean: Tensor
    var: Tensor

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
        :meth:`RunningMeanStd.update`."""
        self._update(returns, mask, weights)

    def normalize(self, returns: Tensor) -> Tensor:
        """``returns / sqrt(var + epsilon)``; the returns during the first 32 samples.

        Gradients pass. Returns float64 for float64, else float32.
        """
        return self._normalize(returns, _ANY_CLIP)

    def denormalize(self, values: Tensor) -> Tensor:
        """``values * sqrt(var + epsilon)``; the values during the first 32 samples."""
        return self._normalize(values, _ANY_CLIP, inverse=True)

    def update_and_normalize(
        self, returns: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """:meth:`update`, then :meth:`normalize`: on CUDA one launch for both."""
        return self._step(returns, _ANY_CLIP, mask, weights)

    def forward(self, returns: Tensor) -> Tensor:
        """:meth:`update_and_normalize` in training mode, :meth:`normalize` else."""
        return self._step(returns, _ANY_CLIP)


class RewardNormalizer(_Normalizer):
    """Scales rewards by their running standard deviation; no mean is subtracted.

    ``reward / max(epsilon, s)``, clipped, where s is the sample standard deviation
    (by count - 1) of all rewards so far; the reward itself while there is only one.

    Args:
        clip: results are held within -clip and clip.
        epsilon: the least that rewards are divided by.
        device: of the statistics.
        strict_device: see :class:`RunningMeanStd`.

    Attributes:
        mean: of the rewards, ``[]``, float64.
        m2: sum of squared deviations from it, ``[]``, float64.
        count: how many there were, int64, ``[]``. All three can be assigned to.

    A reward is a number, and the result then a float (which waits for the device),
    or a tensor of any shape: all of its elements are taken in before the first is
    scaled.
    """

    _scaling = SAMPLE
    _warm_up = 2.0
    _mean_name, _var_name = "_mean", "_var"

    def __init__(
        self,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        *,
        device: str | torch.device = "cpu",
        strict_device: bool = False,
    ) -> None:
        super().__init__((), epsilon, device, None, 0.0, strict_device)
        _check_clip(clip)
        self.clip = float(clip)
        self._m2_without_count = 0.0  # assigned before the count was

    @property
    def mean(self) -> Tensor:
        return self._moments[0].clone()

    @mean.setter
    def mean(self, value: Any) -> None:
        self._write("mean", value)

    @property
    def m2(self) -> Tensor:
        total = self._moments[2]
        return torch.where(total > 0, self._moments[1] * total, self._m2_without_count)

    @m2.setter
    def m2(self, value: Any) -> None:
        total = self._moments[2].item()
        found = self._moment("m2", value)
        if total:
            self._write("var", found / total)
        else:
            self._m2_without_count = float(found.item())

    def update(
        self,
        reward: Tensor | float,
        *,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Takes rewards in. See :meth:`RunningMeanStd.update`."""
        self._update(self._as_tensor(reward), mask, weights)

    def update_and_normalize(
        self,
        reward: Tensor | float,
        *,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Any:
        """Takes rewards in and scales them. A number gives a float, a tensor one."""
        if isinstance(reward, Tensor):
            return self._step(reward, self.clip, mask, weights)
        if mask is None and weights is None and self.training and not self.frozen:
            held = self._buffers
            if _COMPILED is not None and not torch.compiler.is_compiling():
                result = _COMPILED.normalizer_step(
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
                    return result
        return self._step(self._as_tensor(reward), self.clip, mask, weights).item()

    def normalize_only(self, reward: Tensor | float) -> Any:
        """Scales rewards by the statistics as they are."""
        result = self._normalize(self._as_tensor(reward), self.clip)
        return result if isinstance(reward, Tensor) else result.item()

    def forward(self, reward: Tensor | float) -> Any:
        """:meth:`update_and_normalize` in training mode, :meth:`normalize_only` else."""
        return self.update_and_normalize(reward)

    def denormalize(self, reward: Tensor | float) -> Any:
        """Undoes the scaling."""
        result = self._normalize(self._as_tensor(reward), _ANY_CLIP, inverse=True)
        return result if isinstance(reward, Tensor) else result.item()

    def _write(self, name: str, value: Any) -> None:
        m2 = self.m2
        super()._write(name, value)
        if name == "count":
            self._m2_without_count = 0.0
            with torch.no_grad():  # m2 is what stays, as in esper-lite
                total = self._moments[2]
                self._moments[1].copy_(torch.where(total > 0, m2 / total, 1.0))
                self._moments_are_set()

    def reset(self) -> None:
        """Back to before the first reward, in place."""
        self._m2_without_count = 0.0
        super().reset()

    def _as_tensor(self, reward: Tensor | float) -> Tensor:
        if isinstance(reward, Tensor):
            return reward
        if not _is_number(reward):
            raise TypeError(f"a reward is a number or a tensor, not {type(reward).__name__}")
        return torch.tensor(float(reward), dtype=torch.float64, device=self._moments.device)

    def _named_state(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "m2": self.m2, "count": self.count}

    def _state_names(self, keys: Mapping[str, Any]) -> tuple[str, str, str]:
        if "m2" not in keys and ("var" in keys or "running_var" in keys):
            return super()._state_names(keys)  # of somebody else
        return "mean", "m2", "count"

    def _load_statistics(
        self, names: tuple[str, str, str], mean: Any, m2: Any, count: Any, extra: Any
    ) -> None:
        variance = m2
        if names[1] == "m2":
            total = float(_checked_count(count).item())
            spread = self._moment("m2", m2)
            variance = spread / total if total > 0 else torch.ones_like(spread)
        super()._load_statistics(names, mean, variance, count, extra)
        self._m2_without_count = 0.0
