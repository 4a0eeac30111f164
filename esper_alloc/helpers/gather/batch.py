"""A batch: what each environment got, and until when its memory is in use."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...uses.streams import check_stream
from ...uses.use import record_use
from .columns import Rows
from .devices import new_event

with suppress(ImportError):
    import torch

__all__ = ["GatherBatch"]

# Inputs and targets: tensors, or tensors by name.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    X = WithDefault("X", default=torch.Tensor)
    Y = WithDefault("Y", default=torch.Tensor)
else:
    X, Y = TypeVar("X"), TypeVar("Y")


class Lease:
    """A ring slot's memory while one batch has it."""

    __slots__ = ("events", "marked", "memory", "open", "room", "waiting")

    def __init__(
        self,
        memory: list[list[Rows]],
        room: list[int],
        environments: int,
        events: dict[Any, torch.cuda.Event],
    ) -> None:
        # By device, then by environment on it. The batch has tensors of its own over it, so
        # that what is done to those (a gradient, say) is not found on the next batch's; they
        # share its version counters: a backward that comes after the slot was overwritten
        # fails, and does not compute with other data.
        self.memory = memory
        self.room = room  # rows that each environment's memory holds
        self.events = events  # one for each stream that ever read this slot
        self.marked: set[Any] = set()  # the streams that read this batch
        self.waiting = set(range(environments))  # who has not said that it is done
        self.open = 0  # scopes of for_stream() that are not left yet

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.open

    def mark(self, environments: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            key = (stream.device_index, stream.stream_id)
            event = self.events.get(key)
            if event is None:
                event = self.events[key] = new_event()
            event.record(stream)
            self.marked.add(key)
        self.waiting.difference_update(environments)

    def fits(self, sizes: list[int]) -> bool:
        """Is there room for a batch with these sizes?"""
        if sizes == self.room:
            return True
        return len(sizes) <= len(self.room) and all(map(operator.le, sizes, self.room))

    def pending(self) -> dict[Any, torch.cuda.Event]:
        return {key: self.events[key] for key in self.marked}


class GatherBatch(list[tuple[X, Y]], Generic[X, Y]):
    """A batch: the list of (inputs, targets), an entry for each environment with data.

    Gathering was enqueued on each device's current stream. On that stream the batch
    can be read at once. On another stream read it inside :meth:`for_stream`, or after
    ``stream.wait_event(batch.ready_event(env))``.

    Example::

        for batch in batches:
            for env, stream in enumerate(streams):
                with batch.for_stream(env, stream) as (inputs, targets):
                    train_step(inputs, targets)
    """

    __slots__ = ("_lease", "_ready", "_workers")

    def __init__(
        self,
        entries: Sequence[tuple[X, Y]],
        ready: Sequence[torch.cuda.Event | None],
        workers: Sequence[int],
        lease: Lease | None,
    ) -> None:
        super().__init__(entries)
        self._ready = ready
        self._workers = workers  # of each environment, which of `ready` is its
        self._lease = lease

    def ready_event(self, env: int = 0) -> torch.cuda.Event | None:
        """The event after which the batch of environment `env` may be read on any
        stream; None on the CPU, where it may be read at once.

        Raises:
            IndexError, TypeError: as :meth:`for_stream`.
        """
        self._check(env)
        return self._ready[self._workers[env]]

    @property
    def ready(self) -> torch.cuda.Event | None:
        """The same for all environments, if they are on one device.

        Raises:
            ValueError: they are on several devices, which have an event each.
        """
        if len(self._ready) > 1:
            raise ValueError(
                "the environments are on several devices: use ready_event(env) for each"
            )
        return self._ready[0]

    def for_stream(self, env: int, stream: torch.cuda.Stream | None = None) -> _StreamScope[X, Y]:
        """The use of an environment's batch on a stream.

        ::

            with batch.for_stream(env, stream) as (inputs, targets):
                loss = step(inputs, targets)

        Entering makes `stream` wait for the batch, and makes it current. Leaving,
        exceptions included, marks the end of use and restores the stream: fresh
        memory is protected as by :func:`esper_alloc.record_use`, a ring slot
        (``reuse``) may be overwritten after this point.

        Args:
            env: the environment, 0 to len(batch) - 1.
            stream: where; None: the current stream. Does nothing on the CPU.

        Raises:
            IndexError: the batch has nothing for that environment.
            TypeError: `env` is no integer, or `stream` no stream.
        """
        self._check(env)
        check_stream(stream)
        return _StreamScope(self, env, stream)

    def done(self, stream: torch.cuda.Stream | None = None, env: int | None = None) -> None:
        """Marks the end of use on a stream, now, as leaving :meth:`for_stream` does.

        Args:
            stream: where the batch was read; None: the current stream of each
                device. Does nothing on the CPU.
            env: whose batch; None: that of every environment.

        Raises:
            IndexError, TypeError: as :meth:`for_stream`.
        """
        if env is not None:
            self._check(env)
        check_stream(stream)
        groups: dict[torch.cuda.Stream | None, list[int]] = {}
        for worker, here in self._by_worker(range(len(self)) if env is None else (env,)):
            groups.setdefault(self._stream(worker, stream), []).extend(here)
        for where, members in groups.items():  # one event for each stream
            if where is not None:  # in a ring, too: its memory may be dropped before it is reused
                record_use([self[one] for one in members], where)
            if self._lease is not None:
                self._lease.mark(members, where)

    def _check(self, env: int) -> None:
        try:
            operator.index(env)
        except TypeError:
            name = type(env).__name__
            raise TypeError(f"env must be the number of an environment, not {name}") from None
        if not 0 <= env < len(self):
            raise IndexError(f"environment {env} has no data in this batch of {len(self)}")

    def _by_worker(self, environments: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """The environments on each device that has some of them."""
        if len(self._ready) == 1:
            return [(0, environments)]
        found: dict[int, list[int]] = {}
        for env in environments:
            found.setdefault(self._workers[env], []).append(env)
        return list(found.items())

    def _stream(self, worker: int, stream: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
        """Where the batch of a device's environments is used: `stream`, the current one, or
        none on the CPU."""
        ready = self._ready[worker]
        if ready is None:
            return None
        return torch.cuda.current_stream(ready.device) if stream is None else stream


class _StreamScope(Generic[X, Y]):
    """See GatherBatch.for_stream."""

    __slots__ = ("_batch", "_entered", "_env", "_wanted")

    def __init__(
        self, batch: GatherBatch[X, Y], env: int, stream: torch.cuda.Stream | None
    ) -> None:
        self._batch = batch
        self._env = env
        self._wanted = stream
        self._entered: list[tuple[torch.cuda.Stream | None, Any]] = []  # with a stream's context

    def __enter__(self) -> tuple[X, Y]:
        batch, env = self._batch, self._env
        stream = batch._stream(batch._workers[env], self._wanted)
        context: Any = None
        if stream is not None:
            ready = batch.ready_event(env)
            assert ready is not None
            stream.wait_event(ready)
            context = torch.cuda.stream(stream)
            context.__enter__()
        if batch._lease is not None:
            batch._lease.open += 1
        self._entered.append((stream, context))
        return batch[env]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._entered:
            raise RuntimeError("a scope of for_stream() is left, but was not entered")
        stream, context = self._entered.pop()
        try:
            self._batch.done(stream, self._env)
        finally:
            if self._batch._lease is not None:
                self._batch._lease.open -= 1
            if context is not None:
                context.__exit__(kind, error, trace)
