"""What the allocator is told about streams."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..torch_allocator.enabling import is_enabled
from . import use
from .streams import check_stream, checked_bool, is_cpu_stream

if TYPE_CHECKING:
    import torch

__all__ = ["set_stream_traits"]


def set_stream_traits(stream: torch.Stream, *, rendezvous: bool) -> None:
    """Sets the traits of all work on `stream`, in place of earlier ones.

    Args:
        stream: a ``torch.cuda.Stream``.
        rendezvous: True: the work may wait for something that is not enqueued yet,
            here or on another rank: sends and receives, collectives, kernels
            that spin on a flag. No other stream is then ever made to wait for
            `stream`, as if each use on it were marked with ``gate=False``; memory that
            it uses can be reused once the GPU has passed the mark. Set it for
            communication streams that use marked memory. Do not set it for a stream
            whose work completes by itself: without it, its memory is reused sooner.

    Does nothing while PyTorch does not run on esper_alloc. On
    :func:`pluggable_allocator` it needs the PyTorch part that is built for this torch;
    if that is missing, a warning says so.

    Raises:
        TypeError: `stream` is no stream of a CUDA device, or `rendezvous` is not a bool.
    """
    check_stream(stream, "a torch.cuda.Stream")
    if stream is None:
        raise TypeError("stream must be a torch.cuda.Stream, not NoneType")
    kind = "cpu" if is_cpu_stream(stream) else stream.device.type
    if kind != "cuda":
        raise TypeError(f"stream must be a torch.cuda.Stream, not a stream of device type {kind}")
    rendezvous = checked_bool("rendezvous", rendezvous)
    if use._compiled is not None:
        use._compiled.set_stream_traits(stream, rendezvous)
    elif is_enabled():
        warnings.warn(
            "esper_alloc cannot be told of a stream's traits without its PyTorch "
            "part: when memory runs short, streams may be made to wait for that "
            "stream. `python -m esper_alloc doctor` says why the part is missing.",
            RuntimeWarning,
            stacklevel=2,
        )
