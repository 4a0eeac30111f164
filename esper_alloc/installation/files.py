"""Where the installation's files are: the library and the headers, for C and C++."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .pytorch import REINSTALL, UnavailableError


def library_path() -> str:
    """The shared library that holds the core and exports ``esper_alloc_*``.

    For C extensions, and for ``torch.cuda.memory.CUDAPluggableAllocator(path,
    "esper_alloc_malloc", "esper_alloc_free")``. An allocator made that way
    cannot see ``record_stream``: the library says so on stderr, once, and
    orders each free after all of the device's earlier work.
    :func:`pluggable_allocator` connects what is missing.

    Raises:
        UnavailableError: the core was not built.

    Example::

        library = ctypes.CDLL(esper_alloc.library_path())
    """
    spec = importlib.util.find_spec("esper_alloc._core")
    if spec is None or spec.origin is None:
        raise UnavailableError(
            f"esper_alloc's core was not built: run `{REINSTALL}` in its source folder."
        )
    return spec.origin


def get_include() -> str:
    """The folder that holds ``esper_alloc.h``, for C and C++ compilers.

    Raises:
        UnavailableError: the installation lacks it.

    Example::

        flags = [f"-I{esper_alloc.get_include()}"]
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "include", package.parent / "csrc"):
        if (folder / "esper_alloc.h").is_file():
            return str(folder)
    raise UnavailableError(
        f"esper_alloc.h is missing from the installation: run `{REINSTALL}` in its source folder."
    )
