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
    _torch as _need_torch,
    allocator,
    enable,
    get_include,
    is_enabled,
    library_path,
    pluggable_allocator,
)
from .cudagraph_outputs import CloneCounts, cudagraph_outputs

if TYPE_CHECKING:
    from .figures import memory_stats, report, set_stream_traits
    from .gather import GatherBatch, GatherBatchIterator
    from .gather_cifar import SharedGPUGatherBatchIterator, clear_gpu_dataset_cache
    from .gather_transform import ImageTransform
    from .normalize import RewardNormalizer, RunningMeanStd, ValueNormalizer
    from .tensor_method import install_tensor_method, uninstall_tensor_method
    from .use import record_use, using
    from .validation import fused_validation_batch

__version__ = "0.1.0"

__all__ = [
    "CloneCounts",
    "GatherBatch",
    "GatherBatchIterator",
    "ImageTransform",
    "RewardNormalizer",
    "RunningMeanStd",
    "SharedGPUGatherBatchIterator",
    "UnavailableError",
    "ValueNormalizer",
    "__version__",
    "allocator",
    "clear_gpu_dataset_cache",
    "cudagraph_outputs",
    "enable",
    "fused_validation_batch",
    "get_include",
    "install_tensor_method",
    "is_enabled",
    "library_path",
    "memory_stats",
    "pluggable_allocator",
    "record_use",
    "report",
    "set_stream_traits",
    "uninstall_tensor_method",
    "using",
]

#: What loads when it is asked for, since it needs PyTorch or the core.
_LATER = {
    "GatherBatch": "gather",
    "GatherBatchIterator": "gather",
    "ImageTransform": "gather_transform",
    "RewardNormalizer": "normalize",
    "RunningMeanStd": "normalize",
    "SharedGPUGatherBatchIterator": "gather_cifar",
    "ValueNormalizer": "normalize",
    "clear_gpu_dataset_cache": "gather_cifar",
    "fused_validation_batch": "validation",
    "install_tensor_method": "tensor_method",
    "memory_stats": "figures",
    "record_use": "use",
    "report": "figures",
    "set_stream_traits": "figures",
    "uninstall_tensor_method": "tensor_method",
    "using": "use",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_LATER[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _need_torch()  # says that it is needed
        raise
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_enable_from_environment()
