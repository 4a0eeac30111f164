"""One device's part of an iterator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .columns import Columns, Rows
from .compiled import CompiledGather
from .devices import new_event, raw_stream
from .plain import PlainGather
from .plan import Share
from .resident import resident

with suppress(ImportError):
    import torch


class Worker:
    """One device's part of an iterator."""

    def __init__(
        self,
        device: torch.device,
        environments: tuple[int, ...],
        size: int,
        columns: Columns,
        there: Rows | None,
    ) -> None:
        self.device = device
        self.environments = environments
        self._full = [size] * len(environments)
        self._step = sum(self._full)
        # What is there already is shared by its owner.
        self._resident = resident(there or columns.tensors, self.device)
        tensors, transforms = self._resident.tensors, columns.transforms
        compiled = None
        if self.device.type == "cuda":
            compiled = CompiledGather.make(tensors, transforms, self._step)
        self._gather: PlainGather | CompiledGather = compiled or PlainGather(tensors, transforms)
        self._order: torch.Tensor | None = None
        self._uploaded: torch.cuda.Event | None = None
        self._met: set[int] = set()  # the streams that this epoch's order and columns expect
        self._homes: set[int] = set()  # the streams on which memory of batches was allocated
        if self.device.type == "cuda":
            # Other threads and streams will read what was copied just now.
            torch.cuda.synchronize(self.device)

    def start(self, share: Share) -> None:
        """Begins an epoch: the one time that indices go to the device."""
        order = share.order
        if order is not None and self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            order = order.pin_memory().to(self.device, non_blocking=True)
            self._uploaded = new_event()
            self._uploaded.record(stream)
        self._order = order
        self._met.clear()
        self._gather.start(order, share.offset, share.seed)

    def gather(
        self, batch: int, sizes: Sequence[int] | None, into: list[Rows] | None
    ) -> tuple[list[Rows], torch.cuda.Event | None]:
        """A batch's rows for each environment here, and the event after which they
        may be read on other streams.

        Args:
            sizes: of the first environments; None: a full batch.
        """
        here = self.sizes_here(sizes)
        if not here:
            return [], None
        if self.device.type == "cuda":
            handle = raw_stream(self.device.index)
            if handle not in self._met:
                self._met.add(handle)
                self._meet(torch.cuda.current_stream(self.device))
            if into is None:
                self._homes.add(handle)
            elif self._homes != {handle}:
                self._mark(into)
        return self._gather.gather(batch * self._step, here, into)

    def sizes_here(self, sizes: Sequence[int] | None) -> list[int]:
        """Of a batch's sizes by environment those of this device; None: a full batch."""
        if sizes is None:
            return self._full
        return [sizes[env] for env in self.environments if env < len(sizes)]

    def slot(self, memory: list[Rows], sizes: Sequence[int] | None) -> list[Rows] | None:
        """A ring slot's memory in a batch's sizes; None: it has none yet."""
        if not memory or sizes is None:
            return memory or None
        return [
            tuple(x if size == len(x) else x[:size] for x in rows)
            for size, rows in zip(self.sizes_here(sizes), memory)
        ]

    def _meet(self, stream: torch.cuda.Stream) -> None:
        """Orders and protects what a stream is going to read."""
        handle = stream.cuda_stream
        if handle not in self._resident.streams:
            self._resident.streams.add(handle)
            for column in self._resident.tensors:
                column.record_stream(stream)
        if self._order is not None and self._uploaded is not None:
            stream.wait_event(self._uploaded)
            self._order.record_stream(stream)

    def _mark(self, slot: list[Rows]) -> None:
        """Protects a ring's memory, which the current stream writes and another one allocated."""
        stream = torch.cuda.current_stream(self.device)
        for rows in slot:
            for x in rows:
                x.record_stream(stream)

    def wait_for(self, events: Mapping[Any, torch.cuda.Event]) -> None:
        """Makes what is gathered next come after `events`."""
        if self.device.type == "cuda":  # on the CPU everything was read when it was marked
            stream = torch.cuda.current_stream(self.device)
            for event in events.values():
                stream.wait_event(event)
