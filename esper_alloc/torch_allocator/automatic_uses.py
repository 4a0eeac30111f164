"""Automatic uses where PyTorch's operators do not show them.

The compiled half sees every operator (csrc/torch/automatic/automatic.h). Compiled graphs and
Triton kernels are launched beside the operators, so their arguments are noted here,
just before the launch; a stream that only Python knows of is announced.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..installation.import_watch import when_imported
from ..installation.pytorch import untyped

_Note = Callable[[Any], None]


def _before(owner: Any, name: str, first: Callable[..., None]) -> None:
    """Lets ``owner.name`` call `first` with its arguments before it does its work."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _note_graph_inputs(note: _Note, output_code: Any) -> None:
    """Of what Inductor makes: forward and backward graphs, in Python or in C++."""

    def note_inputs(self: Any, inputs: Any) -> None:
        note(inputs)

    for kind in (output_code.CompiledFxGraph, output_code.CompiledAOTI):
        _before(kind, "__call__", note_inputs)


def _tensors_behind(argument: Any) -> Any:
    """A Triton descriptor, or a tensor with another type, has its tensor as `base`. Tuples and
    lists may have some of them."""
    import torch

    if isinstance(argument, torch.Tensor):
        return argument
    if isinstance(argument, (tuple, list)):
        return [_tensors_behind(one) for one in argument]
    return getattr(argument, "base", None)


def _note_kernel_arguments(note: _Note, jit: Any) -> None:
    def note_arguments(self: Any, *args: Any, **kwargs: Any) -> None:
        note(_tensors_behind([*args, *kwargs.values()]))

    _before(jit.JITFunction, "run", note_arguments)


def _note_growing_storages(note: _Note, torch: Any) -> None:
    """``storage.resize_(n)`` copies to new memory on the current stream, and is no operator."""

    def note_old(self: Any, size: int, *_: Any, **__: Any) -> None:
        if size and self.device.type == "cuda" and self.nbytes():
            with torch._C._DisableTorchDispatch():  # a mode would make a fake tensor
                note([torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)])

    _before(torch.UntypedStorage, "resize_", note_old)


def _announce_external_streams(observe_now: Callable[[], None], streams: Any) -> None:
    """Those of PyTorch's pools have odd ids, and the default stream has 0."""
    make = streams.Stream.__new__

    @functools.wraps(make)
    def make_announced(*args: Any, **kwargs: Any) -> Any:
        if "stream_ptr" in kwargs or (kwargs.get("stream_id") or 1) % 2 == 0:
            observe_now()
        return make(*args, **kwargs)

    streams.Stream.__new__ = make_announced


def _teach(what: str, teach: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        teach(module)
    except Exception as error:
        import torch

        warnings.warn(
            f"esper_alloc cannot see the uses of {what} of torch {torch.__version__} "
            f"({type(error).__name__}: {error}): call esper_alloc.touch() before them.",
            RuntimeWarning,
            stacklevel=2,
        )


def before_launches(note: _Note) -> None:
    """Lets what is launched beside the operators call ``note([...])`` with its tensors first."""
    for what, module, teach in (
        ("compiled graphs", "torch._inductor.output_code", _note_graph_inputs),
        ("Triton kernels", "triton.runtime.jit", _note_kernel_arguments),
    ):
        when_imported(module, functools.partial(_teach, what, functools.partial(teach, note)))


_installed = False


def install(compiled: Any) -> None:
    """Called when automatic uses are turned on; `compiled` is the compiled half, which
    ignores the notes while they are off."""
    global _installed
    if _installed:
        return
    _installed = True
    import torch

    _announce_external_streams(compiled.observe_now, untyped(torch.cuda))
    _note_growing_storages(compiled.note_uses, torch)
    before_launches(compiled.note_uses)
