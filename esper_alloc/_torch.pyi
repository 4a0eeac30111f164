"""The PyTorch side of esper_alloc: the allocator and the marking of tensors."""

from types import MethodDescriptorType
from typing import Any

import torch

def allocator() -> torch._C._cuda_CUDAAllocator: ...
def is_current() -> bool: ...
def built_for() -> str: ...
def record_use(
    tensors: Any,
    stream: torch.Stream | None = None,
    *,
    event: torch.Event | torch.cuda.Event | None = None,
    gate: bool = True,
) -> None: ...
def make_tensor_method(
    tensor_class: type[torch.Tensor], /
) -> MethodDescriptorType: ...
def enter_stream(stream: torch.Stream, /) -> tuple[int, int, int, int]: ...
def leave_stream(
    tensors: tuple[Any, ...],
    stream: torch.Stream,
    state: tuple[int, int, int, int],
    /,
) -> None: ...
def hand_over(tensors: tuple[Any, ...], stream: torch.Stream, /) -> None: ...
