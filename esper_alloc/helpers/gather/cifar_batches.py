"""CIFAR-10 and CIFAR-100 on the GPU for many environments:
:class:`SharedGPUGatherBatchIterator`, and the cache that its iterators share.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...installation.bools import checked_bool
from ...installation.pytorch import need_torch
from . import cifar
from .devices import check_device_exists, check_environments, device_name
from .iterator import GatherBatchIterator, check_reuse
from .plan import Layout, Order, canonical_device, check_seed, device_index
from .transform import ImageTransform

with suppress(ImportError):
    import torch

__all__ = ["SharedGPUGatherBatchIterator", "clear_gpu_dataset_cache"]

#: What random crops add around an image, in pixels, and how often images are flipped.
CROP = 4
FLIP = 0.5

_Dataset = tuple["torch.Tensor", "torch.Tensor"]


# The cache


class _Key(NamedTuple):
    """What makes two data sets on a device the same."""

    device: int  # index of the CUDA device; -1: the CPU
    path: str  # of the data's root, links followed
    dataset: str
    train: bool
    augmented: int | None  # the seed, where the images were augmented once


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: _Dataset | None = None


class _Cache:
    """Data sets by key, each loaded once, whichever threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}

    def get(self, key: _Key, load: Callable[[], _Dataset]) -> _Dataset:
        """The data set, loaded by the first who asks; others wait for that one. A load
        that fails leaves nothing behind."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
        with entry.lock:
            if entry.value is None:
                entry.value = load()
            return entry.value

    def drop(self, fits: Callable[[_Key], bool]) -> int:
        """Forgets the data sets whose key fits: how many there were."""
        with self._lock:
            dropped = [self._entries.pop(key) for key in list(self._entries) if fits(key)]
        return sum(entry.value is not None for entry in dropped)

    def begin_anew(self) -> None:
        """In a forked child: the threads that held the locks are not there."""
        self._lock = threading.Lock()
        for entry in self._entries.values():
            entry.lock = threading.Lock()


_cache = _Cache()
os.register_at_fork(after_in_child=_cache.begin_anew)


def clear_gpu_dataset_cache(
    *,
    dataset: str | None = None,
    device: str | torch.device | None = None,
    data_root: str | os.PathLike[str] | None = None,
    augment_mode: str | None = None,
) -> int:
    """Drops data sets that iterators share: all, or those that match the arguments.

    Iterators keep what they have; the memory is free when the last one is gone.

    Args:
        dataset: "cifar10" or "cifar100".
        device: "cpu", "cuda" or "cuda:N"; "cuda" is "cuda:0".
        data_root: as it was given to the iterators.
        augment_mode: "precompute", those of cifar_precompute_aug=True; "base", the
            others.

    Returns:
        how many were dropped.

    Raises:
        ValueError, TypeError: `dataset`, `device` or `augment_mode` is none of these.

    Example::

        del batches
        esper_alloc.clear_gpu_dataset_cache(dataset="cifar10")
    """
    if dataset is not None:
        cifar.find(dataset)
    if augment_mode not in (None, "base", "precompute"):
        raise ValueError(f'augment_mode must be "base" or "precompute" (got {augment_mode!r})')
    index = None if device is None else _index(device_name("device", device))
    path = None if data_root is None else _real_path(data_root)

    def fits(key: _Key) -> bool:
        return (
            dataset in (None, key.dataset)
            and index in (None, key.device)
            and path in (None, key.path)
            and (augment_mode is None or (key.augmented is None) == (augment_mode == "base"))
        )

    return _cache.drop(fits)


def _index(device: str) -> int:
    return -1 if canonical_device(device) == "cpu" else device_index(device)


def _real_path(root: str | os.PathLike[str]) -> str:
    return str(Path(root).expanduser().resolve())


# The iterator


class SharedGPUGatherBatchIterator(GatherBatchIterator["torch.Tensor", "torch.Tensor"]):
    """Batches of CIFAR images and labels, see :class:`GatherBatchIterator`.

    Inputs are [n, 3, 32, 32] in channels_last, normalised; targets [n] int64. The
    images lie on each device once, as bytes, and are shared between iterators
    (:func:`clear_gpu_dataset_cache` drops them). They are read from the files of the
    published archive, unpacked in `data_root`.

    Normalised means (x / 255 - mean[c]) / std[c], with, for red, green and blue,

    - cifar10: mean 0.4914, 0.4822, 0.4465 and std 0.2470, 0.2435, 0.2616;
    - cifar100: mean 0.5071, 0.4865, 0.4409 and std 0.2673, 0.2564, 0.2762.

    ``cifar_precompute_aug=True`` augments the training images once, when they are
    loaded: each gets a random crop (4 pixels of black around it) and with
    probability 1/2 a flip, drawn from the seed. Every epoch then sees the same
    augmented images. ``augment=True`` draws them anew each epoch, at no cost in
    memory. Test images are never augmented.

    Arguments that are not listed here are those of `GatherBatchIterator`.

    Args:
        order: as there, but "global" unless it is given.
        data_root: the folder that holds ``cifar-10-batches-py`` or
            ``cifar-100-python``.
        is_train: the training set, without a last batch that is not full; else the
            test set, with it.
        cifar_precompute_aug: see above.
        dataset: "cifar10" or "cifar100" (the fine labels).
        augment: see above; only with is_train.
        normalize: False keeps values 0 to 255.
        dtype: of the inputs: float32 (also None), float16 or bfloat16.
        channels_last: False gives [n, 3, 32, 32] contiguous.
        download: fetch the published archive if its files are not there.

    Raises:
        FileNotFoundError: the files are not there; says where they are expected.
        OSError: with `download`, they could not be fetched or written.
        UnavailableError: torchvision, which reads them, is not installed.
        ValueError, TypeError: as for `GatherBatchIterator`, or a file is not what was
            published.

    Example::

        batches = esper_alloc.SharedGPUGatherBatchIterator(
            batch_size_per_env=2, n_envs=2, env_devices=["cuda:0", "cuda:0"], shuffle=True, seed=1,
            data_root="./data",
        )
    """

    def __init__(
        self,
        *,
        batch_size_per_env: int,
        n_envs: int,
        env_devices: Sequence[str | torch.device],
        shuffle: bool,
        data_root: str | os.PathLike[str] = "./data",
        is_train: bool = True,
        seed: int,
        cifar_precompute_aug: bool = False,
        dataset: str = "cifar10",
        order: Order = "global",
        augment: bool = False,
        normalize: bool = True,
        dtype: torch.dtype | None = None,
        channels_last: bool = True,
        reuse: int = 0,
        rank: int = 0,
        world_size: int = 1,
        download: bool = False,
    ) -> None:
        need_torch()  # or an error that says what to install
        about = cifar.find(dataset)
        seed = check_seed(seed)
        # Everything is checked before anything is fetched or copied to a device.
        shuffle = checked_bool("shuffle", shuffle)
        is_train = checked_bool("is_train", is_train)
        cifar_precompute_aug = checked_bool("cifar_precompute_aug", cifar_precompute_aug)
        augment = checked_bool("augment", augment)
        normalize = checked_bool("normalize", normalize)
        download = checked_bool("download", download)
        names = check_environments(batch_size_per_env, n_envs, env_devices)
        Layout(0, names, batch_size_per_env, order, is_train, rank, world_size)
        check_reuse(reuse)
        if augment and not is_train:
            raise ValueError("augment=True needs is_train=True: test images are not augmented")
        transform = ImageTransform(
            dtype=torch.float32 if dtype is None else dtype,
            mean=about.mean if normalize else None,
            std=about.std if normalize else None,
            crop=CROP if augment else 0,
            flip=FLIP if augment else 0.0,
            channels_last=channels_last,
        )
        for name in names:
            check_device_exists(canonical_device(name))
        if download:
            cifar.download(dataset, data_root)
        self.is_train = is_train
        self._augmented_with = seed if cifar_precompute_aug and is_train else None
        self._data = {
            canonical_device(name): _on_device(
                name, data_root, dataset, is_train, self._augmented_with
            )
            for name in names
        }
        images, labels = next(iter(self._data.values()))
        super().__init__(
            images,
            labels,
            batch_size_per_env=batch_size_per_env,
            n_envs=n_envs,
            env_devices=env_devices,
            shuffle=shuffle,
            seed=seed,
            order=order,
            drop_last=is_train,
            transform=transform,
            reuse=reuse,
            rank=rank,
            world_size=world_size,
        )

    def _columns_on(self, device: str) -> _Dataset:
        return self._data[device]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `GatherBatchIterator.load_state_dict`.

        Raises:
            ValueError: also if the images were augmented with another seed.
        """
        seed = state.get("seed") if isinstance(state, Mapping) else None
        if self._augmented_with is not None and seed not in (None, self._augmented_with):
            raise ValueError(
                f"state has seed {seed!r}, but cifar_precompute_aug augmented the "
                f"images with seed {self._augmented_with}: make an iterator with the state's seed"
            )
        super().load_state_dict(state)


def _on_device(
    device: str,
    root: str | os.PathLike[str],
    dataset: str,
    train: bool,
    augmented: int | None,
) -> _Dataset:
    """images [N, 3, 32, 32] uint8 in channels_last and labels [N] int64 on a device."""
    key = _Key(_index(device), _real_path(root), dataset, train, augmented)
    base = key._replace(augmented=None)

    def load() -> _Dataset:
        images, labels = cifar.read(dataset, root, train)
        if augmented is not None:
            images = augment_once(images, augmented)
            # A seed is seldom asked for again, and each takes as much memory as the last.
            _cache.drop(
                lambda one: one not in (key, base) and one._replace(augmented=augmented) == key
            )
        images = images.contiguous(memory_format=torch.channels_last)
        return images.to(canonical_device(device)), labels.to(canonical_device(device))

    return _cache.get(key, load)


def augment_once(images: torch.Tensor, seed: int) -> torch.Tensor:
    """What cifar_precompute_aug does: a random crop and flip of each image.

    Drawn as ``ImageTransform(crop=4, flip=0.5)`` draws in epoch 0 of that seed.

    Args:
        images: [N, C, H, W] uint8.
    """
    transform = ImageTransform(crop=CROP, flip=FLIP).on(images.device)
    pieces = []
    for start in range(0, len(images), 4096):  # so that little memory is needed
        samples = torch.arange(start, min(start + 4096, len(images)), device="cpu")
        pieces.append(transform(images[start : start + 4096], samples, seed))
    return torch.cat(pieces) if pieces else images
