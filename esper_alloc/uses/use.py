"""Marking the end of use: :func:`record_use` and the scoped :class:`using`.

Lifetime is not order: a mark keeps memory from being reused too early, it does
not make the marked stream wait for the stream that produced the data.
:class:`using` does both.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..installation.files import library_path
from ..installation.pytorch import UnavailableError, load_shim, untyped
from ..torch_allocator.enabling import is_current, pluggable_allocator
from . import teaching, tracing
from .containers import check_scope, find_tensors
from .streams import check_event, check_stream, is_cpu_stream

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVarTuple, Unpack

    Several = TypeVarTuple("Several")

__all__ = ["record_use", "touch", "using"]

_T = TypeVar("_T")


def _load_compiled() -> Any | None:
    """The compiled half of this module, where this torch has one."""
    try:
        return load_shim()
    except UnavailableError:
        return None


_compiled: Any | None = _load_compiled()


def _document(compiled: Any, written: Callable[..., None]) -> None:
    """Gives a compiled function the docstring and signature of the one in Python."""
    if not compiled.__doc__ and written.__doc__:  # it can be given one only once
        import torch

        signature = inspect.signature(written)
        bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        line = f"{written.__name__}{inspect.Signature(bare)}"
        untyped(torch._C)._add_docstr(compiled, f"{line}\n--\n\n{inspect.getdoc(written)}\n")


def record_use(
    tensors: Any,
    stream: torch.Stream | None = None,
    *,
    event: torch.Event | torch.cuda.Event | None = None,
) -> None:
    """Marks the end of use of `tensors` on `stream`, now.

    Call it right after the last operation that reads or writes `tensors` was
    enqueued on `stream`: from then on `tensors` may be dropped on any stream
    and any thread, and their memory is reused no earlier than the GPU passes
    this point. Called *before* the last read it protects nothing of what
    follows; ``record_stream`` is different there, so do not swap one name for
    the other.

    Marks accumulate, one for each stream. On the stream that a tensor was
    allocated on a mark does nothing: that stream's order protects the memory.

    Where grad mode is off, as under ``torch.no_grad()`` and in inference mode,
    the use ends at the call. In grad mode, and in backward, it lasts until the
    memory is freed: autograd may have saved the tensor, and backward reads it
    on the same stream later. With `event` it always ends at the event.

    In the ``forward`` of a custom autograd function PyTorch turns grad mode off.
    Mark a tensor that is saved there for backward again in ``backward``, or mark
    it with ``record_stream``.

    Args:
        tensors: a tensor, or lists, tuples, dicts, sets and dataclasses of
            them to any depth. A view stands for its whole storage. In a container
            ``None``, numbers and strings are skipped.
        stream: where the use was; None, or a ``torch.cpu.Stream``: the current
            stream of each tensor's device.
        event: an event that was recorded right after the last use, in place
            of one that this call would record on `stream`.

    In a compiled function, and wherever else PyTorch traces, the call becomes an
    operator; ``python -m esper_alloc docs uses`` says what is different there.

    Memory of another allocator gets ``record_stream``, or with `event` a use that
    ends there; CPU tensors need nothing; tensors of other devices get their own
    ``record_stream``.

    Raises:
        TypeError: `tensors` is neither tensor nor container, `stream` is no stream,
            or `event` no event.
        ValueError: `event` was never recorded.

    Example::

        with torch.cuda.stream(side):
            total = x.sum()
        esper_alloc.record_use(x, side)  # right after the last read
        del x
    """
    check_stream(stream)
    if event is not None:
        check_event(event)
    if is_cpu_stream(stream):
        stream = None
    _mark(tensors, stream, event)


if _compiled is not None and not TYPE_CHECKING:
    _python_record_use = record_use
    # Compiled: as fast as Tensor.record_stream.
    record_use = _compiled.record_use
    _document(record_use, _python_record_use)


def touch(tensors: Any, stream: torch.Stream | None = None) -> None:
    """Notes that work on `stream` uses `tensors`, until they are freed.

    For work that automatic uses do not see (``python -m esper_alloc docs automatic`` lists
    it): kernels that are launched through ctypes or an extension, consumers of DLPack. It may
    come before or after the work is enqueued, as long as `tensors` are held. Works without
    automatic uses too: it is ``record_stream`` for anything that :func:`record_use` takes.

    Args:
        tensors: as for :func:`record_use`.
        stream: where they are used; None, or a ``torch.cpu.Stream``: the current stream
            of each tensor's device.

    Raises:
        TypeError: `tensors` is neither tensor nor container, or `stream` is no stream.

    Example::

        launch_kernel(x.data_ptr(), side.cuda_stream)
        esper_alloc.touch(x, side)
    """
    check_stream(stream)
    if is_cpu_stream(stream):
        stream = None
    if _compiled is not None:
        _compiled.touch(tensors, stream)
        return
    found: list[torch.Tensor] = []
    find_tensors(tensors, found)
    for tensor in found:
        _record_stream(tensor, stream)


class using:
    """A scope that uses tensors on another stream.

    ::

        with esper_alloc.using(x, stream=side) as scope:
            y = f(x)              # enqueued on side, after x was produced
        del x                     # safe, at any time
        y = scope.take(y)         # when the current stream needs the result

    Entering makes `stream` wait for the current stream and makes it current.
    Leaving, exceptions included, marks `tensors` as :func:`record_use` does
    and restores the stream: where grad mode is off, the use ends there, else it
    lasts until the memory is freed. Scopes nest, and one object can be entered
    again, by the thread that made it: another thread needs one of its own.

    What is made inside belongs to `stream`: to use it elsewhere, :meth:`take`
    it.

    Args:
        tensors: what the scope uses, as for :func:`record_use`.
        stream: where; None: the current stream, which then waits for nothing.

    Raises:
        TypeError: `stream` is no stream, a stream is among `tensors`, or one of them
            is neither tensor nor container.
    """

    __slots__ = ("_entered", "_made_on", "_stream", "_tensors")

    def __init__(self, *tensors: Any, stream: torch.Stream | None = None) -> None:
        check_stream(stream)
        check_scope(tensors)
        self._tensors = tensors
        self._stream = stream
        self._entered: list[_Entered] = []
        #: What :meth:`take` waits for.
        self._made_on: torch.Stream | None = stream

    def __enter__(self) -> using:
        entered = _enter(self._stream, self._tensors)
        self._entered.append(entered)
        if self._stream is None:
            self._made_on = entered.current
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._entered:
            raise RuntimeError("a scope of using() is left, but was not entered")
        self._entered.pop().leave(self._tensors)

    @overload
    def take(self, tensors: _T, /) -> _T: ...
    @overload
    def take(self, *tensors: Unpack[Several]) -> tuple[Unpack[Several]]: ...
    def take(self, *tensors: Unpack[Several]) -> Any:
        """Makes the current stream wait for the scope's stream, and protects
        `tensors` on it until they are freed. Where the scope's stream is on
        another device, the same goes for the stream that is current there.

        Returns:
            the tensors: the one, or a tuple of several.

        Raises:
            RuntimeError: the scope's own stream is current, because its block is not
                over. That stream would not wait for itself.
        """
        if self._entered and self._entered[-1].is_current():
            raise RuntimeError(
                "take() inside the scope makes no other stream wait: call it after the `with` block"
            )
        if self._made_on is not None:
            _hand_over(tensors, self._made_on)
        taken: tuple[Any, ...] = tensors
        return taken[0] if len(taken) == 1 else taken


# Entering and leaving streams


class _Entered:
    """One entry into a scope whose stream is the current one anyway."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        torch = untyped(sys.modules.get("torch"))
        running = torch is not None and torch.cuda.is_initialized()
        self.current = torch.cuda.current_stream() if running else None

    def leave(self, tensors: tuple[Any, ...]) -> None:
        record_use(tensors)

    def is_current(self) -> bool:
        """Whether the scope's stream is current and will not be after it, as far as is known."""
        return False


class _EnteredCompiled(_Entered):
    __slots__ = ("_compiled", "_state", "_stream")

    def __init__(self, native: Any, stream: torch.Stream) -> None:
        self._compiled = native
        self._stream = stream
        self._state = native.enter_stream(stream)

    def leave(self, tensors: tuple[Any, ...]) -> None:
        self._compiled.leave_stream(tensors, self._stream, self._state)

    def is_current(self) -> bool:
        torch = untyped(sys.modules["torch"])
        current = torch.cuda.current_stream(self._stream.device)
        _, outer_id, outer_device = self._state
        outer = outer_id, outer_device
        return current == self._stream and outer != (current.stream_id, current.device_index)


class _EnteredGeneric(_Entered):
    """For devices other than CUDA, and for a torch without the shim."""

    __slots__ = ("_context", "_module", "_outer", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        import torch

        self._module = torch.get_device_module(stream.device)
        self._stream = stream
        self._outer = self._module.current_stream()
        stream.wait_stream(self._outer)
        self._context = self._module.stream(stream)
        self._context.__enter__()

    def leave(self, tensors: tuple[Any, ...]) -> None:
        try:
            _mark(tensors, self._stream)
        finally:
            self._context.__exit__(None, None, None)

    def is_current(self) -> bool:
        current = self._module.current_stream(self._stream.device)
        return bool(current == self._stream and current != self._outer)


def _enter(stream: torch.Stream | None, tensors: tuple[Any, ...]) -> _Entered:
    """Enters `stream`, for a scope that uses `tensors` (which tracing needs)."""
    if stream is None or is_cpu_stream(stream):
        return _Entered()
    if _compiled is not None and stream.device.type == "cuda":
        return _EnteredCompiled(_compiled, stream)
    return _EnteredGeneric(stream)


def _hand_over(tensors: tuple[Any, ...], stream: torch.Stream) -> None:
    if is_cpu_stream(stream):
        return
    if _compiled is not None and stream.device.type == "cuda":
        _compiled.hand_over(tensors, stream)
        return
    import torch

    module = torch.get_device_module(stream.device)
    found: list[torch.Tensor] = []
    for value in tensors:
        find_tensors(value, found)
    for current in {module.current_stream(), module.current_stream(stream.device)}:
        current.wait_stream(stream)
        for tensor in found:
            _record_stream(tensor, current)


# Marking what the compiled half hands back


def mark_others(
    tensors: list[torch.Tensor],
    stream: torch.Stream | None,
    event: torch.Event | torch.cuda.Event | None,
    until_free: bool,
) -> None:
    """Marks tensors that PyTorch has to see, and those of other devices.

    While a dispatch mode is active these are all; else functorch's wrappers and
    subclasses that do not say what they hold. A subclass that does not know the
    operator gets ``record_stream``, which most know.
    """
    for tensor in tensors:
        try:
            if tensor.device.type == "cuda":
                tracing.mark([tensor], stream, event, until_free)
            else:
                _record_stream(tensor, stream)
        except (NotImplementedError, TypeError):
            _record_stream_if_known(tensor, stream, event)


def _record_stream_if_known(
    tensor: torch.Tensor,
    stream: torch.Stream | None,
    event: torch.Event | torch.cuda.Event | None,
) -> None:
    if stream is None and event is not None:
        stream = _stream_behind(event, tensor.device)
    try:
        _record_stream(tensor, stream)
    except TypeError:  # every __torch_dispatch__ returned NotImplemented
        pass


# Marking without the shim


def _mark(
    tensors: Any,
    stream: torch.Stream | None,
    event: torch.Event | torch.cuda.Event | None = None,
) -> None:
    found: list[torch.Tensor] = []
    find_tensors(tensors, found)
    for tensor in found:
        if tensor.device.type == "cuda":
            _mark_cuda(tensor, stream, event)
        else:
            _record_stream(tensor, stream)


def _mark_cuda(
    tensor: torch.Tensor,
    stream: torch.Stream | None,
    event: torch.Event | torch.cuda.Event | None,
) -> None:
    import torch

    if event is not None and stream is None:
        stream = _stream_behind(event, tensor.device)
    if stream is None:
        stream = torch.cuda.current_stream(tensor.device)
    # Autograd may read it later: see autograd_may_read() in csrc/torch/uses/marking.h.
    may_be_read = torch.is_grad_enabled() or untyped(torch)._C._current_graph_task_id() != -1
    ends_here = event is None and not may_be_read
    if not (ends_here and _mark_through_library(tensor, stream)):
        _record_stream(tensor, stream)


def _mark_through_library(tensor: torch.Tensor, stream: Any) -> bool:
    """Marks memory of the pluggable allocator; False: it is not."""
    if pluggable_allocator.cache_info().currsize == 0 or not is_current(pluggable_allocator()):
        return False
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper's memory is elsewhere
        return False
    return bool(
        _library().esper_alloc_record_use(
            ctypes.c_void_p(storage.data_ptr()),
            ctypes.c_void_p(stream.cuda_stream),
        )
        == 0
    )


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(library_path())


@functools.cache
def _waiting_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    stream: torch.cuda.Stream = untyped(torch.cuda).Stream(device)
    return stream


def _stream_behind(event: torch.Event | torch.cuda.Event, device: torch.device) -> torch.Stream:
    """A stream that ends with `event`, for allocators that know no events."""
    stream = _waiting_stream(device)
    stream.wait_event(event)
    return stream


def _record_stream(tensor: torch.Tensor, stream: torch.Stream | None) -> None:
    """The tensor's own record_stream, where its device has one."""
    import torch

    if stream is None:
        module = torch.get_device_module(tensor.device)
        current_stream = getattr(module, "current_stream", None)
        if current_stream is None:
            return
        stream = current_stream(tensor.device)
    try:
        tensor.record_stream(stream)
    except NotImplementedError:
        pass


_calls = teaching.Calls(record_use, touch, _enter, _hand_over)
if _compiled is not None:
    teaching.install(_calls)
else:
    teaching.install_breaks(_calls)
