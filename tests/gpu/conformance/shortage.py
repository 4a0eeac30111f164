"""When memory runs out: type, wording, who is told, and that life goes on."""

import re
from typing import Any

import torch
from ground import GiB, MiB, all_stats, bytes_of, error_of, scenario, stats, type_of_error

COUNTS = ("num_ooms", "num_alloc_retries")


def wording(message: str) -> str:
    """Without figures, other processes, and the advice at its end."""
    message = re.sub(r"(reserved by PyTorch but unallocated\.).*", r"\1", message, flags=re.S)
    message = re.sub(
        r"(Process \d+|Including non-PyTorch memory, this process) has [\d.]+ \w+ memory in use\. ",
        "",
        message,
    )
    return re.sub(r"\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB)", "SIZE", message)


def failure(size: int) -> Any:
    try:
        bytes_of(size)
    except Exception as error:
        kinds = [
            type(error) is torch.OutOfMemoryError,
            isinstance(error, torch.cuda.OutOfMemoryError),
            isinstance(error, RuntimeError),
        ]
        return [kinds, type(error).__name__, wording(str(error))]
    return None


@scenario()
def far_too_much() -> Any:
    x = bytes_of(1000)
    answer = failure(800_000_000 * GiB)
    message = error_of(lambda: bytes_of(800_000_000 * GiB), sizes=True)[1]
    begin = "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of"
    answer += [begin in message, stats(*COUNTS), x.numel(), bytes_of(1000).numel()]
    return answer


@scenario()
def within_a_fraction() -> Any:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.25)
    x = bytes_of(total // 8)
    answer = [failure(total // 5), stats(*COUNTS), failure(total // 2), stats(*COUNTS)]
    del x
    y = bytes_of(total // 5)
    del y
    torch.cuda.set_per_process_memory_fraction(1.0)
    z = bytes_of(total // 2)
    return [*answer, z.numel() == total // 2, stats(*COUNTS)]


@scenario()
def cached_memory_goes_back_first() -> Any:
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.5)
    unit = total // 16 // MiB * MiB
    parts = [bytes_of(unit) for _ in range(7)]
    parts.clear()
    x = bytes_of(7 * unit)
    return [x.numel() == 7 * unit, stats(*COUNTS), stats("num_device_free")[0] > 0]


@scenario()
def what_lived_before_lives_after() -> Any:
    total = torch.cuda.mem_get_info()[1]
    kept = [bytes_of(5 * MiB) for _ in range(3)]
    addresses = [x.data_ptr() for x in kept]
    names = ("allocated_bytes.all.current", "allocation.all.current")
    before = stats(*names)
    error = failure(2 * total)
    return [error, before == stats(*names), addresses == [x.data_ptr() for x in kept]]


@scenario()
def observers_are_told() -> Any:
    told: list[Any] = []

    def observe(device: int, size: int, device_total: int, device_free: int) -> None:
        told.append([device, size, device_total, device_free])

    torch._C._cuda_attach_out_of_memory_observer(observe)
    total = torch.cuda.mem_get_info()[1]
    failure(3 * total)
    torch.cuda.set_per_process_memory_fraction(0.5)
    failure(total)
    return [
        [
            [d, size // total, 0 < rest <= total, capacity == total]
            for d, size, capacity, rest in told
        ],
        len(told),
    ]


@scenario()
def observers_are_told_the_segment() -> Any:
    """Its size, not that of the request."""
    sizes: list[int] = []
    torch._C._cuda_attach_out_of_memory_observer(
        lambda device, size, total, free: sizes.append(size)
    )
    torch.cuda.set_per_process_memory_fraction(0.0)
    for size in (100, 3 * MiB, 12 * MiB - 1, 50 * MiB + 1):
        failure(size)
    return list(sizes)  # observers stay for good


@scenario()
def a_fraction_of_nothing() -> Any:
    """Memory that is there serves on, and nothing new comes."""
    put, get = (
        torch.cuda.set_per_process_memory_fraction,
        torch.cuda.get_per_process_memory_fraction,
    )
    x = bytes_of(12 * MiB)
    put(0.0)
    answer = [get(), failure(100), failure(50 * MiB), stats("num_ooms")]
    address = x.data_ptr()
    del x
    y = bytes_of(12 * MiB)
    answer.append(y.data_ptr() == address)
    wrong = [type_of_error(lambda: put(f)) for f in (-1.0, 1.5, float("nan"))]  # noqa: B023
    answer += [wrong, get()]
    put(1.0)
    return [*answer, bytes_of(100).numel(), bytes_of(50 * MiB).numel()]


@scenario()
def an_observer_may_look_around() -> Any:
    """It runs with no lock held: it may allocate, free, and read every figure."""
    seen: list[Any] = []

    def observe(*_: int) -> None:
        if seen:  # observers stay for good
            return
        seen.append(None)
        x = bytes_of(1000)
        seen.append(
            [x.numel(), len(torch.cuda.memory._snapshot()["segments"]) > 0, len(all_stats()) > 100]
        )
        del x
        torch.cuda.empty_cache()

    torch._C._cuda_attach_out_of_memory_observer(observe)
    answer = failure(3 * torch.cuda.mem_get_info()[1])
    return [answer, seen[-1:]]
