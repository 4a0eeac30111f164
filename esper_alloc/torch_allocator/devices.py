"""Which CUDA device an argument names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["device_index"]


def device_index(device: torch.device | str | int | None) -> int:
    """The index of a CUDA device of this process. None, and a device without an index: the
    current one, for which CUDA is initialised.

    Raises:
        TypeError: `device` is neither index, name nor torch.device.
        ValueError: this process has no such CUDA device.
    """
    import torch

    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(
            f"device must be an index, a name such as 'cuda:0' or a torch.device, not {device!r} "
            f"({type(device).__name__})"
        )
    index = device if isinstance(device, int) else _index_in(device)
    if index is None:
        return torch.cuda.current_device()
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"there is no CUDA device {index}; this process sees {count}")
    return index


def _index_in(device: torch.device | str) -> int | None:
    import torch

    try:
        named = torch.device(device)
    except RuntimeError:  # it is no name of a device
        named = None
    if named is None or named.type != "cuda":
        raise ValueError(f"device={str(device)!r} is no CUDA device: pass 'cuda', 'cuda:0' or 0")
    return named.index
