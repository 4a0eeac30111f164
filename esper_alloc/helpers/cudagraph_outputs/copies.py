"""Copies of tensors, which gradients pass and which share memory as the originals do."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ...installation.pytorch import untyped

if TYPE_CHECKING:
    import torch


def copies_of(
    found: dict[int, torch.Tensor],
) -> tuple[dict[int, torch.Tensor], int]:
    """A copy of each, by identity, and how many bytes were copied."""
    copies: dict[int, torch.Tensor] = {}
    copied = 0
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in found.values():
        if _is_plain(tensor):
            start = tensor.untyped_storage().data_ptr()
            sharing.setdefault(start, []).append(tensor)
        else:
            copies[id(tensor)], size = copy_of(tensor)
            copied += size
    for tensors in sharing.values():
        if len(tensors) == 1:
            copies[id(tensors[0])], size = copy_of(tensors[0])
        else:
            size = _copy_sharing(tensors, copies)
        copied += size
    return copies, copied


def _is_plain(tensor: torch.Tensor) -> bool:
    """Can it be rebuilt from its storage, sizes and strides alone?"""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def copy_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A copy, through which gradients flow; what expand() repeats is copied
    once and expanded again."""
    import torch

    thin = tensor
    if tensor.layout == torch.strided and tensor.numel() > 0:
        for dimension in range(tensor.dim()):
            if tensor.stride(dimension) == 0 and tensor.shape[dimension] > 1:
                thin = thin.narrow(dimension, 0, 1)
    if torch.is_grad_enabled() and thin.requires_grad:
        kept = _clone_and_hold(thin)
    else:
        kept = thin.clone()
    size = thin.numel() * thin.element_size()
    return (kept if thin is tensor else kept.expand(tensor.shape)), size


def _clone_and_hold(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose backward, as long as it is pending, holds the original.

    What the graph saved for its backward must not be overwritten before. PyTorch
    knows by who holds the graph's tensors from Python, and in some versions by
    nothing else (2.11; not 2.15); of a copied output nobody would.
    """
    import torch

    # In a list: held from Python. Autograd drops it when it frees its buffers.
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda original: [original], lambda held: held[0]
    )
    with hooks:
        kept: torch.Tensor = untyped(_clone_function()).apply(tensor)
    return kept


@functools.cache
def _clone_function() -> Any:
    import torch

    class CloneAndHold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(tensor)
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    return CloneAndHold


#: Views of one storage may differ in dtype: none is wider than complex128.
_ALIGNMENT = 16


def _copy_sharing(tensors: list[torch.Tensor], copies: dict[int, torch.Tensor]) -> int:
    """Copies tensors of one storage, which share the new one as they do now."""
    import torch

    spans = [_span(tensor) for tensor in tensors]
    first = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    end = max(end for _, end in spans)
    storage = tensors[0].untyped_storage()
    device = tensors[0].device
    piece = torch.empty(0, dtype=torch.uint8, device=device)
    piece.set_(storage, first, (end - first,), (1,))
    kept = piece.clone().untyped_storage()
    for tensor in tensors:
        offset = tensor.storage_offset() - first // tensor.element_size()
        anew = torch.empty(0, dtype=tensor.dtype, device=device)
        anew.set_(kept, offset, tensor.shape, tensor.stride())
        copies[id(tensor)] = anew
    return end - first


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that it uses, and the one after the last."""
    size = tensor.element_size()
    last = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = int(tensor.storage_offset())
    return first * size, (first + int(last) + 1) * size
