"""Which CUDA device an argument names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["check_device_name", "device_index"]

_NAME = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")


def device_index(device: torch.device | str | int | None) -> int:
    """The index of a CUDA device of this process. None, and a device without an index: the
    current one, for which CUDA is initialised.

    Raises:
        TypeError: `device` is neither index, name nor torch.device.
        ValueError: this process has no such CUDA device.
    """
    import torch

    index = _index_in(device)
    if index is None:
        return torch.cuda.current_device()
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"there is no CUDA device {index}; this process sees {count}")
    return index


def check_device_name(device: torch.device | str | int | None) -> None:
    """Raises as :func:`device_index` for what never names a CUDA device. Needs no CUDA: how many
    devices there are is not asked."""
    index = _index_in(device)
    if index is not None and index < 0:
        raise ValueError(f"there is no CUDA device {index}")


def _index_in(device: torch.device | str | int | None) -> int | None:
    if device is None:
        return None
    is_device = type(device).__module__ == "torch" and type(device).__name__ == "device"
    if isinstance(device, bool) or not (is_device or isinstance(device, (int, str))):
        raise TypeError(
            f"device must be an index, a name such as 'cuda:0' or a torch.device, not {device!r} "
            f"({type(device).__name__})"
        )
    if isinstance(device, int):
        return device
    name = _NAME.fullmatch(str(device))
    if name is None:
        raise ValueError(f"device={str(device)!r} is no CUDA device: pass 'cuda', 'cuda:0' or 0")
    return None if name[1] is None else int(name[1])
