"""The PyTorch that is here, and the compiled part that was built for one."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."


class UnavailableError(RuntimeError):
    """A part of esper_alloc cannot work here; the message says why and how to
    change that."""


def need_torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnavailableError(
            f"esper_alloc needs PyTorch for this, and importing torch failed "
            f"({error}): install torch with CUDA, then esper_alloc again with "
            f"`{REINSTALL}` in its source folder."
        ) from error


def untyped(value: Any) -> Any:
    """For parts of torch that some versions annotate and others do not."""
    return value


def minor(version: str) -> str:
    """'2.11' of '2.11.0+cu130'."""
    return ".".join(version.split("+")[0].split(".")[:2])


def build_fact(name: str) -> str | None:
    """A constant that setup.py wrote into esper_alloc/_build.py."""
    try:
        build = importlib.import_module("esper_alloc._build")
    except ImportError:
        return None
    return getattr(build, name, None)


def _is_unbuilt() -> bool:
    """Whether this is a clone, which hides an installed package from who works in it."""
    try:
        importlib.import_module("esper_alloc._build")
    except ImportError:
        return True
    return False


def check_torch(torch: ModuleType) -> None:
    """Raises unless `torch` is one that the compiled shim can serve."""
    version: str = torch.__version__
    if getattr(torch.version, "hip", None):
        raise UnavailableError(
            f"esper_alloc does not support ROCm: torch {version} was built for "
            f"AMD GPUs, esper_alloc needs a torch built for CUDA."
        )
    cuda: str | None = torch.version.cuda
    if cuda is None:
        raise UnavailableError(
            f"torch {version} was built without CUDA: install a torch with "
            f"CUDA, then esper_alloc again with `{REINSTALL}` in its source "
            f"folder."
        )
    if _is_unbuilt():
        raise UnavailableError(
            f"this is the source folder of esper_alloc, {Path(__file__).resolve().parents[2]}, "
            f"where nothing was built: `cd` elsewhere to use the one that is installed, or build "
            f"here with `python setup.py build_ext --inplace`."
        )
    built_for = build_fact("TORCH_VERSION")
    if built_for is None:
        raise UnavailableError(
            f"esper_alloc was installed without its PyTorch part, because no "
            f"torch with CUDA was there at build time: run `{REINSTALL}` in "
            f"its source folder in an environment with torch {version}."
        )
    if minor(built_for) != minor(version):
        raise UnavailableError(
            f"esper_alloc was built for torch {minor(built_for)} and this is "
            f"torch {version}: run `{REINSTALL}` in its source folder. "
            f"(esper_alloc.pluggable_allocator() works with any torch.)"
        )
    built_cuda = build_fact("CUDA_VERSION")
    if built_cuda and built_cuda.split(".")[0] != cuda.split(".")[0]:
        raise UnavailableError(
            f"esper_alloc was built for a torch with CUDA {built_cuda} and torch "
            f"{version} has CUDA {cuda}: run `{REINSTALL}` in its source folder."
        )


@functools.cache
def load_shim() -> Any:
    """The compiled module `esper_alloc._torch`.

    Raises:
        UnavailableError: it was not built, or not for this torch.
    """
    check_torch(need_torch())
    try:
        return importlib.import_module("esper_alloc._torch")
    except ImportError as error:
        raise UnavailableError(
            f"esper_alloc's PyTorch part does not load ({error}): run "
            f"`{REINSTALL}` in its source folder."
        ) from error
