"""Batches for many environments at once: :class:`GatherBatchIterator`.

The data set lies on each device once. A batch is gathered there by index, on
CUDA by one kernel for the inputs and targets of all environments, into memory
that belongs to each environment alone. Who gets which samples is in
`gather_plan`, what happens to them on the way in `gather_transform`.
"""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Union

from .allocator import _torch, _untyped
from .gather_native import NativeGather
from .gather_plan import (
    EpochPlan,
    Layout,
    Order,
    Share,
    canonical_device,
    check_integer,
    check_seed,
    device_index,
    plan_epoch,
)
from .gather_transform import ImageTransform, PreparedTransform, is_channels_last
from .use import _check_stream, record_use

try:
    import torch
except ImportError:  # the names are there without it, and whoever calls them is told
    pass

__all__ = ["GatherBatch", "GatherBatchIterator", "ImageTransform"]

#: A tensor of samples, or several by name.
Samples = Union["torch.Tensor", Mapping[str, "torch.Tensor"]]
#: How samples are treated: all alike, or those with a name.
Transforms = Union[ImageTransform, Mapping[str, ImageTransform], None]
#: What one environment gets of each column.
_Rows = tuple["torch.Tensor", ...]


# Columns: the tensors behind inputs and targets


class _Columns:
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
                raise ValueError(f"transform names {unknown[0]!r}, which inputs do not have")
            found = [None if name is None else transform.get(name) for name in inputs]
        elif transform is None or self._input_names is None:
            found = [transform]
        else:
            raise ValueError("inputs have names: transform must be a dict with some of them")
        for how in found:
            if how is not None and not isinstance(how, ImageTransform):
                raise TypeError(f"transform must be an ImageTransform, not {type(how).__name__}")
        count = len(self.tensors)
        return (*found, *(None,) * (count - len(found)))[:count]

    def restore(self, rows: _Rows) -> tuple[Any, Any]:
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


def _named(names: list[str] | None, rows: _Rows) -> Any:
    return rows[0] if names is None else dict(zip(names, rows))


def _check_column(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise TypeError(f"{name} must be a dense tensor, not {kind}")
    if tensor.dim() == 0:
        raise ValueError(f"{name} has no dimension of samples")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}: only cpu and cuda are supported")


# Data sets on devices: once for each, whoever iterates


class _Resident:
    """The columns of a data set on one device, dense, for as long as somebody
    iterates over them."""

    def __init__(self, sources: _Rows, tensors: _Rows) -> None:
        self.sources = sources  # alive, so that their ids are theirs
        self.tensors = tensors
        self.streams: set[int] = set()  # those that read them


_residents: weakref.WeakValueDictionary[Any, _Resident] = weakref.WeakValueDictionary()
_residents_lock = threading.Lock()


def _resident(sources: _Rows, device: torch.device) -> _Resident:
    """`sources` on `device`: themselves where they are there, else one copy for all
    iterators."""
    key = (device, *((id(x), 0 if x.is_inference() else x._version) for x in sources))
    # Held while copying: whoever comes second waits for the first one's copy.
    with _residents_lock:
        found = _residents.get(key)
        if found is None:
            found = _Resident(sources, tuple(_dense(x, device) for x in sources))
            _residents[key] = found
        return found


def _dense(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        there = x.detach().to(device)
        return there if is_channels_last(there) else there.contiguous()


# Gathering on one device


class PlainGather:
    """Gathers by PyTorch's own operations, on any device.

    `gather_native.NativeGather` does the same to the bit.
    """

    def __init__(
        self,
        columns: _Rows,
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
        self, start: int, sizes: Sequence[int], into: list[_Rows] | None
    ) -> tuple[list[_Rows], torch.cuda.Event | None]:
        """The rows from `start` of the order, `sizes` of them for each environment, and
        the event after which they are ready; None on the CPU.

        Args:
            into: tensors whose memory to take, of the batch's own shapes: the rows are
                new tensors over it, with its version counters; None: fresh memory.
        """
        found: list[_Rows] = []
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
        ready = _new_event()
        ready.record(torch.cuda.current_stream(self._columns[0].device))
        return found, ready

    def _rows(self, start: int, stop: int) -> _Rows:
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


class _Worker:
    """One device's part of an iterator."""

    def __init__(
        self,
        device: torch.device,
        environments: tuple[int, ...],
        size: int,
        columns: _Columns,
        there: _Rows | None,
    ) -> None:
        self.device = device
        self.environments = environments
        self._full = [size] * len(environments)
        self._step = sum(self._full)
        # What is there already is shared by its owner.
        self._resident = _resident(there or columns.tensors, self.device)
        tensors, transforms = self._resident.tensors, columns.transforms
        native = None
        if self.device.type == "cuda":
            native = NativeGather.make(tensors, transforms, self._step)
        self._gather: PlainGather | NativeGather = native or PlainGather(tensors, transforms)
        self._order: torch.Tensor | None = None
        self._uploaded: torch.cuda.Event | None = None
        self._met: set[int] = set()  # the streams that this epoch's order and columns expect
        if self.device.type == "cuda":
            # Other threads and streams will read what was copied just now.
            torch.cuda.synchronize(self.device)

    def start(self, share: Share) -> None:
        """Begins an epoch: the one time that indices go to the device."""
        order = share.order
        if order is not None and self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            order = order.pin_memory().to(self.device, non_blocking=True)
            self._uploaded = _new_event()
            self._uploaded.record(stream)
        self._order = order
        self._met.clear()
        self._gather.start(order, share.offset, share.seed)

    def gather(
        self, batch: int, sizes: Sequence[int] | None, into: list[_Rows] | None
    ) -> tuple[list[_Rows], torch.cuda.Event | None]:
        """A batch's rows for each environment here, and the event after which they
        may be read on other streams.

        Args:
            sizes: of the first environments; None: a full batch.
        """
        here = self.sizes_here(sizes)
        if not here:
            return [], None
        if self.device.type == "cuda":
            handle = _raw_stream(self.device.index)
            if handle not in self._met:
                self._met.add(handle)
                self._meet(torch.cuda.current_stream(self.device))
        return self._gather.gather(batch * self._step, here, into)

    def sizes_here(self, sizes: Sequence[int] | None) -> list[int]:
        """Of a batch's sizes by environment those of this device; None: a full batch."""
        if sizes is None:
            return self._full
        return [sizes[env] for env in self.environments if env < len(sizes)]

    def slot(self, memory: list[_Rows], sizes: Sequence[int] | None) -> list[_Rows] | None:
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

    def wait_for(self, events: Mapping[Any, torch.cuda.Event]) -> None:
        """Makes what is gathered next come after `events`."""
        if self.device.type == "cuda":  # on the CPU everything was read when it was marked
            stream = torch.cuda.current_stream(self.device)
            for event in events.values():
                stream.wait_event(event)


# Batches


class _Lease:
    """A ring slot's memory while one batch has it."""

    __slots__ = ("memory", "room", "events", "marked", "waiting", "open")

    def __init__(
        self,
        memory: list[list[_Rows]],
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
                event = self.events[key] = _new_event()
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


class GatherBatch(list[tuple[Any, Any]]):
    """A batch: the list of (inputs, targets), an entry for each environment with data.

    Gathering was enqueued on the stream that was current for each device. On that
    stream the batch can be read at once; on another one, inside
    :meth:`for_stream`, or after ``stream.wait_event(batch.ready_event(env))``.
    """

    __slots__ = ("_ready", "_workers", "_lease")

    def __init__(
        self,
        entries: Sequence[tuple[Any, Any]],
        ready: Sequence[torch.cuda.Event | None],
        workers: Sequence[int],
        lease: _Lease | None,
    ) -> None:
        super().__init__(entries)
        self._ready = ready
        self._workers = workers  # of each environment, which of `ready` is its
        self._lease = lease

    def ready_event(self, env: int = 0) -> torch.cuda.Event | None:
        """The event after which the batch of environment `env` may be read on any
        stream; None on the CPU, where it may be read at once."""
        self._check(env)
        return self._ready[self._workers[env]]

    @property
    def ready(self) -> torch.cuda.Event | None:
        """The same for all environments, where these are on one device.

        Raises:
            ValueError: they are on several devices, which have an event each.
        """
        if len(self._ready) > 1:
            raise ValueError("environments on several devices: ask ready_event(env)")
        return self._ready[0]

    def for_stream(self, env: int, stream: torch.cuda.Stream | None = None) -> _StreamScope:
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
        _check_stream(stream)
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
        _check_stream(stream)
        groups: dict[torch.cuda.Stream | None, list[int]] = {}
        for worker, here in self._by_worker(range(len(self)) if env is None else (env,)):
            groups.setdefault(self._stream(worker, stream), []).extend(here)
        for where, members in groups.items():  # one event for each stream
            if self._lease is not None:
                self._lease.mark(members, where)
            elif where is not None:
                record_use([self[one] for one in members], where)

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


class _StreamScope:
    """See GatherBatch.for_stream."""

    __slots__ = ("_batch", "_env", "_wanted", "_stream", "_context")

    def __init__(self, batch: GatherBatch, env: int, stream: torch.cuda.Stream | None) -> None:
        self._batch = batch
        self._env = env
        self._wanted = stream

    def __enter__(self) -> tuple[Any, Any]:
        batch, env = self._batch, self._env
        self._stream = batch._stream(batch._workers[env], self._wanted)
        if self._stream is not None:
            ready = batch.ready_event(env)
            assert ready is not None
            self._stream.wait_event(ready)
            self._context = torch.cuda.stream(self._stream)
            _untyped(self._context).__enter__()
        if batch._lease is not None:
            batch._lease.open += 1
        return batch[env]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._batch.done(self._stream, self._env)
        finally:
            if self._batch._lease is not None:
                self._batch._lease.open -= 1
            if self._stream is not None:
                self._context.__exit__(kind, error, trace)


# The iterator


class GatherBatchIterator:
    """Iterates over a data set for several environments at once.

    ::

        batches = GatherBatchIterator(
            images, labels, batch_size_per_env=128, n_envs=2,
            env_devices=["cuda:0", "cuda:0"], seed=1,
        )
        for batch in batches:  # an epoch; the next loop is the next epoch
            for env, (inputs, targets) in enumerate(batch):
                ...

    Each batch is a :class:`GatherBatch`, a list of (inputs, targets) by
    environment, in memory that is shared with nobody. Nothing waits for the GPU
    but the constructor, once for each device. On CUDA a batch is one kernel a
    device; where the kernels were not built, and on the CPU, PyTorch's own
    operations give the same to the bit.

    Args:
        inputs, targets: a tensor of samples [N, ...] or a dict of them, on the CPU
            or a GPU. They are copied to each device once, and shared between
            iterators; later changes of what was copied are not seen.
        batch_size_per_env: samples for each environment in a batch.
        n_envs: the number of environments.
        env_devices: the device of each: "cpu", "cuda" (that is "cuda:0") or
            "cuda:N".
        shuffle: a new order each epoch; else as the samples stand.
        seed: of the orders, crops and flips: 64 bits, see `plan_epoch`.
        order: "per_device": each device goes through all samples in an order of
            its own; "global": no sample comes twice in an epoch.
        drop_last: leave out a batch that is not full. Else it is split as
            torch.tensor_split splits, and environments without data are left off
            at the end of the list.
        transform: for the inputs: an :class:`ImageTransform`, or for a dict of
            inputs a dict of those.
        reuse: 0: fresh memory for each batch. N: a ring of N slots, each
            overwritten when it comes round again, if the use of its batch was
            marked as done (:meth:`GatherBatch.for_stream`, :meth:`GatherBatch.done`);
            the device waits for those uses, the host does not. A slot that
            was not marked is never overwritten: it gets fresh memory.
        rank, world_size: this process's part where several share an epoch: no
            sample goes to two ranks.

    Raises:
        ValueError: an argument is out of its range, or the lengths of inputs and
            targets differ; TypeError: one is of the wrong kind.
    """

    def __init__(
        self,
        inputs: Samples,
        targets: Samples,
        *,
        batch_size_per_env: int,
        n_envs: int,
        env_devices: Sequence[str | torch.device],
        shuffle: bool = True,
        seed: int,
        order: Order = "per_device",
        drop_last: bool = True,
        transform: Transforms = None,
        reuse: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _torch()  # or an error that says what to install
        seed = check_seed(seed)
        names = check_environments(batch_size_per_env, n_envs, env_devices)
        reuse = check_reuse(reuse)
        columns = _Columns(inputs, targets, transform)
        self._layout = Layout(
            columns.length, names, batch_size_per_env, order, drop_last, rank, world_size
        )
        for device in self._layout.environments:
            check_device_exists(device)
        self.batch_size_per_env = batch_size_per_env
        self.n_envs = n_envs
        self.env_devices = list(env_devices)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.order = order
        self._columns = columns
        self._workers = [
            _Worker(torch.device(name), here, batch_size_per_env, columns, self._columns_on(name))
            for name, here in self._layout.environments.items()
        ]
        self._worker_of = [0] * n_envs
        for number, worker in enumerate(self._workers):
            for env in worker.environments:
                self._worker_of[env] = number
        self._full = [batch_size_per_env] * n_envs
        self._ring: list[_Lease | None] = [None] * reuse
        self._turn = 0
        self._warned = False
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._plan: EpochPlan | None = None  # of the epoch, once it began
        self._resumed = True  # so that the first one is epoch 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._layout.batches

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._position()[0]

    @property
    def _global_perm(self) -> torch.Tensor | None:
        """The order of all samples, where there is one: order global, shuffled."""
        return None if self._plan is None else self._plan.permutation

    def __iter__(self) -> Iterator[GatherBatch]:
        """Starts the next epoch, or the rest of the one that was loaded."""
        epoch = self._epoch if self._resumed else self._epoch + 1
        cursor = self._cursor if self._resumed else 0
        plan = plan_epoch(self._layout, self._seed, epoch, self.shuffle)
        self._plan = None  # should a worker fail
        for worker, share in zip(self._workers, plan.shares):
            worker.start(share)
        self._plan, self._epoch, self._cursor, self._resumed = plan, epoch, cursor, False
        return self

    def __next__(self) -> GatherBatch:
        """The next batch.

        Raises:
            StopIteration: the epoch is over.
            RuntimeError: there was no iter(), or the environments that have data are
                not the first ones.
        """
        if self._plan is None:
            raise RuntimeError("Iterator not initialized - call __iter__ first")
        cursor = self._cursor
        if cursor >= self._layout.batches:
            raise StopIteration
        # Every batch is full, but perhaps the last.
        sizes = self._sizes(cursor) if cursor == self._layout.batches - 1 else None
        lease = self._next_lease(sizes)
        parts, ready = [], []
        for number, worker in enumerate(self._workers):
            into = None if lease is None else worker.slot(lease.memory[number], sizes)
            rows, event = worker.gather(cursor, sizes, into)
            parts.append(rows)
            ready.append(event)
        if lease is not None and not any(lease.memory):
            lease.memory = [[tuple(x.detach() for x in rows) for rows in part] for part in parts]
        self._cursor = cursor + 1
        return GatherBatch(self._entries(parts), ready, self._worker_of, lease)

    def state_dict(self) -> dict[str, int]:
        """Where the iterator stands: {"seed", "epoch", "cursor"}, the cursor counting
        the batches of the epoch that were handed out."""
        epoch, cursor = self._position()
        return {"seed": self._seed, "epoch": epoch, "cursor": cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iter() give the batches that remained when `state` was saved.

        Arguments of the constructor are not part of the state; with others the
        batches are others.

        Raises:
            ValueError, TypeError: this is no such state, or its cursor lies outside
                the epoch. Nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() gave, not {type(state).__name__}")
        if set(state) != {"seed", "epoch", "cursor"}:
            raise ValueError(f"state must have seed, epoch and cursor (has {sorted(state)})")
        seed = check_seed(state["seed"])
        epoch, cursor = (_count(name, state[name]) for name in ("epoch", "cursor"))
        if cursor > self._layout.batches:
            raise ValueError(
                f"state has cursor {cursor}, and an epoch has {self._layout.batches} batches: "
                f"it was saved with other arguments"
            )
        self._seed, self._epoch, self._cursor = seed, epoch, cursor
        self._plan, self._resumed = None, True

    def _columns_on(self, device: str) -> _Rows | None:
        """The data set on a device, where somebody else keeps it there; None: nobody."""
        return None

    def _position(self) -> tuple[int, int]:
        """The epoch and the cursor of the next batch."""
        if self._plan is not None and self._cursor >= self._layout.batches:
            return self._epoch + 1, 0
        return self._epoch, self._cursor

    def _sizes(self, batch: int) -> list[int]:
        """How many samples each environment gets, those without left off."""
        sizes = self._layout.sizes(batch)
        found = sizes.index(0) if 0 in sizes else len(sizes)
        if any(sizes[found:]):
            raise RuntimeError(
                "Non-contiguous per-env batches detected: the last samples of one device leave "
                "an environment without data in front of one that has some; use drop_last=True, "
                "order='global', or list the environments of the device with fewer of them first"
            )
        return sizes[:found]

    def _entries(self, parts: list[list[_Rows]]) -> list[tuple[Any, Any]]:
        """Of the devices' rows the list by environment."""
        if len(parts) == 1:
            rows = parts[0]
        else:
            by_env = {
                env: one
                for worker, part in zip(self._workers, parts)
                for env, one in zip(worker.environments, part)
            }
            rows = [by_env[env] for env in range(len(by_env))]
        if self._columns.plain:
            return rows  # type: ignore[return-value]  # pairs, as there are two columns
        return [self._columns.restore(one) for one in rows]

    def _next_lease(self, sizes: list[int] | None) -> _Lease | None:
        """The ring's next slot, to be filled; None without a ring."""
        if not self._ring:
            return None
        if sizes is None:
            sizes = self._full
        old = self._ring[self._turn]
        memory: list[list[_Rows]] = [[] for _ in self._workers]
        room = sizes
        events: dict[Any, torch.cuda.Event] = {}
        if old is not None and old.is_done:
            events = old.events
            if old.fits(sizes):
                memory, room = old.memory, old.room
                for worker in self._workers:
                    worker.wait_for(old.pending())
        elif old is not None:
            self._warn_of_fresh_memory()
        lease = _Lease(memory, room, len(sizes), events)
        self._ring[self._turn] = lease
        self._turn = (self._turn + 1) % len(self._ring)
        return lease

    def _warn_of_fresh_memory(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"reuse={len(self._ring)}: a batch was not marked as done when its slot came "
                f"round again, so the new batch gets fresh memory: leave for_stream() or call "
                f"done() first, or use more slots",
                UserWarning,
                stacklevel=4,
            )


def check_environments(
    batch_size_per_env: int, n_envs: int, env_devices: Sequence[str | torch.device]
) -> tuple[str, ...]:
    """The names of the environments' devices.

    Raises:
        ValueError, TypeError: the three do not fit together, or one is of the wrong
            kind.
    """
    check_integer("batch_size_per_env", batch_size_per_env)
    check_integer("n_envs", n_envs)
    if batch_size_per_env < 1:
        raise ValueError(f"batch_size_per_env must be >= 1 (got {batch_size_per_env})")
    if n_envs < 1:
        raise ValueError(f"n_envs must be >= 1 (got {n_envs})")
    if isinstance(env_devices, str) or not hasattr(env_devices, "__len__"):
        raise TypeError("env_devices must be a list with a device for each environment")
    if len(env_devices) != n_envs:
        raise ValueError(f"env_devices has {len(env_devices)} entries for n_envs = {n_envs}")
    names = tuple(str(device) for device in env_devices)
    for name in names:
        canonical_device(name)
    return names


def check_reuse(reuse: int) -> int:
    """Raises ValueError or TypeError unless `reuse` is a number of slots."""
    slots = check_integer("reuse", reuse)
    if slots < 0:
        raise ValueError(f"reuse must be >= 0 (got {reuse})")
    return slots


def check_device_exists(name: str) -> None:
    """Raises ValueError unless this process has the device."""
    if name == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_index(name) >= count:
        raise ValueError(f"env_devices names {name}, and PyTorch finds {count} CUDA devices")


def _raw_stream(index: int | None) -> int:
    """The current stream of a device, as CUDA's handle."""
    handle: int = _untyped(torch._C)._cuda_getCurrentRawStream(index)
    return handle


def _new_event() -> torch.cuda.Event:
    event: torch.cuda.Event = _untyped(torch.cuda).Event()
    return event


def _count(name: str, value: Any) -> int:
    number = check_integer(f"{name} of the state", value)
    if number < 0:
        raise ValueError(f"state has {name} {number}, which is below 0")
    return number
