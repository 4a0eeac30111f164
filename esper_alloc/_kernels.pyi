"""The helpers' CUDA kernels, and the operators in front of them."""

from typing import Any, type_check_only

import torch

def built_for() -> str: ...
def runs_on(index: int, /) -> bool: ...
def normalizer_allow(index: int, /) -> None: ...
def normalizer_step(*arguments: Any) -> Any: ...
def normalizer_apply(*arguments: Any) -> Any: ...

@type_check_only
class Gatherer:
    def start(self, order: torch.Tensor | None, offset: int, seed: int, /) -> None: ...
    def gather(
        self,
        start: int,
        environments: int,
        size: int,
        larger: int,
        into: list[tuple[torch.Tensor, ...]] | None,
        /,
    ) -> tuple[list[tuple[torch.Tensor, ...]], torch.cuda.Event]: ...

def gatherer(
    columns: list[tuple[torch.Tensor, torch.Tensor | None, torch.dtype, bool, tuple[int, ...]]],
    event_type: type[torch.cuda.Event],
    /,
) -> Gatherer: ...
