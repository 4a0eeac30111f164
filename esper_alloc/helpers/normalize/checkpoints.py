"""Statistics that are saved, and loaded from our own and from other classes' states."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...installation.callers import user_stacklevel
from . import moments
from .checks import checked_count
from .statistics import Statistics

_STATE_VERSION = 1.0  # of the extra state
_HEADER = 4  # numbers in it before the moments: version, epsilon, momentum, prior


class SavedStatistics(Statistics):
    """Statistics with checkpoints."""

    def get_extra_state(self) -> Tensor:
        """What the keys of the state do not hold, as one float64 tensor: epsilon,
        momentum, the weight before the first sample, the moments. Loading keeps the
        constructor's epsilon and momentum."""
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
        return {name: self._held(name) for name in ("mean", "var")} | {"count": self._held("count")}

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
            others = [key for name, key in keys.items() if name not in known]
            if prefix == "" and others:
                warnings.warn(
                    f"the state of a {type(self).__name__} has keys that it does not know, which "
                    f"are ignored: {', '.join(others)}",
                    UserWarning,
                    stacklevel=user_stacklevel(),
                )
            else:  # part of a model, where torch's rule holds
                unexpected_keys.extend(others)
        missing = [prefix + name for name in wanted if name not in keys]
        if missing:
            missing_keys.extend(missing)
            return
        try:
            mean, spread, count = (state_dict[prefix + name] for name in wanted)
            onto = None
            if self._moments.is_meta and local_metadata.get("assign_to_params_buffers"):
                onto = mean.device if isinstance(mean, Tensor) else torch.device("cpu")
            self._load_statistics(wanted, mean, spread, count, extra, onto)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix or type(self).__name__}: {error}")
            return
        if self._moments.is_meta:
            warnings.warn(
                f"a {type(self).__name__} on meta has no data, and did not take over the "
                "statistics that were loaded: pass assign=True, or call .to_empty(device=...)",
                UserWarning,
                stacklevel=user_stacklevel(),
            )
        elif prefix == "":
            self._loaded_alone(mean)

    def _loaded_alone(self, mean: Any) -> None:
        """A state of its own, with this mean, was loaded. (In a model's all are tensors.)"""

    def _state_names(self, keys: Mapping[str, Any]) -> tuple[str, str, str]:
        """The names of mean, spread and count in a state with these keys."""
        if "running_mean" in keys:  # rl_games
            return "running_mean", "running_var", "count"
        return "mean", "var", "count"

    def _load_statistics(
        self,
        names: tuple[str, str, str],
        mean: Any,
        var: Any,
        count: Any,
        extra: Any,
        onto: torch.device | None,
    ) -> None:
        """Checks all, then writes all, on the device `onto` if that is not None. Raises
        TypeError or ValueError before."""
        prior = self._own_prior
        full = None
        if extra is not None:
            try:
                prior, full = self._parsed_extra(extra)
            except ValueError:
                self._moment("mean", mean)  # says if the shape is another one
                raise
        mean64, var64 = (
            self._moment(name, value, None if full is None else full[row])
            for row, (name, value) in enumerate((("mean", mean), ("var", var)))
        )
        total = checked_count(count)
        exact = not total.is_floating_point()
        from_games = names[0] == "running_mean"
        if from_games and full is None:
            prior = 1.0  # rl_games counts the statistics it begins with as a sample
        # A whole count is of samples; another includes what was there before them.
        of_samples = exact and not from_games
        weight = torch.full_like(mean64, float(total.item()) + (prior if of_samples else 0.0))
        samples = total.round().to(torch.int64)
        now = torch.stack([mean64, var64, weight])
        if full is not None:
            now = moments.known(full, mean64.to(torch.float32), var64.to(torch.float32))
        if onto is not None:
            self.to_empty(device=onto)
        with torch.no_grad():
            self._prior = prior
            self._moments.copy_(now)
            self._held("count").copy_(samples)
            self._moments_are_set()

    def _parsed_extra(self, extra: Any) -> tuple[float, Tensor]:
        odd = "the extra state is not one that this version of esper_alloc wrote for this shape"
        if not isinstance(extra, Tensor) or extra.is_meta or extra.is_complex():
            raise ValueError(odd)
        values = extra.detach().to("cpu", torch.float64)
        size = 3 * self.shape.numel()
        if values.dim() != 1 or values.numel() != _HEADER + size or values[0] != _STATE_VERSION:
            raise ValueError(odd)
        prior = float(values[_HEADER - 1])
        full = values[_HEADER:].reshape(3, *self.shape)
        possible = torch.isfinite(full).all() and (full[1:] >= 0).all() and 0 <= prior < math.inf
        if not possible:
            raise ValueError(f"{odd}: its numbers cannot be moments")
        return prior, full

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
