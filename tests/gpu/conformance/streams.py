"""Streams: record_stream, owners, external streams."""

from typing import Any

import torch
from ground import MiB, busy, bytes_of, let_pass, scenario, stats, type_of_error

ACTIVE = ("allocated_bytes.all.current", "active_bytes.all.current")


def until_it_passed() -> list[Any]:
    """What is active while streams are busy, and what after that."""
    answer = [stats(*ACTIVE)]
    let_pass()
    y = bytes_of(1)
    answer.append(stats(*ACTIVE))
    del y
    return answer


@scenario()
def record_stream_on_the_own_stream_is_nothing() -> Any:
    x = bytes_of(12 * MiB)
    current = torch.cuda.current_stream()
    x.record_stream(current)
    busy(current)
    del x
    return stats(*ACTIVE)


@scenario()
def record_stream_on_several_streams() -> Any:
    sides = [torch.cuda.Stream() for _ in range(3)]
    x = bytes_of(12 * MiB)
    for side in (*sides, sides[0]):
        x.record_stream(side)
        busy(side)
    del x
    return until_it_passed()


@scenario()
def a_streams_memory_is_its_own() -> Any:
    side = torch.cuda.Stream()
    busy(torch.cuda.current_stream())
    x = bytes_of(12 * MiB)
    address = x.data_ptr()
    del x
    with torch.cuda.stream(side):
        y = bytes_of(12 * MiB)
    different = y.data_ptr() != address
    z = bytes_of(12 * MiB)
    return [different, z.data_ptr() == address, stats("segment.all.current")]


@scenario()
def record_stream_of_what_is_not_ours() -> Any:
    side = torch.cuda.Stream()
    answers = [type_of_error(lambda: torch.empty(8).record_stream(side))]
    memory = torch.cuda.caching_allocator_alloc(4096)
    storage = torch._C._construct_storage_from_data_pointer(memory, torch.device("cuda", 0), 4096)
    x = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    x.record_stream(side)
    torch.empty(0, device="cuda").record_stream(side)
    del x, storage
    torch.cuda.caching_allocator_delete(memory)
    return [answers, stats(*ACTIVE)]


@scenario()
def record_stream_of_views() -> Any:
    side = torch.cuda.Stream()
    x = bytes_of(12 * MiB)
    x[MiB:].view(torch.int32).record_stream(side)
    busy(side)
    del x
    return until_it_passed()


@scenario()
def external_streams() -> Any:
    side = torch.cuda.Stream()
    other = torch.cuda.ExternalStream(side.cuda_stream)
    with torch.cuda.stream(other):
        x = bytes_of(12 * MiB)
    y = bytes_of(14 * MiB)
    y.record_stream(other)
    segments = {s["total_size"]: s["stream"] for s in torch.cuda.memory_snapshot()}
    del x, y
    let_pass()
    return [
        segments[12 * MiB] == side.cuda_stream,
        segments[14 * MiB],
        stats("allocation.all.current"),
    ]


@scenario()
def many_streams() -> Any:
    kept = []
    for _ in range(40):
        with torch.cuda.stream(torch.cuda.Stream()):
            kept.append(bytes_of(1000))
    answer = stats("allocation.all.current", "allocated_bytes.all.current")
    kept.clear()
    let_pass()
    torch.cuda.empty_cache()
    return [answer, stats("reserved_bytes.all.current")]


@scenario()
def threads_allocate_and_free_for_each_other() -> Any:
    import threading

    boxes: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def work(k: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(200):
                boxes[(k + i) % 4].append(bytes_of(1 + 997 * i))
                if i % 3 == 0 and boxes[k]:
                    boxes[k].pop()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live = sum(map(len, boxes))
    answer = [stats("allocation.all.current")[0] == live, stats("allocation.all.allocated")]
    boxes.clear()
    let_pass()
    torch.cuda.empty_cache()
    return [*answer, stats("reserved_bytes.all.current")]
