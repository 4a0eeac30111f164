"""Whose memory a tensor lives in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .containers import tensors_in

if TYPE_CHECKING:
    import torch

#: Where graphs run.
DEVICE = "cuda"


def storages(tensor: torch.Tensor) -> list[int]:
    """Where the storages begin that a CUDA tensor lives in; [] for others."""
    import torch

    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        parts = [part for part in parts if isinstance(part, torch.Tensor)]
        return [one for part in parts for one in storages(part)]
    if tensor.device.type != DEVICE:
        return []
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return [one for part in parts for one in storages(part)]
    if tensor.layout != torch.strided:
        return storages(tensor.detach().values())
    try:
        return [tensor.untyped_storage().data_ptr()]
    except NotImplementedError:  # inside vmap and the like: no memory to copy
        return []


def is_among(known: frozenset[int], tensor: torch.Tensor) -> bool:
    return any(one in known for one in storages(tensor))


class Elsewhere:
    """Is a CUDA tensor neither an argument nor a parameter, nor a view of one?"""

    def __init__(self, arguments: Any, function: Any) -> None:
        import torch

        known = list(tensors_in(arguments))
        if isinstance(function, torch.nn.Module):
            known += [*function.parameters(), *function.buffers()]
        self._known = frozenset(one for x in known for one in storages(x))

    def __call__(self, tensor: torch.Tensor) -> bool:
        found = storages(tensor)
        return bool(found) and not any(x in self._known for x in found)
