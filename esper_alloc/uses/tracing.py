"""Marks and scopes where PyTorch traces: ``torch.compile``, ``make_fx``, fake
tensors, functorch, and any other dispatch mode.

There the calls become the operators ``torch.ops.esper_alloc.*``, which the
compiled half defines (csrc/torch/uses/operators.cpp says what each does). Dynamo
traces the functions below in place of those of use.py (teaching.py tells it to),
so they are Python that it understands.
"""

from __future__ import annotations

from typing import Any

from .containers import find_tensors
from .streams import check_stream

OPERATORS = ("record_use", "order")

#: In place of a device: all streams, after the free.
_ALL_STREAMS = -2


def mark(tensors: list[Any], stream: Any, event: Any, until_free: bool) -> None:
    """Marks tensors of devices by operator. An event cannot stand in a graph: instead of it, the
    memory is held, after its free, until its device has done all it had then.
    """
    import torch

    operators: Any = torch.ops.esper_alloc
    if event is not None:
        operators.record_use.default(tensors, 0, _ALL_STREAMS, True)
    elif stream is None:
        operators.record_use.default(tensors, 0, -1, until_free)
    else:
        operators.record_use.default(tensors, stream.stream_id, stream.device_index, until_free)


# In place of the calls. A compiler may move a read behind a mark, so marks last until the free.


def record_use(tensors: Any, stream: Any = None, *, event: Any = None) -> None:
    import torch

    check_stream(stream)
    found: list[Any] = []
    find_tensors(tensors, found)
    if len(found) == 0:
        return
    if event is not None:
        # Memory of another allocator is waited for at the mark, so that stays behind the reads.
        operators: Any = torch.ops.esper_alloc
        operators.order.default(found, 0, -1, True)
    mark(found, _fixed(stream), event, True)


def touch(tensors: Any, stream: Any = None) -> None:
    record_use(tensors, stream)


def _fixed(stream: Any) -> Any:
    """The stream; None for one of the CPU. The graph becomes one for this stream, whose id stands
    in it: comparing is what Dynamo takes as a reason to compile again for another."""
    import torch

    if not isinstance(stream, torch.Stream):
        return None
    stream == stream  # noqa: B015
    return stream


class _EnteredTraced:
    """One entry into a scope inside a graph. Where the graph's operations run
    is the compiler's to say, so the stream is not made current: the operators
    put the scope in order with what the stream does before and after it. Without
    a stream there is nothing to wait for.
    """

    #: All of a graph runs on one stream.
    current = None

    def __init__(self, stream: Any, tensors: tuple[Any, ...]) -> None:
        self._stream = stream
        _order(tensors, stream, False)

    def leave(self, tensors: tuple[Any, ...]) -> None:
        _order(tensors, self._stream, True)
        record_use(tensors, self._stream)

    def is_current(self) -> bool:
        return False


def _order(tensors: tuple[Any, ...], stream: Any, at_end: bool) -> list[Any]:
    import torch

    found: list[Any] = []
    stream = _fixed(stream)
    if stream is not None:
        for value in tensors:
            find_tensors(value, found)
        operators: Any = torch.ops.esper_alloc
        operators.order.default(found, stream.stream_id, stream.device_index, at_end)
    return found


def enter(stream: Any, tensors: tuple[Any, ...]) -> _EnteredTraced:
    return _EnteredTraced(stream, tensors)


def hand_over(tensors: tuple[Any, ...], stream: Any) -> None:
    taken = _order(tensors, stream, False)
    if len(taken) != 0:
        mark(taken, None, None, True)
