"""Data sets on devices: once for each, whoever iterates."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from typing import Any

from .columns import Rows
from .transform import is_channels_last

with suppress(ImportError):
    import torch


class Resident:
    """The columns of a data set on one device, dense, for as long as somebody
    iterates over them."""

    def __init__(self, sources: Rows, tensors: Rows) -> None:
        self.sources = sources  # alive, so that their ids are theirs
        # Likewise their memory: what ``.data`` is given next could lie at the same address.
        self.memory = tuple(x.detach() for x in sources)
        self.tensors = tensors
        self.streams: set[int] = set()  # those that read them


_residents: weakref.WeakValueDictionary[Any, Resident] = weakref.WeakValueDictionary()
_residents_lock = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: the thread that held the lock is not there."""
    global _residents_lock
    _residents_lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def resident(sources: Rows, device: torch.device) -> Resident:
    """`sources` on `device`: themselves where they are there, else one copy for all
    iterators."""
    if any(x.is_inference() for x in sources):  # nobody sees when such tensors are written
        return Resident(sources, tuple(_dense(x, device) for x in sources))
    key = (device, *map(_identity, sources))
    # Held while copying: whoever comes second waits for the first one's copy.
    with _residents_lock:
        found = _residents.get(key)
        if found is None:
            found = Resident(sources, tuple(_dense(x, device) for x in sources))
            _residents[key] = found
        return found


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    """Another one after a write, and after ``x.data = y``, which leaves the version as it was."""
    return id(x), x._version, x.data_ptr(), tuple(x.shape), x.stride(), x.dtype


def _dense(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        # Kernels and copies by address know nothing of a conjugation to be done.
        there = x.detach().to(device).resolve_conj().resolve_neg()
        return there if is_channels_last(there) else there.contiguous()
