"""PYTORCH_NO_CUDA_MEMORY_CACHING."""

from __future__ import annotations

import time
from typing import Any

import torch
from ground import MiB, bytes_of, scenario, stats

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


@scenario()
def memory_comes_back_at_once() -> Any:
    tries, went, came = 50, 0, 0
    for _ in range(tries):  # other processes take and give memory, too: mostly
        time.sleep(0.04)  # one that ends with much gives it for a while
        free = torch.cuda.mem_get_info()[0]
        x = bytes_of(64 * MiB)
        during = torch.cuda.mem_get_info()[0]
        del x
        went += free - during >= 64 * MiB
        came += torch.cuda.mem_get_info()[0] >= during + 64 * MiB
    return [went > tries / 2, came > tries / 2]


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
