"""The helpers' compiled kernels, and what to say where there are none.

Every helper also works through PyTorch's own operations, so a missing kernel is
no error. It is said once, when a helper first gets a CUDA tensor.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from ..installation.callers import user_stacklevel
from ..installation.pytorch import REINSTALL, difference, import_part


@functools.cache
def _loaded() -> tuple[Any, str]:
    """The module and "", or None and why there is none."""
    import torch

    try:
        build: Any = importlib.import_module("esper_alloc._build")
    except ImportError as error:
        return None, f"this installation was not built ({error})"
    if not build.HAS_KERNELS:
        missing = [text for text in build.WHAT_IS_MISSING if text.startswith("the kernels: ")]
        why = missing[0].partition(": ")[2] if missing else "the PyTorch part was not built either"
        return None, why
    differs = difference(build.BUILT_FOR, torch.__version__, torch.version.cuda)
    if differs is not None:
        return None, f"the build that has them {differs}"
    try:
        return import_part("_kernels", torch.__version__), ""
    except ImportError as error:
        return None, f"they do not load ({error})"


def load() -> Any:
    """The compiled module `esper_alloc._kernels`, or None where there is none.

    Its operators take CPU tensors too. Says nothing; `usable` does.
    """
    return _loaded()[0]


@functools.cache
def usable(index: int) -> bool:
    """Whether the kernels can run on a CUDA device; False is a warning, once a device."""
    module, why = _loaded()
    if module is not None:
        if module.runs_on(index):
            return True
        import torch

        major, minor = torch.cuda.get_device_capability(index)
        why = (
            f"they hold no code for {torch.cuda.get_device_name(index)}; set "
            f"TORCH_CUDA_ARCH_LIST={major}.{minor} for the build"
        )
    _say_once(
        f"esper_alloc's kernels are not used, and its helpers use PyTorch's own operations, which "
        f"give the same results more slowly: {why}. To build them, run `{REINSTALL}` in "
        f"esper_alloc's source folder, with nvcc on PATH."
    )
    return False


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=user_stacklevel())
