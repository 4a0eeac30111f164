"""Marking the end of use: :func:`record_use` and the scoped :class:`using`.

Lifetime is not order: a mark keeps memory from being reused too early, it does
not make the marked stream wait for whoever produced the data. :class:`using`
does both.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from . import tracing
from .allocator import (
    UnavailableError,
    _is_current,
    _untyped,
    library_path,
    load_shim,
    pluggable_allocator,
)
from .kernels import user_stacklevel

if TYPE_CHECKING:
    import torch

__all__ = ["record_use", "using"]

_T = TypeVar("_T")


def _load_native() -> Any | None:
    """The compiled half of this module, where this torch has one."""
    try:
        return load_shim()
    except UnavailableError:
        return None


_native: Any | None = _load_native()


def record_use(
    tensors: Any,
    stream: torch.Stream | None = None,
    *,
    event: torch.Event | torch.cuda.Event | None = None,
    gate: bool = True,
) -> None:
    """Marks the end of use of `tensors` on `stream`, now.

    Call it right after the last operation that reads or writes `tensors` was
    enqueued on `stream`: from then on `tensors` may be dropped on any stream
    and any thread, and their memory is reused no earlier than the GPU passes
    this point. Called *before* the last read it protects nothing of what
    follows; ``record_stream`` is different there, so do not swap one name for
    the other.

    Marks accumulate, one for each stream. On the stream that a tensor was
    allocated on there is nothing to do, and nothing is done.

    In grad mode a tensor may have been saved for backward, which reads it on
    the same stream later. A tensor that anything but its caller holds is
    therefore protected until it is freed, as ``record_stream`` would. Under
    ``torch.no_grad()`` the mark is always exact.

    Args:
        tensors: a tensor, or lists, tuples, dicts, sets and dataclasses of
            them to any depth. A view stands for its whole storage. ``None`` and
            plain numbers and strings are skipped.
        stream: where the use was; None, or a ``torch.cpu.Stream``: the current
            stream of each tensor's device.
        event: an event that was recorded right after the last use, in place
            of one that this call would record on `stream`.
        gate: False if the work on `stream` waits for something that is not
            enqueued yet (a send whose peer answers later, a kernel that spins
            on a flag): the memory is then reused when the GPU has passed the
            mark, and no other stream is ever made to wait for it.

    In a function that is compiled, and where PyTorch traces otherwise, the call
    becomes an operator; docs/uses.md says what is different there.

    Memory of another allocator gets ``record_stream``; CPU tensors need
    nothing; tensors of other devices get their own ``record_stream``.

    Raises:
        TypeError: `tensors` is neither tensor nor container, or `stream` or
            `event` are none.
        ValueError: `event` was never recorded.
    """
    _check_stream(stream)
    if event is not None:
        _check_event(event)
    if _is_cpu_stream(stream):
        stream = None
    found: list[torch.Tensor] = []
    _gather(tensors, found)
    for tensor in found:
        if tensor.device.type == "cuda":
            _mark_cuda(tensor, stream, event, gate)
        else:
            _record_stream(tensor, stream)


if _native is not None and not TYPE_CHECKING:
    _python_record_use = record_use
    # Compiled: as fast as Tensor.record_stream. Its docstring points here.
    record_use = _native.record_use


class using:
    """A scope that uses tensors on another stream.

    ::

        with esper_alloc.using(x, stream=side) as scope:
            y = f(x)              # enqueued on side, after x was produced
        del x                     # safe, at any time
        y = scope.take(y)         # when the current stream needs the result

    Entering makes `stream` wait for the current stream and makes it current.
    Leaving, exceptions included, marks `tensors` as :func:`record_use` does
    and restores the stream. Scopes nest, and one object can be entered again, by
    the thread that made it: another thread needs one of its own.

    When autograd recorded an operation inside the scope, which then may have
    saved the tensors, they are protected until they are freed, so that a
    backward that comes later still finds them.

    What is made inside belongs to `stream`: to use it elsewhere, :meth:`take`
    it.

    Args:
        tensors: what the scope uses, as for :func:`record_use`.
        stream: where; None: the current stream, which then waits for nothing.
    """

    __slots__ = ("_tensors", "_stream", "_entered", "_made_on")

    def __init__(self, *tensors: Any, stream: torch.Stream | None = None) -> None:
        _check_stream(stream)
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
        self._entered.pop().leave(self._tensors)

    def take(self, *tensors: _T) -> _T | tuple[_T, ...]:
        """Makes the current stream wait for the scope's stream, and protects
        `tensors` on it until they are freed. Where the scope's stream is on
        another device, the same goes for the stream that is current there.

        Returns:
            the tensors: the one, or a tuple of several.
        """
        if self._made_on is not None:
            _hand_over(tensors, self._made_on)
        return tensors[0] if len(tensors) == 1 else tensors


# Entering and leaving streams


class _Entered:
    """One entry into a scope whose stream is the current one anyway."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        torch = _untyped(sys.modules.get("torch"))
        running = torch is not None and torch.cuda.is_initialized()
        self.current = torch.cuda.current_stream() if running else None

    def leave(self, tensors: tuple[Any, ...]) -> None:
        for value in tensors:
            record_use(value)


class _EnteredNative(_Entered):
    __slots__ = ("_native", "_stream", "_state")

    def __init__(self, native: Any, stream: torch.Stream) -> None:
        self._native = native
        self._stream = stream
        self._state = native.enter_stream(stream)

    def leave(self, tensors: tuple[Any, ...]) -> None:
        self._native.leave_stream(tensors, self._stream, self._state)


class _EnteredGeneric(_Entered):
    """For devices other than CUDA, and for a torch without the shim."""

    __slots__ = ("_stream", "_context", "_grad")

    def __init__(self, stream: torch.Stream) -> None:
        import torch

        module = torch.get_device_module(stream.device)
        self._stream = stream
        stream.wait_stream(module.current_stream())
        self._context = module.stream(stream)
        self._context.__enter__()

    def leave(self, tensors: tuple[Any, ...]) -> None:
        try:
            # Until the free: nodes cannot be counted from here.
            found: list[torch.Tensor] = []
            for value in tensors:
                _gather(value, found)
            for tensor in found:
                _record_stream(tensor, self._stream)
        finally:
            self._context.__exit__(None, None, None)


def _enter(stream: torch.Stream | None, tensors: tuple[Any, ...]) -> _Entered:
    """Enters `stream`, for a scope that uses `tensors` (which tracing needs)."""
    if stream is None or _is_cpu_stream(stream):
        return _Entered()
    if _native is not None and stream.device.type == "cuda":
        return _EnteredNative(_native, stream)
    return _EnteredGeneric(stream)


def _hand_over(tensors: tuple[Any, ...], stream: torch.Stream) -> None:
    if _is_cpu_stream(stream):
        return
    if _native is not None and stream.device.type == "cuda":
        _native.hand_over(tensors, stream)
        return
    import torch

    module = torch.get_device_module(stream.device)
    found: list[torch.Tensor] = []
    for value in tensors:
        _gather(value, found)
    for current in {module.current_stream(), module.current_stream(stream.device)}:
        current.wait_stream(stream)
        for tensor in found:
            _record_stream(tensor, current)


def _is_cpu_stream(stream: Any) -> bool:
    """torch.cpu.Stream stands in for a stream and does nothing."""
    return type(stream).__module__.startswith("torch.cpu")


def _check_stream(stream: Any, wanted: str = "a torch.cuda.Stream or None") -> None:
    if stream is None or _is_cpu_stream(stream):
        return
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(stream, torch.Stream):
        raise TypeError(f"stream must be {wanted}, not {type(stream).__name__}")


def _check_event(event: Any) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(event, torch.Event):
        raise TypeError(f"event must be a torch.cuda.Event or None, not {type(event).__name__}")
    if isinstance(event, torch.cuda.Event) and not event.cuda_event:
        raise ValueError(
            "event was not recorded yet: call event.record(stream) right after "
            "the last read, then pass it"
        )


# Containers


def _children(value: Any) -> tuple[Any, ...] | None:
    """What a container other than list and tuple holds; None for a leaf."""
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, (str, bytes, bytearray, memoryview, range)):
        return None
    if isinstance(value, (Set, Sequence, ValuesView)):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
    return None


_PLAIN_TYPES = (bool, int, float, complex, str, bytes, bytearray, type)
_PLAIN_PACKAGES = frozenset(("builtins", "datetime", "decimal", "enum", "numpy", "pathlib"))
#: Where torch has its types that hold no tensors: dtypes, devices, streams.
_PLAIN_MODULES = frozenset(("torch", "torch._C", "torch.cuda.streams"))


def _pass_over(leaf: Any) -> None:
    """Skips something inside a container that is no tensor.

    A tensor inside it would go unprotected, so unless it certainly holds none
    its type is named in a warning, once.
    """
    _pass_over_type(type(leaf))


def _pass_over_type(kind: type) -> None:
    if kind is type(None) or issubclass(kind, _PLAIN_TYPES):
        return
    module = kind.__module__
    plain = module.partition(".")[0] in _PLAIN_PACKAGES or module in _PLAIN_MODULES
    if not plain or issubclass(kind, Iterator):
        _warn_of(kind)


_warned_of: set[type] = set()


def _warn_of(kind: type) -> None:
    if kind in _warned_of:
        return
    _warned_of.add(kind)
    warnings.warn(
        f"esper_alloc does not look for tensors inside {kind.__module__}."
        f"{kind.__qualname__}: if it holds some, pass those.",
        RuntimeWarning,
        stacklevel=user_stacklevel(),
    )


def _gather(argument: Any, found: list[torch.Tensor]) -> None:
    """Appends the tensors in `argument` that do not live in host memory."""
    if not _search(argument, found) and argument is not None:
        raise TypeError(
            f"expected a tensor, or a container of tensors, not {type(argument).__name__}"
        )


def _search(value: Any, found: list[torch.Tensor]) -> bool:
    """The same; False: `value` is neither tensor nor container."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            for name in names:
                _search(getattr(value, name), found)
        elif value.device.type not in ("cpu", "meta"):
            found.extend(_parts(value))
        return True
    children = value if isinstance(value, (list, tuple)) else _children(value)
    if children is None:
        return False
    for child in children:
        if not _search(child, found):
            _pass_over(child)
    return True


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that a sparse one has its memory in; else itself."""
    import torch

    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


# Marking what the compiled half hands back


def _mark_others(
    tensors: list[torch.Tensor],
    stream: torch.Stream | None,
    event: torch.Event | torch.cuda.Event | None,
    gate: bool,
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
                tracing.mark([tensor], stream, event, gate, until_free)
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


def _mark_cuda(
    tensor: torch.Tensor,
    stream: torch.Stream | None,
    event: torch.Event | torch.cuda.Event | None,
    gate: bool,
) -> None:
    import torch

    if event is not None and stream is None:
        stream = _stream_behind(event, tensor.device)
    if stream is None:
        stream = torch.cuda.current_stream(tensor.device)
    # Autograd may have saved it: see record_use(). References are not counted
    # here; the shim does.
    may_be_saved = torch.is_grad_enabled() and not tensor.is_inference()
    exact = gate and event is None and not may_be_saved
    if exact and _mark_through_library(tensor, stream):
        return
    _record_stream(tensor, stream)


def _mark_through_library(tensor: torch.Tensor, stream: Any) -> bool:
    """Marks memory of the pluggable allocator; False: it is not."""
    if pluggable_allocator.cache_info().currsize == 0 or not _is_current(pluggable_allocator()):
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

    stream: torch.cuda.Stream = _untyped(torch.cuda).Stream(device)
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


if _native is not None:
    tracing.install()
else:
    tracing.install_breaks()
