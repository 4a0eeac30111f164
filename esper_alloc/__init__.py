"""esper_alloc: a CUDA allocator for PyTorch in which uses are first-class.

``record_use(x, stream)`` marks the point after the last read of ``x`` on a
stream; its memory is reused as soon as the GPU has passed that point and never
before. Importing this package loads neither PyTorch nor CUDA, unless the
environment variable ``ESPER_ALLOC=1`` asks for ``enable()`` at import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Cheap: loads nothing but the standard library. (Eager, so that the function
# allocator() and not the submodule of that name is the package's attribute.)
from .allocator import (
    UnavailableError,
    _enable_from_environment,
    allocator,
    enable,
    get_include,
    is_enabled,
    library_path,
    pluggable_allocator,
)

if TYPE_CHECKING:
    from .gather import GatherBatch, GatherBatchIterator
    from .gather_cifar import SharedGPUGatherBatchIterator, clear_gpu_dataset_cache
    from .gather_transform import ImageTransform
    from .use import record_use, using

__version__ = "0.1.0"

__all__ = [
    "GatherBatch",
    "GatherBatchIterator",
    "ImageTransform",
    "SharedGPUGatherBatchIterator",
    "UnavailableError",
    "__version__",
    "allocator",
    "clear_gpu_dataset_cache",
    "enable",
    "get_include",
    "is_enabled",
    "library_path",
    "pluggable_allocator",
    "record_use",
    "using",
]


# The helpers, and the modules that hold them.
_HELPERS = {
    "GatherBatch": "gather",
    "GatherBatchIterator": "gather",
    "ImageTransform": "gather_transform",
    "SharedGPUGatherBatchIterator": "gather_cifar",
    "clear_gpu_dataset_cache": "gather_cifar",
}


def __getattr__(name: str) -> Any:
    # Marking needs PyTorch where there is one, so it loads when asked for.
    if name in ("record_use", "using"):
        from . import use

        globals().update(record_use=use.record_use, using=use.using)
        return globals()[name]
    if name in _HELPERS:
        value = getattr(importlib.import_module(f"{__name__}.{_HELPERS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_enable_from_environment()
