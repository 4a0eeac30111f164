"""Sizes, raw entries, deleters, storages: what memory looks like from Python."""

from typing import Any

import torch
from ground import MiB, bytes_of, error_of, scenario, stats, type_of_error

LIVE = ("allocation.all.current", "allocated_bytes.all.current", "requested_bytes.all.current")


@scenario()
def zero_bytes() -> Any:
    before = stats("allocation.all.allocated", "num_device_alloc")
    x = torch.empty(0, device="cuda")
    storage = torch.UntypedStorage(0, device="cuda")
    raw = torch.cuda.caching_allocator_alloc(0)
    torch.cuda.caching_allocator_delete(0)
    return [
        x.data_ptr(), storage.data_ptr(), raw, x.device.index,
        before == stats("allocation.all.allocated", "num_device_alloc"),
    ]  # fmt: skip


@scenario()
def sizes_as_asked_and_as_handed_out() -> Any:
    answer = []
    sizes = (1, 511, 512, 513, 4096, 100_000, MiB - 1, 30 * MiB + 1)
    for size in (*sizes, *(count * MiB for count in (1, 2, 5, 12, 30, 64))):
        x = bytes_of(size)
        answer.append(
            [size, *stats(*LIVE), *stats("reserved_bytes.all.current"), x.data_ptr() % 512]
        )
        del x
        torch.cuda.empty_cache()
    return answer


@scenario()
def caching_that_is_off_for_a_while() -> Any:
    """From the first version on that has it."""
    off = getattr(torch.cuda.memory, "caching_allocator_disabled", None)
    if off is None:
        return None
    is_on, answer = torch._C._cuda_cudaCachingAllocator_is_enabled, []
    before = stats(*LIVE)
    with off():
        x = bytes_of(1000)
        answer.append([is_on(), x.data_ptr() != 0, before == stats(*LIVE)])
        with off():
            answer.append(is_on())
        answer.append(is_on())

    def fail() -> None:
        with off():
            raise KeyError("mine")

    answer += [is_on(), type_of_error(fail), is_on()]
    y = bytes_of(1000)
    return [*answer, x.numel(), y.numel(), before == stats(*LIVE)]


@scenario()
def the_size_class_is_that_of_the_request() -> Any:
    answer = []
    for size in (MiB, MiB + 1):
        x = bytes_of(size)
        answer.append(stats("segment.small_pool.current", "segment.large_pool.current"))
        del x
        torch.cuda.empty_cache()
    return answer


@scenario()
def impossible_sizes() -> Any:
    def ask(count: int) -> Any:
        return error_of(lambda: bytes_of(count), sizes=True)

    answers = [ask(1 << 60), ask(1 << 62)]
    for function in (
        lambda: torch.UntypedStorage(-1, device="cuda"),
        lambda: torch.empty(-1, device="cuda"),
    ):
        answers.append(type_of_error(function))
    return answers


@scenario()
def freed_memory_serves_the_next_of_its_size() -> Any:
    answer = []
    for size in (300, 100_000, 3 * MiB, 14 * MiB, 50 * MiB):
        x = bytes_of(size)
        address = x.data_ptr()
        del x
        answer.append(bytes_of(size).data_ptr() == address)
    return [*answer, *stats("num_device_alloc")]


@scenario()
def raw_alloc_and_delete() -> Any:
    side = torch.cuda.Stream()
    answer: list[Any] = []
    for stream in (None, side, side.cuda_stream, 0):
        memory = torch.cuda.caching_allocator_alloc(1000, stream=stream)
        answer.append([memory % 512, *stats(*LIVE)])
        torch.cuda.caching_allocator_delete(memory)
    answer.append(stats(*LIVE))
    answer.append(type_of_error(lambda: torch.cuda.caching_allocator_alloc(8, stream="no")))
    return answer


@scenario()
def what_is_no_memory_cannot_be_deleted() -> Any:
    answers: list[Any] = []
    for address in (12345 * 512, 1):
        error = error_of(lambda address=address: torch.cuda.caching_allocator_delete(address))
        answers.append(error and [error[0], error[1].startswith("invalid device pointer")])
    memory = torch.cuda.caching_allocator_alloc(1000)
    torch.cuda.caching_allocator_delete(memory)
    error = error_of(lambda: torch.cuda.caching_allocator_delete(memory))
    answers.append(error and [error[0], error[1].startswith("invalid device pointer")])
    inner = torch.cuda.caching_allocator_alloc(4096)
    error = error_of(lambda: torch.cuda.caching_allocator_delete(inner + 512))
    answers.append(error and [error[0], error[1].startswith("invalid device pointer")])
    torch.cuda.caching_allocator_delete(inner)
    return [answers, stats(*LIVE)]


@scenario()
def the_deleter_is_the_standard_one() -> Any:
    x = bytes_of(1000)
    storage = x.untyped_storage()
    view = x[100:].untyped_storage()
    answer = [
        torch._C._has_Standard_Deleter(storage._cdata),
        torch._C._has_Standard_Deleter(view._cdata),
        torch._C._has_Standard_Deleter(torch.empty(0, device="cuda").untyped_storage()._cdata),
    ]
    torch.cuda.caching_allocator_enable(False)
    try:
        y = bytes_of(1000)
        answer += [
            torch._C._has_Standard_Deleter(y.untyped_storage()._cdata),
            torch._C._has_Standard_Deleter(storage._cdata),
        ]
        del y
    finally:
        torch.cuda.caching_allocator_enable(True)
    return answer


@scenario()
def freeing_by_removing_the_deleter() -> Any:
    x = bytes_of(1000)
    storage = x.untyped_storage()
    before = stats(*LIVE)
    torch._C._free_And_Remove_DeleterFn(storage._cdata)
    after = stats(*LIVE)
    still = torch._C._has_Standard_Deleter(storage._cdata)
    del x, storage
    return [before, after, still, stats(*LIVE)]


@scenario()
def storages_resize() -> Any:
    x = bytes_of(3 * MiB)
    answer = [stats(*LIVE)]
    x.untyped_storage().resize_(0)
    answer += [stats(*LIVE), x.untyped_storage().data_ptr()]
    x.untyped_storage().resize_(5 * MiB)
    answer += [stats(*LIVE), x.untyped_storage().data_ptr() == 0]
    return answer


@scenario()
def the_allocator_can_be_turned_off_and_on() -> Any:
    x = bytes_of(1000)
    answer = [stats(*LIVE)]
    torch.cuda.caching_allocator_enable(False)
    y = bytes_of(5000)
    raw = torch.cuda.caching_allocator_alloc(100)
    answer += [stats(*LIVE), y.data_ptr() != 0, raw != 0]
    torch.cuda.caching_allocator_delete(raw)
    del x  # by the deleter that it was made with
    answer.append(stats(*LIVE))
    torch.cuda.caching_allocator_enable(True)
    del y
    _z = bytes_of(1000)
    answer.append(stats(*LIVE))
    return answer
