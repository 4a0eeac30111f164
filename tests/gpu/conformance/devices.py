"""Two devices: copies, peers, figures of each, frees with the other device current."""

from typing import Any

import torch
from ground import MiB, all_stats, bytes_of, let_pass, scenario, stats

LIVE = ("allocation.all.current", "allocated_bytes.all.current", "reserved_bytes.all.current")


@scenario("two_gpus")
def figures_of_each_device() -> Any:
    _x, y = bytes_of(3 * MiB, "cuda:0"), bytes_of(12 * MiB, "cuda:1")
    answer = [all_stats(0), all_stats(1)]
    torch.cuda.reset_peak_memory_stats(1)
    del y
    answer += [all_stats(0), all_stats(1)]
    return answer


@scenario("two_gpus")
def memory_is_of_the_current_device_unless_said() -> Any:
    with torch.cuda.device(1):
        x = bytes_of(1000)
        raw = torch.cuda.caching_allocator_alloc(1000)
        y = bytes_of(1000, "cuda:0")
        answer = [x.device.index, y.device.index, stats(*LIVE, device=0), stats(*LIVE, device=1)]
    torch.cuda.caching_allocator_delete(raw)
    return [*answer, stats(*LIVE, device=1)]


@scenario("two_gpus")
def frees_with_the_other_device_current() -> Any:
    x, y = bytes_of(12 * MiB, "cuda:0"), bytes_of(12 * MiB, "cuda:1")
    with torch.cuda.device(1):
        del x
        answer = [stats(*LIVE, device=0), torch.cuda.current_device()]
    with torch.cuda.device(0):
        del y
        answer += [stats(*LIVE, device=1), torch.cuda.current_device()]
    torch.cuda.empty_cache()
    return [*answer, stats(*LIVE, device=0), stats(*LIVE, device=1)]


@scenario("two_gpus")
def record_stream_on_a_stream_of_the_other_device() -> Any:
    x = bytes_of(12 * MiB, "cuda:0")
    far = torch.cuda.Stream(1)
    x.record_stream(far)
    del x
    let_pass()
    _y = bytes_of(1, "cuda:0")
    return stats("active_bytes.all.current", device=0)


@scenario("two_gpus")
def snapshots_of_both() -> Any:
    torch.cuda.memory._record_memory_history(context=None)
    _x, _y = bytes_of(3 * MiB, "cuda:0"), bytes_of(12 * MiB, "cuda:1")
    picture = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return [
        sorted((s["device"], s["total_size"]) for s in picture["segments"]),
        [[[e["action"], e["size"]] for e in trace] for trace in picture["device_traces"]],
    ]


@scenario()
def empty_cache_leaves_the_current_device() -> Any:
    torch.cuda.empty_cache()
    return torch.cuda.current_device()
