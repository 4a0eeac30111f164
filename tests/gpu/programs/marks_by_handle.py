"""Marks by a stream's handle alone, through the C function for extensions.

Usage: marks_by_handle.py TRIES

Each mark is made by a thread that has no CUDA context, on a stream of PyTorch's
and on one of our own that nobody has presented before. A delayed reader adds up
a block, the block is marked and dropped, and the next one of its size, for which
there is no other memory, is overwritten.

Prints how many of the blocks got that memory (`reused`), how many readers saw
wrong data (`wrong`), marks that were refused (`refused`), and how many threads
had a context afterwards (`contexts`). With a second device, a stream of that one
is marked on, too.
"""

import ctypes
import sys
import threading

import driver_calls as driver
import torch
from device import OURS, no_new_memory, other_streams, report, sleep, use_allocator

import esper_alloc

ELEMENTS = 4 << 20  # of int32: 16 MiB


class Marker:
    """``esper_alloc_record_use``, called in threads without a context."""

    def __init__(self) -> None:
        library = ctypes.CDLL(esper_alloc.library_path())
        self._mark = library.esper_alloc_record_use
        self._mark.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._mark.restype = ctypes.c_int
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.refused = self.contexts = 0

    def _run(self, address: int, handle: int) -> None:
        self.refused += self._mark(address, handle) != 0
        context = ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(context))
        self.contexts += bool(context.value)

    def mark(self, address: int, handle: int) -> None:
        thread = threading.Thread(target=self._run, args=(address, handle))
        thread.start()
        thread.join()


def main() -> None:
    use_allocator(OURS)
    marker = Marker()
    (side,) = other_streams(1)
    own = driver.OwnStream()
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    reused = wrong = tries = 0
    for attempt in range(1 + int(sys.argv[1])):  # the first one loads the kernels
        for stream in (side, own.torch):
            x = torch.full((ELEMENTS,), 7, dtype=torch.int32, device="cuda")
            other = torch.empty_like(x)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # no memory is free
            sleep(stream, 20)
            with torch.cuda.stream(stream):
                torch.sum(x, dim=0, out=total)
            address = x.data_ptr()
            # An address within the block stands for it, too.
            marker.mark(address + 4096 * (attempt % 2), stream.cuda_stream)
            del x
            with no_new_memory():
                y = torch.empty((ELEMENTS,), dtype=torch.int32, device="cuda")
            same = y.data_ptr() == address
            y.fill_(9)
            torch.cuda.synchronize()
            if attempt:
                tries += 1
                reused += same
                wrong += int(total) != 7 * ELEMENTS
            del y, other
    if torch.cuda.device_count() > 1:
        far = torch.cuda.Stream(1)
        x = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda:0")
        marker.mark(x.data_ptr(), far.cuda_stream)
        del x
        torch.cuda.synchronize(1)
    report(
        tries=tries, reused=reused, wrong=wrong, refused=marker.refused, contexts=marker.contexts
    )


if __name__ == "__main__":
    main()
