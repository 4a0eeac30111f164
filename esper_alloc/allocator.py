"""Putting PyTorch on esper_alloc, and finding out why it cannot be."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator, _CUDAAllocator

_REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps ."
_VARIABLE = "ESPER_ALLOC"
_OPTIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class UnavailableError(RuntimeError):
    """A part of esper_alloc cannot work here; the message says why and how to
    change that."""


# What this environment offers


def _torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnavailableError(
            f"esper_alloc needs PyTorch for this, and importing torch failed "
            f"({error}): install torch with CUDA, then esper_alloc again with "
            f"`{_REINSTALL}` in its source folder."
        ) from error


def _untyped(value: Any) -> Any:
    """For parts of torch that some versions annotate and others do not."""
    return value


def _minor(version: str) -> str:
    """'2.11' of '2.11.0+cu130'."""
    return ".".join(version.split(".")[:2])


def _build_fact(name: str) -> str | None:
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


def _check_torch(torch: ModuleType) -> None:
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
            f"CUDA, then esper_alloc again with `{_REINSTALL}` in its source "
            f"folder."
        )
    if _is_unbuilt():
        raise UnavailableError(
            f"this is the source folder of esper_alloc, {Path(__file__).resolve().parent.parent}, "
            f"where nothing was built: `cd` elsewhere to use the one that is installed, or build "
            f"here with `python setup.py build_ext --inplace`."
        )
    built_for = _build_fact("TORCH_VERSION")
    if built_for is None:
        raise UnavailableError(
            f"esper_alloc was installed without its PyTorch part, because no "
            f"torch with CUDA was there at build time: run `{_REINSTALL}` in "
            f"its source folder in an environment with torch {version}."
        )
    if _minor(built_for) != _minor(version):
        raise UnavailableError(
            f"esper_alloc was built for torch {_minor(built_for)} and this is "
            f"torch {version}: run `{_REINSTALL}` in its source folder. "
            f"(esper_alloc.pluggable_allocator() works with any torch.)"
        )
    built_cuda = _build_fact("CUDA_VERSION")
    if built_cuda and built_cuda.split(".")[0] != cuda.split(".")[0]:
        raise UnavailableError(
            f"esper_alloc was built for a torch with CUDA {built_cuda} and torch "
            f"{version} has CUDA {cuda}: run `{_REINSTALL}` in its source folder."
        )


def _check_backend(torch: ModuleType) -> None:
    """Raises if PyTorch was told to use its other allocator."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    names = [name for name in _OPTIONS if "cudaMallocAsync" in os.environ.get(name, "")]
    variables = " and ".join(names) or "the allocator options"
    raise UnavailableError(
        f"PyTorch was started with its cudaMallocAsync back end, and only one allocator "
        f"can be current: take backend:cudaMallocAsync out of {variables}."
    )


@functools.cache
def load_shim() -> Any:
    """The compiled module `esper_alloc._torch`.

    Raises:
        UnavailableError: it was not built, or not for this torch.
    """
    _check_torch(_torch())
    try:
        return importlib.import_module("esper_alloc._torch")
    except ImportError as error:
        raise UnavailableError(
            f"esper_alloc's PyTorch part does not load ({error}): run "
            f"`{_REINSTALL}` in its source folder."
        ) from error


def library_path() -> str:
    """The shared library that holds the core and exports ``esper_alloc_*``.

    For C extensions, and for ``torch.cuda.memory.CUDAPluggableAllocator(path,
    "esper_alloc_malloc", "esper_alloc_free")``. An allocator made that way
    cannot see ``record_stream``: the library says so on stderr, once, and
    orders each free after all of the device's earlier work.
    :func:`pluggable_allocator` connects what is missing.
    """
    spec = importlib.util.find_spec("esper_alloc._core")
    if spec is None or spec.origin is None:
        raise UnavailableError(
            f"esper_alloc's core was not built: run `{_REINSTALL}` in its source folder."
        )
    return spec.origin


def get_include() -> str:
    """The folder that holds ``esper_alloc.h``, for C and C++ compilers."""
    package = Path(__file__).resolve().parent
    for folder in (package / "include", package.parent / "csrc"):
        if (folder / "esper_alloc.h").is_file():
            return str(folder)
    raise UnavailableError(
        f"esper_alloc.h is missing from the installation: run `{_REINSTALL}` in its source folder."
    )


# The allocator


@functools.cache
def allocator() -> _CUDAAllocator:
    """The allocator, for ``torch.cuda.memory.change_current_allocator()``.

    Each call returns the same object. The swap must come before CUDA
    initialises; :func:`enable` does it and says so.

    Raises:
        UnavailableError: esper_alloc cannot serve this torch, or PyTorch was
            started with ``backend:cudaMallocAsync``.
    """
    shim = load_shim()
    _check_backend(_torch())
    from torch.cuda.memory import _CUDAAllocator

    return _CUDAAllocator(shim.allocator())


@functools.cache
def pluggable_allocator() -> CUDAPluggableAllocator:
    """The core behind ``torch.cuda.memory.CUDAPluggableAllocator``.

    It needs no part that was built for this torch, so it works with any
    version. PyTorch's pluggable allocators have no statistics, snapshots or
    ``torch.cuda.OutOfMemoryError``; :func:`allocator` has.
    """
    _torch()
    from torch.cuda.memory import CUDAPluggableAllocator

    path = library_path()
    pluggable = CUDAPluggableAllocator(path, "esper_alloc_malloc", "esper_alloc_free")
    library = ctypes.CDLL(path)
    hooks = _untyped(pluggable).allocator()

    def address(name: str) -> int:
        value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert value is not None, name
        return value

    hooks.set_init_fn(address("esper_alloc_init"))
    hooks.set_reset_fn(address("esper_alloc_reset"))
    hooks.set_memory_fraction_fn(address("esper_alloc_set_memory_fraction"))
    hooks.set_base_alloc_fn(address("esper_alloc_base"))
    hooks.set_record_stream_fn(address("esper_alloc_record_stream"))
    library.esper_alloc_set_record_stream_visible(1)
    return pluggable


def _is_current(candidate: Any) -> bool:
    import torch

    return torch._C._cuda_getAllocator() is candidate.allocator()


def is_enabled() -> bool:
    """Whether PyTorch allocates CUDA memory through esper_alloc."""
    if "torch" not in sys.modules:
        return False
    shim = sys.modules.get("esper_alloc._torch")
    if shim is not None and shim.is_current():
        return True
    # Asking must not make one.
    if pluggable_allocator.cache_info().currsize == 0:
        return False
    return _is_current(pluggable_allocator())


def enable() -> None:
    """Makes esper_alloc PyTorch's CUDA allocator, for the rest of the process.

    Raises:
        RuntimeError: CUDA is initialised already; nothing has changed.
        UnavailableError: esper_alloc cannot serve this torch, or PyTorch was
            started with ``backend:cudaMallocAsync``.
    """
    if is_enabled():
        return
    ours = allocator()
    import torch

    if _untyped(torch.cuda).is_initialized():
        raise RuntimeError(
            "esper_alloc.enable() came too late: CUDA is initialised and "
            "PyTorch cannot change its allocator any more. Call it before the "
            "first CUDA tensor, stream or torch.cuda call (right after `import "
            "torch`), or leave the script alone and start it with `python -m "
            "esper_alloc run script.py`."
        )
    torch.cuda.memory.change_current_allocator(ours)


def _enable_from_environment() -> None:
    """What ``ESPER_ALLOC=1`` asks for at ``import esper_alloc``.

    An import must not fail for lack of a GPU or of a matching torch, so what
    goes wrong is a warning.
    """
    value = os.environ.get(_VARIABLE, "")
    if value in ("", "0"):
        return
    if value != "1":
        warnings.warn(
            f"{_VARIABLE}={value} is neither 0 nor 1; esper_alloc stays off.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    try:
        enable()
    except (RuntimeError, ValueError) as error:  # PyTorch's options: ValueError
        warnings.warn(
            f"{_VARIABLE}=1, but PyTorch keeps its own allocator: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
