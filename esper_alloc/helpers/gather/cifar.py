"""CIFAR-10 and CIFAR-100 from their published files, through torchvision.

torchvision fetches and unpacks the archive, and compares its files with the published
checksums before it reads them.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...installation.pytorch import UnavailableError, minor

if TYPE_CHECKING:
    import torch

__all__ = ["CIFAR", "Cifar", "download", "read"]


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets, as published on https://www.cs.toronto.edu/~kriz/cifar.html.

    Attributes:
        name: also of torchvision's class, without the hyphen.
        mean, std: of each channel over the training set's pixels / 255.
    """

    name: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


#: By name.
CIFAR: dict[str, Cifar] = {
    "cifar10": Cifar("CIFAR-10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Cifar("CIFAR-100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def find(name: str) -> Cifar:
    """The data set of that name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in CIFAR:
        raise ValueError(f"dataset must be one of {', '.join(CIFAR)} (got {name!r})")
    return CIFAR[name]


def read(name: str, root: str | os.PathLike[str], train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The training or the test set.

    Args:
        name: "cifar10" or "cifar100".
        root: the folder that the published archive was unpacked in.

    Returns:
        images [N, 3, 32, 32] uint8 and labels [N] int64 (of CIFAR-100 the fine
        ones), on the CPU.

    Raises:
        FileNotFoundError: a file is missing; says where it is expected.
        ValueError: a file is not what was published.
        UnavailableError: torchvision is not installed.
    """
    import torch

    dataset, reader, missing = _look(name, root)
    folder = Path(root).expanduser().resolve()
    if missing:
        raise FileNotFoundError(
            f"{dataset.name} is expected as {missing[0].resolve()}: unpack {reader.url} in "
            f"{folder}, pass another data_root, or ask for the download with download=True"
        )
    try:
        found = reader(str(folder), train=train)
    except RuntimeError as error:
        raise ValueError(
            f"{folder / reader.base_folder} does not hold the files of {dataset.name} as they were "
            f"published ({error}): remove it, and unpack {reader.url} again"
        ) from error
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(found.targets, dtype=torch.int64, device="cpu")


def download(name: str, root: str | os.PathLike[str]) -> None:
    """Fetches the published archive and unpacks it in `root`, unless its files are there.

    Raises:
        ValueError: what came is not what was published.
        OSError: it could not be fetched or written.
        UnavailableError: torchvision is not installed.
    """
    dataset, reader, missing = _look(name, root)
    if not missing:
        return
    try:
        reader(str(Path(root).expanduser()), download=True)
    except RuntimeError as error:
        raise ValueError(
            f"{reader.url} did not give {dataset.name} as it was published ({error}): try again, "
            "or fetch it by hand"
        ) from error


def _look(name: str, root: str | os.PathLike[str]) -> tuple[Cifar, Any, list[Path]]:
    """The data set, torchvision's class for it, and which of its files are missing."""
    dataset = find(name)
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except ImportError as error:
        import torch

        raise UnavailableError(
            f"reading {dataset.name} needs torchvision, and importing it failed ({error}): install "
            f"the torchvision that goes with torch {minor(torch.__version__)}"
        ) from error
    reader = getattr(datasets, dataset.name.replace("-", ""))
    files = [*reader.train_list, *reader.test_list, (reader.meta["filename"], "")]
    folder = Path(root).expanduser() / reader.base_folder
    paths = [folder / file for file, _ in files]
    return dataset, reader, [path for path in paths if not path.is_file()]
