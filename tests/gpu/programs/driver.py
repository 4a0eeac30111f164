"""The few driver functions that torch does not show: streams of our own, raw
captures, waits for a value in memory. Called the way foreign code calls them,
so the allocator hears nothing of it."""

from __future__ import annotations

import ctypes

import torch

_cuda = ctypes.CDLL("libcuda.so.1")

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


def _check(name: str, *args: object) -> None:
    status = getattr(_cuda, name)(*args)
    if status:
        text = ctypes.c_char_p()
        _cuda.cuGetErrorName(status, ctypes.byref(text))
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


def launch(graph: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
    """Instantiates a graph and runs it once on `stream`."""
    instance = ctypes.c_void_p()
    _check("cuGraphInstantiateWithFlags", ctypes.byref(instance), graph, ctypes.c_ulonglong(0))
    _check("cuGraphLaunch", instance, ctypes.c_void_p(stream.cuda_stream))
    torch.cuda.synchronize()
    _check("cuGraphExecDestroy", instance)
    _check("cuGraphDestroy", graph)


def wait_for_value(stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    """`stream` waits until the int32 `flag`, in device or pinned memory, is at least `value`.

    The stream's device has to be the current one.
    """
    _check(
        "cuStreamWaitValue32_v2",
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_ulonglong(flag.data_ptr()),
        ctypes.c_uint(value),
        ctypes.c_uint(0),
    )


def write_value(stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    """`stream` sets the int32 `flag`, as above, to `value` when it gets there."""
    _check(
        "cuStreamWriteValue32_v2",
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_ulonglong(flag.data_ptr()),
        ctypes.c_uint(value),
        ctypes.c_uint(0),
    )
