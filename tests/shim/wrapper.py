"""Ways for an operator to get a tensor, for programs on the simulated device: a subclass around it,
inference mode, another thread."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Wrapper(torch.Tensor):
    """Passes every operator on to the tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(args[0].inner, *args[1:])


def in_inference(x: torch.Tensor) -> None:
    with torch.inference_mode():
        x.zero_()


def in_thread(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    def body() -> None:
        with torch.cuda.stream(stream):
            x.zero_()

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
