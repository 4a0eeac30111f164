"""Who gets which samples of an epoch: arithmetic over device names, no devices needed.

`Layout` says how many samples each environment gets in each batch, `plan_epoch`
says which. Both depend on nothing but their arguments, so every epoch can be
computed alone, on any machine, by any rank.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["EpochPlan", "Layout", "Share", "epoch_seed", "mix", "plan_epoch"]

Order = Literal["per_device", "global"]

#: What a device's index is multiplied by before it is added to the seed.
DEVICE_STRIDE = 1009
#: 2^64 divided by the golden ratio, odd: the step of the splitmix64 generator.
GAMMA = 0x9E3779B97F4A7C15
#: Sets the seed that deals samples out to ranks apart from those that shuffle.
_RANKS = 0x72616E6B73
_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """The finaliser of splitmix64, a bijection of 64 bits in which every bit of
    the result depends on every bit of `x`.

    x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB;
    x ^= x >> 31, modulo 2^64. (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014.)
    """
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of epoch `epoch`: `seed` modulo 2^64 for epoch 0, and
    mix(seed + epoch * 0x9E3779B97F4A7C15) for every other."""
    return seed & _MASK if epoch == 0 else mix(seed + epoch * GAMMA)


def check_seed(seed: int) -> int:
    """`seed` as an int of 64 bits.

    Raises:
        ValueError: it is below -2^63 or above 2^64 - 1.
        TypeError: it is no integer.
    """
    try:
        value = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, not {type(seed).__name__}") from None
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"seed must fit into 64 bits, from -2**63 to 2**64 - 1 (got {value})")
    return value


def check_integer(name: str, value: object) -> int:
    """`value` as an int.

    Raises:
        TypeError: it is no integer.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def canonical_device(name: str) -> str:
    """ "cpu" or "cuda:N": "cuda" is "cuda:0".

    Raises:
        ValueError: another name.
    """
    if name == "cuda":
        return "cuda:0"
    found = re.fullmatch(r"cuda:(\d+)", name, flags=re.ASCII)
    if name != "cpu" and found is None:
        raise ValueError(f"device must be cpu, cuda or cuda:N (got {name!r})")
    return name if found is None else f"cuda:{int(found[1])}"


def device_index(name: str) -> int:
    """N of "cuda:N"; "cpu" and "cuda" count as 0."""
    canonical = canonical_device(name)
    return 0 if canonical == "cpu" else int(canonical.removeprefix("cuda:"))


def split_sizes(rows: int, parts: int) -> list[int]:
    """The sizes that torch.tensor_split gives: the first rows % parts are one larger."""
    size, larger = divmod(rows, parts)
    return [size + 1] * larger + [size] * (parts - larger)


@dataclass(frozen=True)
class Layout:
    """How an epoch falls into batches, and batches into environments.

    ``per_device``: each device goes through the data set in an order of its own;
    a batch takes batch_size_per_env samples for each environment on it. With
    several ranks, a rank's devices share the part dealt out to that rank.

    ``global``: there is one order, and a batch takes batch_size_per_env samples for
    each environment of each rank, so no sample comes twice in an epoch.

    All ranks have the same number of batches if they have the same environments.

    Attributes:
        length: samples in the data set.
        env_devices: the device of each environment of this rank.

    Raises:
        ValueError, TypeError: an argument is out of its range, or no integer; the
            message names it.
    """

    length: int
    env_devices: tuple[str, ...]
    batch_size_per_env: int
    order: Order = "per_device"
    drop_last: bool = True
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "batch_size_per_env", "rank", "world_size"):
            # A small NumPy integer would overflow in what is computed.
            object.__setattr__(self, name, check_integer(name, getattr(self, name)))
        if self.batch_size_per_env < 1:
            raise ValueError(f"batch_size_per_env must be >= 1 (got {self.batch_size_per_env})")
        if not self.env_devices:
            raise ValueError("n_envs must be >= 1 (got 0)")
        if self.order not in ("per_device", "global"):
            raise ValueError(f'order must be "per_device" or "global" (got {self.order!r})')
        if self.world_size < 1:
            raise ValueError(f"world_size must be >= 1 (got {self.world_size})")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be from 0 to world_size - 1 = {self.world_size - 1} (got {self.rank})"
            )
        for name in self.env_devices:
            canonical_device(name)

    @cached_property
    def environments(self) -> dict[str, tuple[int, ...]]:
        """The environments on each device, devices in order of appearance."""
        found: dict[str, list[int]] = {}
        for env, name in enumerate(self.env_devices):
            found.setdefault(canonical_device(name), []).append(env)
        return {device: tuple(envs) for device, envs in found.items()}

    @cached_property
    def batches(self) -> int:
        """Batches in an epoch: the fewest that a device has."""
        if self.order == "global":
            step = self.batch_size_per_env * len(self.env_devices) * self.world_size
            return self.length // step if self.drop_last else -(-self.length // step)
        smallest, largest = self.length // self.world_size, -(-self.length // self.world_size)
        steps = [self.rows(device) for device in self.environments]
        if self.drop_last:
            return min(smallest // step for step in steps)
        return min(-(-largest // step) for step in steps)

    def rows(self, device: str) -> int:
        """Samples that a full batch has for `device`."""
        return self.batch_size_per_env * len(self.environments[device])

    @cached_property
    def shard(self) -> range:
        """The part of the world's order that is this rank's, where it is contiguous
        (order per_device)."""
        sizes = split_sizes(self.length, self.world_size)
        start = sum(sizes[: self.rank])
        return range(start, start + sizes[self.rank])

    def sizes(self, batch: int) -> list[int]:
        """How many samples each environment gets in a batch (0 <= batch < batches).

        A batch that is not full is split as torch.tensor_split splits.
        """
        envs = len(self.env_devices)
        found = [0] * envs
        if self.order == "global":
            step = self.batch_size_per_env * envs * self.world_size
            rows = max(0, min(step, self.length - batch * step))
            first = self.rank * envs
            return split_sizes(rows, envs * self.world_size)[first : first + envs]
        for device, here in self.environments.items():
            step = self.rows(device)
            rows = max(0, min(step, len(self.shard) - batch * step))
            for env, size in zip(here, split_sizes(rows, len(here))):
                found[env] = size
        return found


@dataclass(frozen=True)
class Share:
    """What one device does in an epoch.

    Attributes:
        device: "cpu" or "cuda:N".
        environments: those on it.
        order: int64 on the CPU, the samples in the order in which the device's
            batches take them, environment after environment; None: offset,
            offset + 1, and so on.
        seed: what the epoch's order comes from, and random crops and flips.
    """

    device: str
    environments: tuple[int, ...]
    order: torch.Tensor | None
    offset: int
    seed: int


@dataclass(frozen=True)
class EpochPlan:
    """One epoch of one rank.

    Attributes:
        permutation: int64 on the CPU, the order of all samples where there is
            one for all devices (order global, shuffled); else None.
    """

    layout: Layout
    shares: tuple[Share, ...]
    permutation: torch.Tensor | None

    def indices(self, batch: int) -> list[torch.Tensor]:
        """The samples of each environment in a batch: int64 on the CPU, empty for
        an environment without."""
        import torch

        sizes = self.layout.sizes(batch)
        found = [torch.empty(0, dtype=torch.int64, device="cpu")] * len(sizes)
        for share in self.shares:
            at = batch * self.layout.rows(share.device)
            for env in share.environments:
                end = at + sizes[env]
                if share.order is None:
                    found[env] = torch.arange(share.offset + at, share.offset + end, device="cpu")
                else:
                    found[env] = share.order[at:end]
                at = end
        return found


def plan_epoch(layout: Layout, seed: int, epoch: int, shuffle: bool = True) -> EpochPlan:
    """The plan of one epoch.

    Shuffled, a device's order is ``torch.randperm`` of a CPU generator seeded
    with epoch_seed(seed + 1009 * device_index, epoch); in order global there is
    one, seeded with epoch_seed(seed, epoch). (PyTorch's CPU generator starts from
    the low 32 bits of its seed.) Not shuffled, samples come as they are.

    Raises:
        ValueError: `seed` does not fit into 64 bits, or `epoch` is negative.
    """
    seed = check_seed(seed)
    if epoch < 0:
        raise ValueError(f"epoch must be >= 0 (got {epoch})")
    if layout.order == "global":
        return _plan_global(layout, seed, epoch, shuffle)
    shares = []
    for device, here in layout.environments.items():
        own = epoch_seed(seed + DEVICE_STRIDE * device_index(device), epoch)
        order, offset = None, layout.shard.start
        if shuffle:
            order, offset = _shuffled(len(layout.shard), own), 0
            if layout.world_size > 1:
                order = _dealt(layout, seed, epoch)[order]
        shares.append(Share(device, here, order, offset, own))
    return EpochPlan(layout, tuple(shares), None)


def _plan_global(layout: Layout, seed: int, epoch: int, shuffle: bool) -> EpochPlan:
    own = epoch_seed(seed, epoch)
    permutation = _shuffled(layout.length, own) if shuffle else None
    alone = len(layout.environments) == 1 and layout.world_size == 1
    shares = tuple(
        Share(device, here, permutation if alone else _picked(layout, here, permutation), 0, own)
        for device, here in layout.environments.items()
    )
    return EpochPlan(layout, shares, permutation)


def _picked(layout: Layout, here: Sequence[int], permutation: torch.Tensor | None) -> torch.Tensor:
    """What the environments `here` of this rank get of a common order."""
    import torch

    everything = permutation
    if everything is None:
        everything = torch.arange(layout.length, device="cpu")
    envs, size = len(layout.env_devices), layout.batch_size_per_env
    step = envs * size * layout.world_size
    full = layout.length // step
    batches = everything[: full * step].view(full, layout.world_size, envs, size)
    pieces = [batches[:, layout.rank, list(here)].reshape(-1)]
    if not layout.drop_last:
        rest = everything[full * step :].tensor_split(envs * layout.world_size)
        pieces += [rest[layout.rank * envs + env] for env in here]
    return torch.cat(pieces)


def _dealt(layout: Layout, seed: int, epoch: int) -> torch.Tensor:
    """The samples of this rank, the same on all of its devices."""
    dealt = _shuffled(layout.length, epoch_seed(mix(seed ^ _RANKS), epoch))
    return dealt[layout.shard.start : layout.shard.stop]


def _shuffled(length: int, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)
    return torch.randperm(length, generator=generator, device="cpu")
