"""Gathering by PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from .columns import Rows
from .devices import new_event
from .transform import ImageTransform, PreparedTransform, is_channels_last

with suppress(ImportError):
    import torch


class PlainGather:
    """Gathers by PyTorch's own operations, on any device.

    `compiled.CompiledGather` does the same to the bit.
    """

    def __init__(
        self,
        columns: Rows,
        transforms: Sequence[ImageTransform | None],
    ) -> None:
        self._columns = columns
        self._transforms: list[PreparedTransform | None] = []
        self._formats: list[torch.memory_format] = []
        for column, how in zip(columns, transforms):
            self._transforms.append(None if how is None else how.on(column.device))
            last = is_channels_last(column)
            own = torch.channels_last if last else torch.contiguous_format
            self._formats.append(own if how is None else how.memory_format(column))
        self._order: torch.Tensor | None = None
        self._offset = 0
        self._seed = 0

    def start(self, order: torch.Tensor | None, offset: int, seed: int) -> None:
        """Begins an epoch: see `Share`; `order` on the columns' device."""
        self._order, self._offset, self._seed = order, offset, seed

    def gather(
        self, start: int, sizes: Sequence[int], into: list[Rows] | None
    ) -> tuple[list[Rows], torch.cuda.Event | None]:
        """The rows from `start` of the order, `sizes` of them for each environment, and
        the event after which they are ready; None on the CPU.

        Args:
            into: tensors whose memory to take, of the batch's own shapes: the rows are
                new tensors over it, with its version counters; None: fresh memory.
        """
        found: list[Rows] = []
        # Batches are ordinary tensors, whatever mode they are asked for in.
        with torch.inference_mode(False), torch.no_grad():
            for env, size in enumerate(sizes):
                rows = self._rows(start, start + size)
                if into is not None:
                    rows = tuple(old.detach().copy_(new) for old, new in zip(into[env], rows))
                found.append(rows)
                start += size
        if self._columns[0].device.type == "cpu":
            return found, None
        ready = new_event()
        ready.record(torch.cuda.current_stream(self._columns[0].device))
        return found, ready

    def _rows(self, start: int, stop: int) -> Rows:
        offset = self._offset
        samples = None if self._order is None else self._order[start:stop]
        found = []
        for column, transform, form in zip(self._columns, self._transforms, self._formats):
            if samples is None:
                rows = column[offset + start : offset + stop].clone(memory_format=form)
            else:
                rows = column[samples]
            if transform is not None:
                numbers = samples
                if numbers is None:
                    numbers = torch.arange(offset + start, offset + stop, device=column.device)
                rows = transform(rows, numbers, self._seed)
            found.append(rows.contiguous(memory_format=form))
        return tuple(found)
