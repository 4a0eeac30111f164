"""Options at the start, one process for each set of them (ground.GROUPS)."""

from typing import Any

import torch
from ground import MiB, all_stats, bytes_of, scenario, type_of_error


@scenario()
def as_the_snapshot_shows_them() -> Any:
    return torch.cuda.memory._snapshot()["allocator_settings"]


@scenario()
def figures_of_some_sizes() -> Any:
    answer = []
    for size in (1000, 5000, 3 * MiB, 12 * MiB, 30 * MiB + 5, 50 * MiB, 64 * MiB, 90 * MiB):
        x = bytes_of(size)
        answer.append([size, all_stats()])
        del x
        answer.append(all_stats())
        torch.cuda.empty_cache()
    return answer


@scenario()
def oversize_blocks() -> Any:
    """A smaller request never takes what must not be split, a near one does."""
    answer = []
    x = bytes_of(100 * MiB)
    del x
    for size in (30 * MiB, 70 * MiB, 85 * MiB, 100 * MiB):
        y = bytes_of(size)
        answer.append(
            [size, all_stats()["segment.all.current"], all_stats()["oversize_allocations.current"]]
        )
        del y
        torch.cuda.empty_cache()
        x = bytes_of(100 * MiB)
        del x
    return answer


@scenario()
def the_fraction() -> Any:
    """Only what is refused is large: other processes use the GPU meanwhile."""
    total = torch.cuda.mem_get_info()[1]
    fraction = torch.cuda.get_per_process_memory_fraction()
    above = total // 16 * 5 if fraction < 1 else total * 2
    return [
        fraction,
        type_of_error(lambda: bytes_of(above)),
        type_of_error(lambda: bytes_of(total // 64)),
    ]
