"""Captures of CUDA graphs that other libraries make."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from ..installation.callers import user_stacklevel
from ..installation.devices import check_device_name, device_index
from ..torch_allocator.enabling import is_enabled
from . import use

if TYPE_CHECKING:
    import torch

__all__ = ["capturing"]


class capturing(contextlib.ContextDecorator):
    """Says that another library captures a CUDA graph within the block, on any stream and thread.

    Put it around captures that do not go through PyTorch, on streams that PyTorch does not
    allocate on, while some thread may allocate. Otherwise the allocator does not know of the
    capture, and may end it: to give freed memory to another stream it records an event that
    stands for all streams of the device, and the driver then ends every capture. Within the block
    it records none, so streams get less memory from each other. Nor do
    :func:`torch.cuda.empty_cache` and running out of memory end the capture, unless another thread
    was about to synchronise the device for them when it began. Captures through
    ``torch.cuda.graph`` need no block.

    Args:
        device: the device of the captured streams. Default: the current one.

    Blocks may nest and overlap. Does nothing while PyTorch does not run on esper_alloc. On
    :func:`pluggable_allocator` it needs the PyTorch part that is built for this torch; if that is
    missing, a warning says so.

    Raises:
        ValueError: this process has no such CUDA device. Without CUDA only the name is checked.
        TypeError: `device` is neither index, name nor torch.device.

    Example::

        with esper_alloc.capturing():
            with warp.ScopedCapture() as capture:
                simulate()
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        check_device_name(device)
        self._device = device
        self._told: list[tuple[Any, int]] = []

    def __enter__(self) -> None:
        index, told = -1, None
        compiled = use._compiled
        if compiled is not None and is_enabled():
            import torch

            if torch.cuda.is_available():  # or there is nothing to capture
                index = device_index(self._device)
                told = compiled if compiled.announce_capture(index, True) else None
        elif is_enabled():
            warnings.warn(
                "esper_alloc cannot be told of a capture without its PyTorch part, and may end it. "
                "`python -m esper_alloc doctor` says why the part is missing.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        self._told.append((told, index))

    def __exit__(self, *exception: object) -> None:
        if not self._told:
            raise RuntimeError("capturing() is left, but was not entered")
        told, index = self._told.pop()
        if told is not None:
            told.announce_capture(index, False)
