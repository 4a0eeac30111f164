"""garbage_collection_threshold: what goes back before memory grows. Sizes are shares of
the device, whose memory the options are about."""

from __future__ import annotations

import os
from typing import Any

import torch
from ground import MiB, bytes_of, error_of, let_pass, scenario, stats, type_of_error

AT_START = "PYTORCH_CUDA_ALLOC_CONF" in os.environ
COUNTS = ("num_alloc_retries", "num_ooms", "num_oom_rejections", "segment.all.current")


def put(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(text)


def begin(fraction: float = 0.2, threshold: float = 0.2) -> int:
    """A fiftieth of the fraction: many processes share the device."""
    if not AT_START:
        put(f"garbage_collection_threshold:{threshold}")
        torch.cuda.set_per_process_memory_fraction(fraction)
    return int(torch.cuda.mem_get_info()[1] // 250 // (2 * MiB) * (2 * MiB))


def sizes(unit: int) -> list[int]:
    """Segments, in units, by their age."""
    picture = torch.cuda.memory_snapshot()
    return sorted(round(s["total_size"] / unit) for s in picture)


def cache(unit: int, *parts: int) -> None:
    """Segments of so many units, freed in that order, with requests between."""
    small = bytes_of(5 * MiB)
    live = [bytes_of(part * unit) for part in parts]
    while live:
        del live[0]
        for _ in range(4):
            small = None
            small = bytes_of(5 * MiB)
    del small
    let_pass()


@scenario()
def the_longest_unused_go_back() -> Any:
    unit = begin()
    cache(unit, 6, 5, 4)
    answer = [sizes(unit)]
    live = []
    for _ in range(3):
        live.append(bytes_of(8 * unit))
        let_pass()
        answer.append([sizes(unit), stats(*COUNTS)])
    return answer


@scenario()
def nothing_goes_while_what_there_is_serves() -> Any:
    unit = begin()
    cache(unit, 6, 5, 4)
    _live = [bytes_of(part * unit) for part in (6, 5, 4)]
    return [sizes(unit), stats(*COUNTS)]


@scenario()
def what_is_below_the_threshold_stays() -> Any:
    unit = begin()
    cache(unit, 3, 2)
    _live = bytes_of(4 * unit)
    return [sizes(unit), stats(*COUNTS)]


@scenario()
def without_a_fraction_all_stays() -> Any:
    unit = begin(fraction=1.0, threshold=0.01)
    if AT_START:
        return "it has one"
    cache(unit, 6, 5, 4)
    _live = bytes_of(8 * unit)
    return [sizes(unit), stats(*COUNTS)]


@scenario()
def growth_is_rejected() -> Any:
    """throw_on_cudamalloc_oom, which PyTorch 2.11 does not know yet."""
    if AT_START:
        return "at run time only"
    unit = int(torch.cuda.mem_get_info()[1] // 500)
    answer: list[Any] = [
        type_of_error(lambda: put("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.06"))
    ]
    if answer == [None]:
        x, y = bytes_of(10 * unit), bytes_of(15 * unit)
        del y
        answer.append([error_of(lambda: bytes_of(20 * unit)), stats(*COUNTS)])
        y = bytes_of(15 * unit)
        answer.append(stats(*COUNTS))
        del x, y
        put("throw_on_cudamalloc_oom:False,per_process_memory_fraction:1.0")
    return answer
