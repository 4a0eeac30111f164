"""Marks and scopes where PyTorch traces: ``torch.compile``, ``make_fx``, fake
tensors, functorch, and any other dispatch mode.

There the calls become the operators ``torch.ops.esper_alloc.*``, which the
compiled half defines (csrc/torch/uses/operators.cpp says what each does). Dynamo
traces the functions below in place of the real ones (teaching.py tells it to).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set, ValuesView
from typing import Any

from . import containers

#: Kinds of devices whose tensors are marked.
_MARKED = ("cuda",)

OPERATORS = ("record_use", "hold", "enter_scope", "leave_scope", "take")


# The calls, on tensors of CUDA devices that were found already


def mark(tensors: list[Any], stream: Any, event: Any, until_free: bool) -> None:
    """Marks by operator. An event cannot stand in a graph: instead of it, the
    memory is held, after its free, until its device has done all it had then.
    """
    import torch

    operators: Any = torch.ops.esper_alloc
    if event is not None:
        operators.hold.default(tensors)
    elif stream is None:
        operators.record_use.default(tensors, 0, -1, until_free)
    else:
        operators.record_use.default(tensors, stream.stream_id, stream.device_index, until_free)


# What Dynamo traces in place of the functions of use.py and streams.py. Python that Dynamo
# understands: no compiled function, no sys.modules, no generator.


def record_use(tensors: Any, stream: Any = None, *, event: Any = None) -> None:
    import torch

    # (Dynamo cannot be asked of what type an event is.)
    _mark_found(tensors, stream, event, torch.is_grad_enabled())


def touch(tensors: Any, stream: Any = None) -> None:
    _mark_found(tensors, stream, None, True)


def _mark_found(tensors: Any, stream: Any, event: Any, until_free: bool) -> None:
    import torch

    _fix_stream(stream)
    found: list[Any] = []
    if not _search(tensors, found) and tensors is not None:
        raise TypeError(
            f"expected a tensor, or a container of tensors, not {type(tensors).__name__}"
        )
    if len(found) != 0:
        stream = stream if isinstance(stream, torch.Stream) else None
        mark(found, stream, event, until_free)


def _fix_stream(stream: Any) -> None:
    """Makes the graph one for this stream, whose id stands in it: comparing is
    what Dynamo takes as a reason to compile again for another."""
    check_stream(stream)
    if stream is not None:
        stream == stream  # noqa: B015


def _search(value: Any, found: list[Any]) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                _search(getattr(value, name), found)
        elif value.device.type in _MARKED:
            found.append(value)
        return True
    children = _children(value)
    if children is None:
        return False
    for child in children:
        _search_element(child, found)
    return True


def _children(value: Any) -> list[Any] | None:
    """What a container holds; None: it is none."""
    if isinstance(value, dict):
        return list(value.values())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return None
    if isinstance(value, Mapping):
        return [value[key] for key in value]
    if isinstance(value, (Set, Sequence, ValuesView)):
        return list(value)
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        # An InitVar is listed, too, and not kept.
        names = [name for name in value.__dataclass_fields__ if hasattr(value, name)]
        return [getattr(value, name) for name in names]
    return None


def _search_element(value: Any, found: list[Any]) -> None:
    if not _search(value, found) and value is not None:
        _pass_over_type(type(value))


def _pass_over_type(kind: type) -> None:
    containers.pass_over_type(kind)


# For Dynamo: called while it traces, and a constant in the graph.
_pass_over_type._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _EnteredTraced:
    """One entry into a scope inside a graph. Where the graph's operations run
    is the compiler's to say, so the stream is not made current: the operators
    put the scope in order with what the stream does before and after it.
    """

    def __init__(self, stream: Any, tensors: tuple[Any, ...]) -> None:
        import torch

        found: list[Any] = []
        _search(tensors, found)
        self._stream = stream
        _fix_stream(stream)
        operators: Any = torch.ops.esper_alloc
        operators.enter_scope.default(found, stream.stream_id, stream.device_index)

    def leave(self, tensors: tuple[Any, ...]) -> None:
        import torch

        found: list[Any] = []
        _search(tensors, found)
        stream = self._stream
        operators: Any = torch.ops.esper_alloc
        operators.leave_scope.default(
            found,
            stream.stream_id,
            stream.device_index,
            torch.is_grad_enabled(),
        )

    def is_current(self) -> bool:
        return False


class _EnteredCurrentTraced:
    """The same for a scope without a stream."""

    #: All of a graph runs on one stream: there is nothing to wait for.
    current = None

    def leave(self, tensors: tuple[Any, ...]) -> None:
        for value in tensors:
            record_use(value)

    def is_current(self) -> bool:
        return False


def enter(stream: Any, tensors: tuple[Any, ...]) -> Any:
    import torch

    if not isinstance(stream, torch.Stream):  # none, or one of the CPU
        return _EnteredCurrentTraced()
    return _EnteredTraced(stream, tensors)


def hand_over(tensors: tuple[Any, ...], stream: Any) -> None:
    import torch

    if not isinstance(stream, torch.Stream):  # none, or one of the CPU
        return
    found: list[Any] = []
    _search(tensors, found)
    _fix_stream(stream)
    operators: Any = torch.ops.esper_alloc
    operators.take.default(found, stream.stream_id, stream.device_index)


def check_scope(tensors: tuple[Any, ...]) -> None:
    for value in tensors:
        if not _check_no_stream(value) and value is not None:
            raise TypeError(
                f"expected a tensor, or a container of tensors, not {type(value).__name__}"
            )


def _check_no_stream(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (torch.Stream, torch.cpu.Stream)):
        raise TypeError("a stream is among the tensors: pass it by name, using(x, stream=side)")
    children = _children(value)
    if children is None:
        return False
    for child in children:
        _check_no_stream(child)
    return True


def check_stream(stream: Any) -> None:
    import torch

    if stream is not None and not isinstance(stream, (torch.Stream, torch.cpu.Stream)):
        found = type(stream).__name__
        raise TypeError(f"stream must be a torch.cuda.Stream or None, not {found}")
