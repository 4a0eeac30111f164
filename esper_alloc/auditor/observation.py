"""What the auditor's compiled half (csrc/torch/auditor/auditor.h) cannot see by itself: CUDA
graphs, queries, kernels beside the operators, and memory from before the audit."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

from ..installation.pytorch import untyped
from ..torch_allocator.automatic_uses import before_launches

#: Files that are not the user's, besides those of torch and this package.
_STANDARD = ("contextlib", "functools", "runpy", "threading")
_THIRD_PARTY = ("triton", "pytest", "_pytest", "pluggy")


def foreign_folders() -> list[str]:
    """Beginnings of the names of files that are not the user's."""
    import torch

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [package, os.path.dirname(torch.__file__)]
    files = []
    for name in (*_STANDARD, *_THIRD_PARTY):
        try:
            file = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
        except (AttributeError, ImportError, ValueError):
            continue
        if file and os.path.basename(file) == "__init__.py":
            folders.append(os.path.dirname(file))
        elif file:
            files.append(file)
    # What Inductor generates for the user's functions.
    generated = os.path.join(tempfile.gettempdir(), "torchinductor_")
    return [*(folder + os.sep for folder in folders), *files, generated]


def tell_what_is_live(compiled: Any) -> None:
    """All that came before the audit counts as over, and its memory as known."""
    import torch

    if not untyped(torch.cuda).is_initialized():
        return
    for segment in untyped(torch.cuda).memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                compiled.audit_known(
                    block["address"], block["size"], segment["device"], segment["stream"]
                )
    compiled.audit_all_done(torch.cuda.device_count())


def _after(owner: Any, name: str, then: Callable[[Any, Any], None]) -> None:
    """Lets ``owner.name`` call ``then(self, result)`` after it has done its work."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self, result)
        return result

    setattr(owner, name, call)


def _leave_to_pytorch(compiled: Any, owner: Any, name: str) -> None:
    """Lets the audit ignore what ``owner.name`` itself enqueues: PyTorch writes the state of random
    number generators on the stream that captures, and later on those that replay."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiled.audit_leave_to_pytorch(True)
        try:
            return original(*args, **kwargs)
        finally:
            compiled.audit_leave_to_pytorch(False)

    setattr(owner, name, call)


def _watch_graphs(compiled: Any, kind: Any) -> None:
    for name in ("capture_begin", "replay"):
        _leave_to_pytorch(compiled, kind, name)
    end = kind.capture_end

    @functools.wraps(end)
    def capture_end(self: Any) -> Any:
        done = False
        try:
            result = end(self)
            done = True
            return result
        finally:
            compiled.audit_capture_ended(id(self) if done else 0)

    kind.capture_end = capture_end
    _after(kind, "capture_begin", lambda graph, _: compiled.audit_capture_began())
    _after(kind, "replay", lambda graph, _: compiled.audit_replayed(id(graph)))
    _after(kind, "reset", lambda graph, _: compiled.audit_graph_gone(id(graph)))


def _watch_queries(compiled: Any, cuda: Any) -> None:
    def event_asked(event: Any, done: bool) -> None:
        if done:
            compiled.audit_waited(event.cuda_event)

    def stream_asked(stream: Any, done: bool) -> None:
        if done:
            compiled.audit_waited_stream(stream.device_index, stream.cuda_stream)

    _after(cuda.Event, "query", event_asked)
    _after(cuda.Stream, "query", stream_asked)


@functools.cache
def install(compiled: Any) -> None:
    """Called at the first audit. What it installs does nothing while none is running."""
    import torch

    _watch_graphs(compiled, untyped(torch.cuda).CUDAGraph)
    _watch_queries(compiled, untyped(torch.cuda))
    before_launches(compiled.audit_launch)
