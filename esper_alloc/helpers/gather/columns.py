"""Columns: the tensors behind inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, Union

from .transform import ImageTransform

with suppress(ImportError):
    import torch

#: A tensor of samples, or several by name.
Samples = Union["torch.Tensor", Mapping[str, "torch.Tensor"]]
#: What a batch has of inputs and of targets: a tensor, or those by name.
if TYPE_CHECKING:
    # Who writes GatherBatchIterator alone means one of tensors.
    from torch import Tensor
    from typing_extensions import TypeVar as WithDefault

    Inputs = WithDefault("Inputs", Tensor, dict[str, Tensor], Mapping[str, Tensor], default=Tensor)
    Targets = WithDefault(
        "Targets", Tensor, dict[str, Tensor], Mapping[str, Tensor], default=Tensor
    )
else:
    Inputs, Targets = TypeVar("Inputs"), TypeVar("Targets")
#: How samples are treated: all alike, or those with a name.
Transforms = ImageTransform | Mapping[str, ImageTransform] | None
#: What one environment gets of each column.
Rows = tuple["torch.Tensor", ...]


class Columns:
    """Inputs and targets as a flat tuple of columns, and the way back."""

    def __init__(self, inputs: Samples, targets: Samples, transform: Transforms) -> None:
        self._input_names = _names(inputs, "inputs")
        self._target_names = _names(targets, "targets")
        self.tensors = (*_values(inputs), *_values(targets))
        names = [
            *_column_names(self._input_names, "inputs"),
            *_column_names(self._target_names, "targets"),
        ]
        for name, tensor in zip(names, self.tensors):
            _check_column(name, tensor)
        lengths = {name: len(tensor) for name, tensor in zip(names, self.tensors)}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"inputs and targets have different lengths: {listed}")
        self.length = len(self.tensors[0])
        self.transforms = self._transforms(transform)
        for name, tensor, how in zip(names, self.tensors, self.transforms):
            if how is not None:
                how.check(tensor, name)
        self.plain = self._input_names is None and self._target_names is None

    def _transforms(self, transform: Transforms) -> tuple[ImageTransform | None, ...]:
        """Of each column; targets have none."""
        inputs = [None] if self._input_names is None else self._input_names
        if isinstance(transform, Mapping):
            unknown = [name for name in transform if name not in inputs]
            if unknown:
                raise ValueError(f"transform names {unknown[0]!r}, which is not one of the inputs")
            found = [None if name is None else transform.get(name) for name in inputs]
        elif transform is None or self._input_names is None:
            found = [transform]
        else:
            raise ValueError("inputs is a dict: transform must be a dict with some of its names")
        for how in found:
            if how is not None and not isinstance(how, ImageTransform):
                raise TypeError(f"transform must be an ImageTransform, not {type(how).__name__}")
        count = len(self.tensors)
        return (*found, *(None,) * (count - len(found)))[:count]

    def restore(self, rows: Rows) -> tuple[Any, Any]:
        """(inputs, targets) in the shape that they came in."""
        cut = 1 if self._input_names is None else len(self._input_names)
        return _named(self._input_names, rows[:cut]), _named(self._target_names, rows[cut:])


def _names(samples: Samples, what: str) -> list[str] | None:
    if isinstance(samples, torch.Tensor):
        return None
    if isinstance(samples, Mapping) and samples:
        return list(samples)
    raise TypeError(
        f"{what} must be a tensor or a dict of tensors with at least one entry, "
        f"not {'an empty dict' if isinstance(samples, Mapping) else type(samples).__name__}"
    )


def _values(samples: Samples) -> list[torch.Tensor]:
    return [samples] if isinstance(samples, torch.Tensor) else list(samples.values())


def _column_names(names: list[str] | None, what: str) -> list[str]:
    return [what] if names is None else [f"{what}[{name!r}]" for name in names]


def _named(names: list[str] | None, rows: Rows) -> Any:
    return rows[0] if names is None else dict(zip(names, rows))


def _check_column(name: str, tensor: Any) -> None:
    nested = isinstance(tensor, torch.Tensor) and tensor.is_nested
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or nested:
        kind = "a nested one" if nested else getattr(tensor, "layout", type(tensor).__name__)
        raise TypeError(f"{name} must be a dense tensor, not {kind}")
    if tensor.dim() == 0:
        raise ValueError(f"{name} has no dimensions: the first one must be the samples")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}: only cpu and cuda are supported")
