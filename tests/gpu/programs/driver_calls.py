"""The few driver functions that torch does not show: streams of our own, raw captures, waits for a
value in memory. Called the way foreign code calls them, so the allocator hears nothing of it."""

import ctypes
import functools

import torch


@functools.cache
def _cuda() -> ctypes.CDLL:
    """Loaded late: whoever imports this need not have a GPU."""
    return ctypes.CDLL("libcuda.so.1")


NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
_CONDITIONAL_NODE, _IF, _ASSIGN_DEFAULT, _SET_DEPENDENCIES = 13, 0, 1, 1


class _ConditionalNode(ctypes.Structure):
    """CUgraphNodeParams, of a conditional node."""

    _fields_ = (
        ("type", ctypes.c_int), ("reserved0", ctypes.c_int * 3), ("handle", ctypes.c_ulonglong),
        ("kind", ctypes.c_int), ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)), ("context", ctypes.c_void_p),
        ("rest", ctypes.c_ubyte * 208),
    )  # fmt: skip


def _check(name: str, *args: object) -> None:
    status = getattr(_cuda(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()}")


class OwnStream:
    """A stream outside torch's pool, which can be destroyed."""

    def __init__(self) -> None:
        torch.cuda.current_stream().query()  # the context is current in this thread
        handle = ctypes.c_void_p()
        _check("cuStreamCreate", ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING))
        assert handle.value
        self.handle = handle.value
        self.torch = torch.cuda.ExternalStream(self.handle)

    def destroy(self) -> None:
        """Destroys the stream; what it was given still runs to its end."""
        _check("cuStreamDestroy_v2", ctypes.c_void_p(self.handle))

    def begin_capture(self, mode: int) -> None:
        _check("cuStreamBeginCapture_v2", ctypes.c_void_p(self.handle), ctypes.c_int(mode))

    def end_capture(self) -> ctypes.c_void_p:
        """The captured graph. Raises when the capture was invalidated."""
        graph = ctypes.c_void_p()
        _check("cuStreamEndCapture", ctypes.c_void_p(self.handle), ctypes.byref(graph))
        assert graph.value, "the capture gave no graph"
        return graph


def _point(stream: torch.cuda.Stream) -> tuple[ctypes.c_void_p, ctypes.Array[ctypes.c_void_p]]:
    """The graph that `stream` is captured into, and the nodes that its next one follows."""
    graph, status, edges = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
    capture, count = ctypes.c_ulonglong(), ctypes.c_size_t()
    before = ctypes.POINTER(ctypes.c_void_p)()
    _check(
        "cuStreamGetCaptureInfo_v3",
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.byref(status),
        ctypes.byref(capture),
        ctypes.byref(graph),
        ctypes.byref(before),
        ctypes.byref(edges),
        ctypes.byref(count),
    )
    assert graph.value, "the stream is not being captured"
    return graph, (ctypes.c_void_p * count.value)(*before[: count.value])


def _continue_behind(stream: torch.cuda.Stream, node: ctypes.c_void_p) -> None:
    """What `stream` captures next follows `node`, and nothing else."""
    _check(
        "cuStreamUpdateCaptureDependencies_v2",
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.byref(node),
        None,
        ctypes.c_size_t(1),
        ctypes.c_uint(_SET_DEPENDENCIES),
    )


def add_child(stream: torch.cuda.Stream, child: ctypes.c_void_p) -> None:
    """Adds a graph as one node to what `stream` is captured into."""
    graph, before = _point(stream)
    node = ctypes.c_void_p()
    _check(
        "cuGraphAddChildGraphNode",
        ctypes.byref(node),
        graph,
        before,
        ctypes.c_size_t(len(before)),
        child,
    )
    _continue_behind(stream, node)


def add_condition(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    """Adds an if node, always taken, to what `stream` is captured into: its body, a graph."""
    graph, before = _point(stream)
    condition, context = ctypes.c_ulonglong(), ctypes.c_void_p()
    _check("cuCtxGetCurrent", ctypes.byref(context))
    _check(
        "cuGraphConditionalHandleCreate",
        ctypes.byref(condition),
        graph,
        context,
        ctypes.c_uint(1),
        ctypes.c_uint(_ASSIGN_DEFAULT),
    )
    params = _ConditionalNode(
        type=_CONDITIONAL_NODE, handle=condition.value, kind=_IF, size=1, context=context
    )
    node = ctypes.c_void_p()
    _check(
        "cuGraphAddNode_v2",
        ctypes.byref(node),
        graph,
        before,
        None,
        ctypes.c_size_t(len(before)),
        ctypes.byref(params),
    )
    _continue_behind(stream, node)
    return ctypes.c_void_p(params.bodies[0])


def begin_capture_to(stream: torch.cuda.Stream, graph: ctypes.c_void_p) -> None:
    """Captures `stream` into a graph that exists, such as a body."""
    _check(
        "cuStreamBeginCaptureToGraph",
        ctypes.c_void_p(stream.cuda_stream),
        graph,
        None,
        None,
        ctypes.c_size_t(0),
        ctypes.c_int(RELAXED),
    )


def end_capture_to(stream: torch.cuda.Stream) -> None:
    graph = ctypes.c_void_p()
    _check("cuStreamEndCapture", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph))


def launch(graph: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
    """Instantiates a graph and runs it once on `stream`."""
    instance = ctypes.c_void_p()
    _check("cuGraphInstantiateWithFlags", ctypes.byref(instance), graph, ctypes.c_ulonglong(0))
    _check("cuGraphLaunch", instance, ctypes.c_void_p(stream.cuda_stream))
    torch.cuda.synchronize()
    _check("cuGraphExecDestroy", instance)
    _check("cuGraphDestroy", graph)


def _on_value(call: str, stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    _check(
        call,
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_ulonglong(flag.data_ptr()),
        ctypes.c_uint(value),
        ctypes.c_uint(0),
    )


def wait_for_value(stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    """`stream` waits until the int32 `flag`, in device or pinned memory, is at least `value`.

    The stream's device has to be the current one.
    """
    _on_value("cuStreamWaitValue32_v2", stream, flag, value)


def write_value(stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    """`stream` sets the int32 `flag`, as above, to `value` when it gets there."""
    _on_value("cuStreamWriteValue32_v2", stream, flag, value)
