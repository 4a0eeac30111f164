"""Who can reach a marked tensor's memory: what alone.py and reached.py share.

Each of them is a program for the simulated device or a GPU. In each of its cases, in grad mode and
without kernels, one tensor is marked, or several over one storage; it prints {case: [kinds of the
uses that the memory then owes, reasons why a mark lasts until the free]}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

if "ESPER_SIMULATED" in os.environ:
    import simulated
import torch

import esper_alloc
from esper_alloc.torch_allocator import lasting_marks

N = 1 << 20
#: Whether the stack shows that the forward of a custom function runs: not from PyTorch 2.14 on.
FORWARD_IS_SEEN = hasattr(torch.autograd.Function.apply, "__func__")
KEPT: list[Any] = []  #: what others hold
CASES: dict[str, Callable[[], Any]] = {}
_streams: list[torch.cuda.Stream] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """A case returns a tensor over the marked memory, or kinds()."""
    CASES[function.__name__] = function
    return function


def case_where(holds: bool) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A case where this holds."""
    return case if holds else lambda function: function


def side() -> torch.cuda.Stream:
    """The stream that reads, which is at work."""
    return _streams[-1]


def empty(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(*(shape or (N,)), device="cuda", requires_grad=requires_grad)


def gathered() -> torch.Tensor:
    """As a sharded layer's weight: what made it does not save it."""
    shards = [torch.nn.Parameter(empty(N // 2)) for _ in range(2)]
    return torch.cat(shards)


def kinds(x: torch.Tensor | int) -> list[str]:
    """The kinds of the uses that the memory behind x, or at that address, owes."""
    address = x if isinstance(x, int) else x.untyped_storage().data_ptr()
    return [
        entry["kind"]
        for entry in torch.cuda.memory._snapshot()["external_annotations"]
        if entry.get("name") == "esper_alloc.use" and int(entry["address"]) == address
    ]


def run_script(code: str) -> list[str]:
    """The kinds of the uses that the script's variable x owes. It is a part of its caller's file."""
    names: dict[str, Any] = {"empty": empty, "mark": esper_alloc.record_use, "side": side}
    exec(compile(code, sys._getframe(1).f_code.co_filename, "exec"), names)
    return kinds(names["x"])


def keep_busy(stream: torch.cuda.Stream) -> None:
    """So that no use on it is over before it was looked at."""
    if "ESPER_SIMULATED" in os.environ:
        simulated.work(stream)
    else:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(1e9))


def main() -> None:
    if "ESPER_SIMULATED" not in os.environ:
        esper_alloc.enable()
        gathered()  # loading a kernel waits for the GPU
    esper_alloc.install_tensor_method()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, function in CASES.items():
        _streams.append(torch.cuda.Stream())
        keep_busy(side())
        esper_alloc.warn_about_marks()
        try:
            x = function()
            found[name] = x if isinstance(x, list) else kinds(x), list(lasting_marks.lines())[1:]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        KEPT.clear()
        x = None
    print(json.dumps(found))
