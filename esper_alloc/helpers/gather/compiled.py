"""Gathering by the CUDA kernel: one launch for all environments of a device.

What a column is like is described here, in plain numbers, for the kernel in
``csrc/kernels/gather.cu``; whatever it does not do is left to PyTorch's own
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from .. import kernels
from .plan import mix
from .transform import ImageTransform, is_channels_last

with suppress(ImportError):
    import torch

__all__ = ["CompiledGather", "Description", "describe"]

_COPY, _CONVERT = 0, 1
#: Types of torch by name, and the kernel's numbers for them, as in gather.h.
_TYPES = {"uint8": 0, "float16": 1, "bfloat16": 2, "float32": 3}
#: A launch counts units in fewer bits than 31.
_MAX_UNITS = 1 << 30


class Description(NamedTuple):
    """A column to the kernel: the fields of gather.h's esper_gather_column that have
    these names; divisors by what they divide by."""

    kind: int
    unit_bytes: int
    row_units: int
    source_type: int
    result_type: int
    source_last: int
    channels: int
    height: int
    width: int
    crop: int
    flip_threshold: int


def describe(
    source: torch.Tensor, transform: ImageTransform | None, rows: int
) -> Description | None:
    """How the kernel gathers `source`; None: it cannot.

    Args:
        source: [N, ...], dense, in either memory format.
        rows: the most that one batch has.
    """
    how = ImageTransform() if transform is None else transform
    elements = source[:0].numel() if source.shape[0] == 0 else source[0].numel()
    if elements == 0 or source.shape[0] == 0:
        return None
    dtype = how.result_dtype(source.dtype)
    source_last = is_channels_last(source)
    result_last = how.memory_format(source) == torch.channels_last
    moved = bool(how.crop or how.flip_threshold or source_last != result_last)
    if dtype == source.dtype and how.mean is None and not moved:
        found = _copy(source, elements)
    else:
        if _type(dtype) is None or _type(source.dtype) is None:
            return None
        found = _conversion(source, how, elements, dtype)
    fits = rows * found.row_units < _MAX_UNITS and elements * 4 < _MAX_UNITS
    return found if fits and elements * source.element_size() < _MAX_UNITS else None


def _type(dtype: torch.dtype) -> int | None:
    """The kernel's number for a dtype; None: it has none."""
    return _TYPES.get(str(dtype).removeprefix("torch."))


def _copy(source: torch.Tensor, elements: int) -> Description:
    size, unit = elements * source.element_size(), 16
    while size % unit or source.data_ptr() % unit:
        unit //= 2
    return Description(_COPY, unit, size // unit, 0, 0, 0, 1, 1, 1, 0, 0)


def _conversion(
    source: torch.Tensor, how: ImageTransform, elements: int, dtype: torch.dtype
) -> Description:
    image = source.dim() == 4
    channels = source.shape[1] if image or how.mean is not None else 1
    height = source.shape[2] if image else 1
    each = dtype.itemsize
    wide = elements * each % 16 == 0 and source.data_ptr() % 16 == 0
    unit = 16 if wide else each
    return Description(
        kind=_CONVERT,
        unit_bytes=unit,
        row_units=elements * each // unit,
        source_type=_type(source.dtype) or 0,
        result_type=_type(dtype) or 0,
        source_last=int(is_channels_last(source)),
        channels=channels,
        height=height,
        width=elements // channels // height,
        crop=how.crop,
        flip_threshold=how.flip_threshold,
    )


def constants(source: torch.Tensor, how: ImageTransform | None) -> torch.Tensor | None:
    """What the kernel normalises with, on the CPU: for uint8 [C, 256], else [2, C],
    mean and std; None: nothing."""
    if how is None or how.mean is None or how.std is None:
        return None
    if source.dtype == torch.uint8:
        return how.table()
    return torch.tensor([how.mean, how.std], dtype=torch.float32, device="cpu")


class CompiledGather:
    """`PlainGather` by one kernel launch for all environments."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    @staticmethod
    def make(
        columns: Sequence[torch.Tensor], transforms: Sequence[ImageTransform | None], rows: int
    ) -> CompiledGather | None:
        """None where the kernel cannot serve.

        Args:
            columns: on one CUDA device.
            rows: the most that one batch has.
        """
        device = columns[0].device
        described = []
        for column, how in zip(columns, transforms):
            description = describe(column, how, rows)
            if description is None:
                return None
            on_device = constants(column, how)
            asked = ImageTransform() if how is None else how
            described.append(
                (
                    column,
                    None if on_device is None else on_device.to(device),
                    asked.result_dtype(column.dtype),
                    asked.memory_format(column) == torch.channels_last,
                    tuple(description),
                )
            )
        if device.index is None or not kernels.usable(device.index):
            return None
        return CompiledGather(kernels.load().gatherer(described, torch.cuda.Event))

    def start(self, order: torch.Tensor | None, offset: int, seed: int) -> None:
        """Begins an epoch: see `Share`; `order` on the columns' device."""
        self._compiled.start(order, offset, mix(seed))

    def gather(
        self, start: int, sizes: Sequence[int], into: list[tuple[torch.Tensor, ...]] | None
    ) -> tuple[list[tuple[torch.Tensor, ...]], torch.cuda.Event]:
        """The rows of each environment, as `PlainGather.gather`, and the event after
        which they are ready. `sizes` are at least one and fall by at most one."""
        size = sizes[-1]
        larger = sizes.index(size)
        if size == 0:
            raise ValueError("an environment has no rows: leave it out")
        rows: tuple[list[tuple[torch.Tensor, ...]], torch.cuda.Event]
        rows = self._compiled.gather(start, len(sizes), size, larger, into)
        return rows
