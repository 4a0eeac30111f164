"""What the allocator says about itself, beside ``torch.cuda.memory_stats()``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import _core
from .allocator import _untyped, is_enabled

if TYPE_CHECKING:
    import torch

__all__ = ["memory_stats"]


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Figures of uses and gates on a device; None: the current device.

    What has completed is found out first, so that it counts no more. Since the
    process began:

    - ``gates_issued``: waits that were put on streams, so that memory could be
      reused earlier;
    - ``gates_skipped``: waits that were not needed, because the stream waited
      for that point or a later one already;
    - ``loans``: blocks that were handed out on another stream than their own;
    - ``events_created``: in a steady loop this stands still;
    - ``captured_uses``: marks inside captures, of memory from outside them;
    - ``captured_frees``: frees of memory so marked, which replays may still read.

    At this moment:

    - ``uses_pending``: uses that memory still owes, live memory included;
    - ``bytes_pending``: bytes that were freed and still owe a use;
    - ``blocks_held``: freed blocks with a use that no event stands for; they
      come back when the device was synchronised;
    - ``events_alive``: events that exist, in use or in the pool;
    - ``metadata_bytes``: host memory of the allocator's own records.

    All are 0 while PyTorch does not run on esper_alloc, or has not used CUDA.

    Raises:
        ValueError: there is no such device.
    """
    if not is_enabled() or not _untyped(sys.modules["torch"]).cuda.is_initialized():
        return dict.fromkeys(_core.COUNTERS, 0)
    return _core.counters(_index(device))


def _index(device: torch.device | str | int | None) -> int:
    from torch.cuda._utils import _get_device_index

    return int(_untyped(_get_device_index)(device, optional=True))
