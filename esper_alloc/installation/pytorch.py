"""The PyTorch that is here, and the compiled parts that were built for it or for another."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."

#: As tools/torch_build.py has it.
OLDEST_TORCH = (2, 11)

_PACKAGE = Path(__file__).resolve().parents[1]


class UnavailableError(RuntimeError):
    """A part of esper_alloc cannot work here; the message says why and how to
    change that.

    Example::

        try:
            esper_alloc.enable(required=True)
        except esper_alloc.UnavailableError as error:
            print(f"on PyTorch's own allocator: {error}")
    """


class OtherTorchError(UnavailableError):
    """The compiled parts are for other torches than the one that is here, which
    :func:`esper_alloc.pluggable_allocator` can serve. `difference` says how they differ."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"esper_alloc {difference}: run `{REINSTALL}` in its source folder. "
            f"(esper_alloc.pluggable_allocator() works with any torch.)"
        )
        self.difference = difference

    def __reduce__(self) -> tuple[Any, ...]:
        return OtherTorchError, (self.difference,)


class NoCudaError(UnavailableError):
    """There is no CUDA memory to allocate here. `why` says it in half a sentence."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}: {remedy}")
        self.why, self._remedy = why, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return NoCudaError, (self.why, self._remedy)


def need_torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnavailableError(
            f"esper_alloc needs PyTorch for this, and importing torch failed "
            f"({error}): install torch with CUDA, then esper_alloc again with "
            f"`{REINSTALL}` in its source folder."
        ) from error


def nothing_built_here() -> str | None:
    """What to say in a clone, which hides an installed package from who works in it; None
    where something was built."""
    try:
        importlib.import_module("esper_alloc._build")
        return None
    except ImportError:
        pass
    return (
        f"this is the source folder of esper_alloc, {_PACKAGE.parent}, where nothing was built: "
        f"`cd` elsewhere to use the one that is installed, or build here with "
        f"`python setup.py build_ext --inplace`."
    )


def hides_another() -> str | None:
    """What to say at import in a clone where nothing was built, if another one is installed."""
    clone = _PACKAGE.parent
    if (_PACKAGE / "_build.py").exists() or not (clone / "setup.py").exists():
        return None
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != clone]
    installed = importlib.machinery.PathFinder.find_spec("esper_alloc", elsewhere)
    if installed is None or installed.origin is None:
        return None
    return (
        f"the source folder of esper_alloc, {clone}, where nothing was built, hides the one that "
        f"is installed in {Path(installed.origin).parents[1]}: start Python, and keep the program, "
        f"in another folder, or build here with `python setup.py build_ext --inplace`."
    )


def not_built() -> str | None:
    """What to say in a clone where nothing was built for this Python; None elsewhere."""
    return nothing_built_here() or built_for_another_python()


def built_for_another_python() -> str | None:
    """The same where what was built is for another Python than this one."""
    if importlib.util.find_spec("esper_alloc._core") or not (_PACKAGE.parent / "setup.py").exists():
        return None
    return (
        f"this is the source folder of esper_alloc, {_PACKAGE.parent}, which was built for another "
        f"Python than {sys.version.split()[0]}: `cd` elsewhere to use the one that is installed, "
        f"or build here with `python setup.py build_ext --inplace`."
    )


def untyped(value: Any) -> Any:
    """For parts of torch that some versions annotate and others do not."""
    return value


def minor(version: str) -> str:
    """'2.11' of '2.11.0+cu130'."""
    return ".".join(version.split("+")[0].split(".")[:2])


def difference(built_for: Mapping[str, str], version: str, cuda: str | None) -> str | None:
    """How torch `version`, which has CUDA `cuda`, differs from those that the compiled parts
    were built for (`BUILT_FOR` of esper_alloc/_build.py); None if they fit."""
    if minor(version) not in built_for:
        return f"was built for torch {', '.join(built_for)}, and this is torch {version}"
    built_cuda = built_for[minor(version)]
    if cuda and built_cuda.split(".")[0] != cuda.split(".")[0]:
        return f"was built for a torch with CUDA {built_cuda}, and torch {version} has CUDA {cuda}"
    return None


def import_part(name: str, version: str) -> Any:
    """The compiled module `esper_alloc.<name>` for torch `version`.

    A wheel has one for each minor version of torch, in a folder of its own, which
    becomes part of the package here. A build from source has one, in the package.
    """
    folder = _PACKAGE / f"torch_{minor(version).replace('.', '_')}"
    search_path = importlib.import_module("esper_alloc").__path__
    if folder.is_dir() and str(folder) not in search_path:
        search_path.append(str(folder))
    return importlib.import_module(f"esper_alloc.{name}")


def too_old(version: str) -> str | None:
    """What to say of a torch that is older than the oldest supported one; None if it is not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) >= OLDEST_TORCH:
        return None
    needed = ".".join(map(str, OLDEST_TORCH))
    return f"esper_alloc needs torch {needed} or newer, and this is torch {version}"


def hidden_cuda(environment: Mapping[str, str] = os.environ) -> NoCudaError | None:
    """Why no torch can use CUDA on this machine, or with these variables; None if it may. CUDA is
    not initialised for the answer, which children that are forked later could not bear."""
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return NoCudaError("CUDA_VISIBLE_DEVICES hides every GPU", "unset it")
    library = environment.get("ESPER_ALLOC_LIBCUDA") or "libcuda.so.1"  # as the core has it
    try:
        ctypes.CDLL(library)
    except OSError:
        return NoCudaError(
            f"there is no CUDA driver ({library})",
            "install NVIDIA's driver, or in Docker add --gpus all",
        )
    return None


def _check_kind(torch: ModuleType) -> None:
    """Raises for a torch that was not built for CUDA, or that is too old."""
    version: str = torch.__version__
    if getattr(torch.version, "hip", None):
        raise UnavailableError(
            f"esper_alloc does not support ROCm: torch {version} was built for "
            f"AMD GPUs, esper_alloc needs a torch built for CUDA."
        )
    if torch.version.cuda is None:
        raise NoCudaError(
            f"torch {version} was built without CUDA",
            f"install a torch with CUDA, then esper_alloc again with `{REINSTALL}` in its source "
            f"folder.",
        )
    if (old := too_old(version)) is not None:
        raise UnavailableError(
            f"{old}: install a newer torch, then esper_alloc again with `{REINSTALL}` in its "
            f"source folder."
        )


def check_cuda(torch: ModuleType) -> None:
    """Raises where `torch` cannot have CUDA memory, or only memory that is not supported.

    Raises:
        NoCudaError: it was built without CUDA, or there is no driver or no visible GPU.
        UnavailableError: it was built for ROCm, or is too old.
    """
    _check_kind(torch)
    if (hidden := hidden_cuda()) is not None:
        raise hidden


def check_torch(torch: ModuleType) -> None:
    """Raises unless `torch` is one that the compiled shim can serve."""
    _check_kind(torch)
    version: str = torch.__version__
    cuda: str | None = torch.version.cuda
    if (nothing := nothing_built_here()) is not None:
        raise UnavailableError(nothing)
    build = importlib.import_module("esper_alloc._build")
    if not build.BUILT_FOR:
        raise UnavailableError(
            f"esper_alloc was installed without its PyTorch part, because no "
            f"torch with CUDA was there at build time: run `{REINSTALL}` in "
            f"its source folder in an environment with torch {version}."
        )
    differs = difference(build.BUILT_FOR, version, cuda)
    if differs is not None:
        raise OtherTorchError(differs)


@functools.cache
def load_shim() -> Any:
    """The compiled module `esper_alloc._torch`.

    Raises:
        UnavailableError: it was not built.
        OtherTorchError: it was not built for this torch.
    """
    torch = need_torch()
    check_torch(torch)
    try:
        return import_part("_torch", torch.__version__)
    except ImportError as error:
        if (why := not_built()) is not None:
            raise UnavailableError(why) from error
        raise UnavailableError(
            f"esper_alloc's PyTorch part does not load ({error}): run "
            f"`{REINSTALL}` in its source folder."
        ) from error
