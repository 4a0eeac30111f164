"""Batches for many environments at once: :class:`GatherBatchIterator`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic

from ...installation.bools import checked_bool
from ...installation.pytorch import need_torch
from .batch import GatherBatch, Lease
from .columns import Columns, Inputs, Rows, Targets, Transforms
from .devices import check_device_exists, check_environments
from .plan import EpochPlan, Layout, Order, check_integer, check_seed, plan_epoch
from .worker import Worker

with suppress(ImportError):
    import torch

__all__ = ["GatherBatchIterator"]


class GatherBatchIterator(Generic[Inputs, Targets]):
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
    but the constructor, once for each device. On CUDA a batch is one kernel for each
    device. Where the kernels were not built, and on the CPU, PyTorch's own
    operations give bitwise the same result.

    Args:
        inputs: a tensor of samples [N, ...] or a dict of them, on the CPU
            or a GPU. Each device has one copy, which iterators share; what is dense and
            already there is used as it is. Later changes of what was copied are not seen. Nor does
            a new iterator see writes that PyTorch does not count (through NumPy, or in place
            through ``.data``) while an older one over the same tensors is alive: pass new tensors
            then.
        targets: likewise, of the same length N.
        batch_size_per_env: samples for each environment in a batch.
        n_envs: the number of environments.
        env_devices: the device of each: "cpu", "cuda" (that is "cuda:0") or
            "cuda:N".
        shuffle: True: a new order in each epoch; False: the order of the data set.
        seed: of the orders, crops and flips: 64 bits, see `plan_epoch`.
        order: "per_device": each device goes through all samples in an order of
            its own; "global": no sample comes twice in an epoch.
        drop_last: True: leave out a last batch that is not full; if there is no full
            one, an epoch has no batches, and ``len()`` is 0. False: it is split as
            torch.tensor_split splits, and environments without data are left off
            at the end of the list.
        transform: for the inputs: an :class:`ImageTransform`, or for a dict of
            inputs a dict of those.
        reuse: 0: fresh memory for each batch. N: a ring of N slots, each
            overwritten when it comes round again, if the use of its batch was
            marked as done (:meth:`GatherBatch.for_stream`, :meth:`GatherBatch.done`);
            the device waits for those uses, the host does not. A slot that
            was not marked is never overwritten: it gets fresh memory.
        rank: this process's number where several share an epoch: no sample goes
            to two ranks.
        world_size: how many processes share an epoch.

    Raises:
        ValueError: an argument is out of its range, or the lengths of inputs and
            targets differ; TypeError: one is of the wrong kind.
    """

    def __init__(
        self,
        inputs: Inputs,
        targets: Targets,
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
        need_torch()  # or an error that says what to install
        seed = check_seed(seed)
        names = check_environments(batch_size_per_env, n_envs, env_devices)
        batch_size_per_env, n_envs = int(batch_size_per_env), len(names)
        reuse = check_reuse(reuse)
        drop_last = checked_bool("drop_last", drop_last)
        columns = Columns(inputs, targets, transform)
        self._layout = Layout(
            columns.length, names, batch_size_per_env, order, drop_last, rank, world_size
        )
        for device in self._layout.environments:
            check_device_exists(device)
        self.batch_size_per_env = batch_size_per_env
        self.n_envs = n_envs
        self.env_devices = list(env_devices)
        self.shuffle = checked_bool("shuffle", shuffle)
        self.drop_last = drop_last
        self.order = order
        self._columns = columns
        self._workers = [
            Worker(torch.device(name), here, batch_size_per_env, columns, self._columns_on(name))
            for name, here in self._layout.environments.items()
        ]
        self._worker_of = [0] * n_envs
        for number, worker in enumerate(self._workers):
            for env in worker.environments:
                self._worker_of[env] = number
        self._full = [batch_size_per_env] * n_envs
        self._ring: list[Lease | None] = [None] * reuse
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

    def __iter__(self) -> Iterator[GatherBatch[Inputs, Targets]]:
        """Starts the next epoch, or the rest of the one that was loaded."""
        epoch = self._epoch if self._resumed else self._epoch + 1
        cursor = self._cursor if self._resumed else 0
        plan = plan_epoch(self._layout, self._seed, epoch, self.shuffle)
        # Should a worker fail, the next iter() is of this epoch again.
        self._plan, self._epoch, self._cursor, self._resumed = None, epoch, cursor, True
        for worker, share in zip(self._workers, plan.shares):
            worker.start(share)
        self._plan, self._resumed = plan, False
        return self

    def __next__(self) -> GatherBatch[Inputs, Targets]:
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
        if lease is not None:
            if not any(lease.memory):
                lease.memory = [
                    [tuple(x.detach() for x in rows) for rows in part] for part in parts
                ]
            self._ring[self._turn] = lease
            self._turn = (self._turn + 1) % len(self._ring)
        self._cursor = cursor + 1
        return GatherBatch(self._entries(parts), ready, self._worker_of, lease)

    def state_dict(self) -> dict[str, int]:
        """The iterator's position: {"seed", "epoch", "cursor"}. The cursor is the number
        of batches of the epoch that were handed out."""
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
            raise ValueError(
                f"state must have seed, epoch and cursor (has {sorted(map(str, state))})"
            )
        seed = check_seed(state["seed"])
        epoch, cursor = (_count(name, state[name]) for name in ("epoch", "cursor"))
        if cursor > self._layout.batches:
            raise ValueError(
                f"state has cursor {cursor}, but an epoch has {self._layout.batches} batches: "
                f"it was saved with other arguments"
            )
        self._seed, self._epoch, self._cursor = seed, epoch, cursor
        self._plan, self._resumed = None, True

    def _columns_on(self, device: str) -> Rows | None:
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

    def _entries(self, parts: list[list[Rows]]) -> list[tuple[Any, Any]]:
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

    def _next_lease(self, sizes: list[int] | None) -> Lease | None:
        """The memory of the ring's next slot, to be filled; None without a ring."""
        if not self._ring:
            return None
        if sizes is None:
            sizes = self._full
        old = self._ring[self._turn]
        memory: list[list[Rows]] = [[] for _ in self._workers]
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
        return Lease(memory, room, len(sizes), events)

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


def check_reuse(reuse: int) -> int:
    """Raises ValueError or TypeError unless `reuse` is a number of slots."""
    slots = check_integer("reuse", reuse)
    if slots < 0:
        raise ValueError(f"reuse must be >= 0 (got {reuse})")
    return slots


def _count(name: str, value: Any) -> int:
    number = check_integer(f"{name} of the state", value)
    if number < 0:
        raise ValueError(f"state has {name} {number}, which must be 0 or more")
    return number
