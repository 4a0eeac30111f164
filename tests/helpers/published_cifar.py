"""Small data sets in place of the published ones: read by stub/torchvision."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

STUB = Path(__file__).resolve().parent / "stub"
CLASSES = {"cifar10": 10, "cifar100": 100}


def use_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends; an installed torchvision, imported or not, is itself then."""
    for name, file in (
        ("torchvision", "torchvision/__init__.py"),
        ("torchvision.datasets", "torchvision/datasets.py"),
    ):
        spec = importlib.util.spec_from_file_location(name, STUB / file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, name, module)


def reader(name: str):
    return getattr(importlib.import_module("torchvision.datasets"), name.upper())


def write_cifar(root: Path, name: str, count: int = 12, seed: int = 0):
    """Random pixels, `count` images a file: (train images, labels), (test images, labels)."""
    about = reader(name)
    folder = root / about.base_folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / about.meta["filename"]).touch()
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for files in (about.train_list, about.test_list):
        pixels, labels = [], []
        for file, _ in files:
            rows = torch.randint(0, 256, (count, 3072), generator=generator, dtype=torch.uint8)
            here = torch.randint(0, CLASSES[name], (count,), generator=generator).tolist()
            torch.save((rows, here), folder / file)
            pixels.append(rows.view(count, 3, 32, 32))
            labels += here
        sets.append((torch.cat(pixels), torch.tensor(labels)))
    return sets
