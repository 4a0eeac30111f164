"""Where pickles of version 0.1 look for public classes.

A pickle names a class by its module, and the modules have moved into folders since.
Under their former names there stand modules that fetch what is asked for. They are
not imported as submodules, which would put them in the place of functions of the
same names: ``esper_alloc.cudagraph_outputs`` is one.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: By former module, where each of its public classes is.
_MOVED = {
    "allocator": {"UnavailableError": "installation.pytorch"},
    "cudagraph_outputs": {
        "CloneCounts": "helpers.cudagraph_outputs.wrapper",
        "cudagraph_outputs": "helpers.cudagraph_outputs.wrapper",
    },
    "gather": {
        "GatherBatch": "helpers.gather.batch",
        "GatherBatchIterator": "helpers.gather.iterator",
    },
    "gather_cifar": {"SharedGPUGatherBatchIterator": "helpers.gather.cifar_batches"},
    "gather_transform": {"ImageTransform": "helpers.gather.transform"},
    "normalize": {
        "RewardNormalizer": "helpers.normalize.rewards",
        "RunningMeanStd": "helpers.normalize.observations",
        "ValueNormalizer": "helpers.normalize.values",
    },
    "validation": {"FusedValidation": "helpers.validation"},
}


class _Former(ModuleType):
    def __getattr__(self, name: str) -> Any:
        package, _, former = self.__name__.rpartition(".")
        if name not in _MOVED[former]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{_MOVED[former][name]}"), name)


def serve() -> None:
    """Makes the former names known to ``pickle``."""
    package = __name__.rpartition(".")[0]
    for former in _MOVED:
        name = f"{package}.{former}"
        sys.modules.setdefault(name, _Former(name, __doc__))
