"""PYTORCH_NO_CUDA_MEMORY_CACHING."""

import ctypes
from typing import Any

import torch
from ground import SIMULATED, MiB, bytes_of, scenario, stats

LIVE = ("allocation.all.current", "reserved_bytes.all.current", "num_device_alloc")


@scenario()
def nothing_is_cached() -> Any:
    x = bytes_of(3 * MiB)
    raw = torch.cuda.caching_allocator_alloc(1000)
    answer = [
        stats(*LIVE), x.data_ptr() != 0, raw != 0,
        torch._C._has_Standard_Deleter(x.untyped_storage()._cdata),
        torch._C._cuda_cudaCachingAllocator_is_enabled()
        if hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled") else None,
    ]  # fmt: skip
    torch.cuda.caching_allocator_delete(raw)
    del x
    torch.cuda.empty_cache()
    return [*answer, stats(*LIVE)]


SIZE = 64 * MiB


def device_has(address: int, free_before: int) -> bool:
    """Is there memory at `address`? What is free would tell, too, were there no other
    processes that take and give memory."""
    if SIMULATED:
        return free_before - torch.cuda.mem_get_info()[0] >= SIZE
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    find = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    return find(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)) == 0


@scenario()
def memory_comes_back_at_once() -> Any:
    free = torch.cuda.mem_get_info()[0]
    x = bytes_of(SIZE)
    address = x.data_ptr()
    during = device_has(address, free)
    del x
    return [during, device_has(address, free)]


@scenario()
def other_functions_answer() -> Any:
    x = bytes_of(1000)
    x.record_stream(torch.cuda.Stream())
    torch.cuda.memory._record_memory_history()
    y = bytes_of(1000)
    picture = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    del x, y
    torch.cuda.reset_peak_memory_stats()
    return [len(picture["segments"]), len(picture["device_traces"][0])]
