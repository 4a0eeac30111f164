"""esper_alloc: a CUDA allocator for PyTorch in which uses are first-class.

``record_use(x, stream)`` marks the point after the last read of ``x`` on a
stream; once ``x`` is dropped, its memory is reused as soon as the GPU has passed
that point and never before (in grad mode: not before the drop). The documents:
``python -m esper_alloc docs``.

Importing this package loads neither PyTorch nor CUDA, unless the environment
variable ``ESPER_ALLOC=1`` asks for ``enable()`` at import.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

# The first: other threads may fork while the rest is imported.
from .installation import forks as _forks  # noqa: F401

# isort: split

# Cheap: loads nothing but the standard library.
from .auditor.auditing import AuditError, AuditWarning, audit
from .helpers.cudagraph_outputs.wrapper import CloneCounts, cudagraph_outputs
from .installation.files import get_include, library_path
from .installation.pytorch import (
    UnavailableError,
    hides_another as _hides_another,
    need_torch as _need_torch,
    not_built as _not_built,
)
from .torch_allocator.choices import MEMORY_SAVER as _MEMORY_SAVER
from .torch_allocator.enabling import (
    allocator,
    enable,
    enable_from_environment as _enable_from_environment,
    is_enabled,
    once_enabled as _once_enabled,
    pluggable_allocator,
)

if TYPE_CHECKING:
    from .helpers.gather.batch import GatherBatch
    from .helpers.gather.cifar_batches import SharedGPUGatherBatchIterator, clear_gpu_dataset_cache
    from .helpers.gather.iterator import GatherBatchIterator
    from .helpers.gather.transform import ImageTransform
    from .helpers.normalize.observations import RunningMeanStd
    from .helpers.normalize.rewards import RewardNormalizer
    from .helpers.normalize.values import ValueNormalizer
    from .helpers.validation import fused_validation_batch
    from .live.metrics import metrics, prometheus_text
    from .recorder.writing import black_box
    from .torch_allocator.sleep import SleepResult, asleep, sleep, tag, tag_stats, trim_sleep, wake
    from .torch_allocator.stats import memory_stats, report
    from .uses.foreign_captures import capturing
    from .uses.tensor_method import install_tensor_method, uninstall_tensor_method
    from .uses.use import record_use, touch, using

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "AuditWarning",
    "CloneCounts",
    "GatherBatch",
    "GatherBatchIterator",
    "ImageTransform",
    "RewardNormalizer",
    "RunningMeanStd",
    "SharedGPUGatherBatchIterator",
    "SleepResult",
    "UnavailableError",
    "ValueNormalizer",
    "__version__",
    "allocator",
    "asleep",
    "audit",
    "black_box",
    "capturing",
    "clear_gpu_dataset_cache",
    "cudagraph_outputs",
    "enable",
    "fused_validation_batch",
    "get_include",
    "install_tensor_method",
    "is_enabled",
    "library_path",
    "memory_stats",
    "metrics",
    "pluggable_allocator",
    "prometheus_text",
    "record_use",
    "report",
    "sleep",
    "tag",
    "tag_stats",
    "touch",
    "trim_sleep",
    "uninstall_tensor_method",
    "using",
    "wake",
]

#: What loads when it is asked for, since it needs PyTorch or the core.
_LATER = {
    "GatherBatch": "helpers.gather.batch",
    "GatherBatchIterator": "helpers.gather.iterator",
    "ImageTransform": "helpers.gather.transform",
    "RewardNormalizer": "helpers.normalize.rewards",
    "RunningMeanStd": "helpers.normalize.observations",
    "SharedGPUGatherBatchIterator": "helpers.gather.cifar_batches",
    "SleepResult": "torch_allocator.sleep",
    "ValueNormalizer": "helpers.normalize.values",
    "asleep": "torch_allocator.sleep",
    "black_box": "recorder.writing",
    "capturing": "uses.foreign_captures",
    "clear_gpu_dataset_cache": "helpers.gather.cifar_batches",
    "fused_validation_batch": "helpers.validation",
    "install_tensor_method": "uses.tensor_method",
    "memory_stats": "torch_allocator.stats",
    "metrics": "live.metrics",
    "prometheus_text": "live.metrics",
    "record_use": "uses.use",
    "report": "torch_allocator.stats",
    "sleep": "torch_allocator.sleep",
    "tag": "torch_allocator.sleep",
    "tag_stats": "torch_allocator.sleep",
    "touch": "uses.use",
    "trim_sleep": "torch_allocator.sleep",
    "uninstall_tensor_method": "uses.tensor_method",
    "using": "uses.use",
    "wake": "torch_allocator.sleep",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_LATER[name]}")
    except ImportError as error:
        if error.name == "torch":
            _need_torch()  # says that it is needed
        elif "_core" in str(error) and (why := _not_built()) is not None:
            raise UnavailableError(why) from error
        raise
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _stand_in() -> None:
    if _MEMORY_SAVER.in_environment() == "1":
        from .torch_allocator.memory_saver import stand_in

        stand_in()


_once_enabled.append(_stand_in)
if (_hidden := _hides_another()) is not None:
    warnings.warn(_hidden, RuntimeWarning, stacklevel=2)
_enable_from_environment()
