"""torch.cuda.memory_stats() and its relatives."""

from typing import Any

import torch
from ground import MiB, all_stats, busy, bytes_of, let_pass, scenario, stats, type_of_error


@scenario()
def keys() -> Any:
    bytes_of(1)
    every = torch.cuda.memory_stats()
    return [list(every), len(every), sorted({type(value).__name__ for value in every.values()})]


@scenario()
def every_figure_after_each_step() -> Any:
    """Sizes whose place does not depend on an allocator's taste."""
    kept: dict[str, Any] = {}
    seen = []

    def step(name: str, size: int | None) -> None:
        if size is None:
            del kept[name]
        else:
            kept[name] = bytes_of(size)
        seen.append([name, size, all_stats()])

    step("a", 1000)
    step("b", 700_000)
    step("c", 12 * MiB)
    step("a", None)
    step("d", 5 * MiB)
    step("e", 4 * MiB)
    step("d", None)
    step("b", None)
    step("c", None)
    step("f", 12 * MiB - 700)
    step("g", 40 * MiB)
    step("g", None)
    torch.cuda.empty_cache()
    step("h", 1)
    step("f", None)
    step("e", None)
    step("h", None)
    torch.cuda.empty_cache()
    seen.append(all_stats())
    return seen


@scenario()
def peaks_and_resets() -> Any:
    x = bytes_of(30 * MiB)
    y = bytes_of(1000)
    del x
    answer = [all_stats()]
    torch.cuda.reset_peak_memory_stats()
    answer.append(all_stats())
    torch.cuda.reset_accumulated_memory_stats()
    answer.append(all_stats())
    del y
    torch.cuda.reset_peak_memory_stats()
    answer.append(all_stats())
    return answer


@scenario()
def short_forms() -> Any:
    x = bytes_of(3 * MiB)
    answer = [
        torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(),
        torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved(),
        torch.cuda.memory_allocated(0), torch.cuda.memory_allocated("cuda"),
        torch.cuda.memory_allocated(torch.device("cuda:0")),
    ]  # fmt: skip
    del x
    free, total = torch.cuda.mem_get_info()
    return [
        *answer,
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
        0 < free <= total,
    ]


@scenario()
def accelerator_functions() -> Any:
    x = bytes_of(3 * MiB)
    a = torch.accelerator
    answer: list[Any] = [
        a.memory_allocated(), a.max_memory_allocated(), a.memory_reserved(),
        a.max_memory_reserved(), dict(a.memory_stats()) == dict(torch.cuda.memory_stats()),
        sorted(a.memory_stats()),
    ]  # fmt: skip
    del x
    a.empty_cache()
    answer += [a.memory_reserved(), a.max_memory_allocated()]
    a.reset_peak_memory_stats()
    a.reset_accumulated_memory_stats()
    answer += [all_stats()]
    if hasattr(a, "get_memory_info"):
        free, total = a.get_memory_info()
        answer.append([0 < free <= total, total == torch.cuda.mem_get_info()[1]])
    return answer


@scenario()
def summary() -> Any:
    x, y = bytes_of(12 * MiB), bytes_of(300)
    del x
    long = torch.cuda.memory_summary()
    short = torch.cuda.memory_summary(abbreviated=True)
    del y
    rows = [line for line in long.splitlines() if "Non-releasable" not in line]
    classes = "".join(rows).count("from large pool") == "".join(rows).count("from small pool") > 5
    return [[line for line in rows if not line.startswith("|       from")], classes, short]


@scenario()
def emptying_the_cache_synchronises_once() -> Any:
    names = ("num_sync_all_streams", "num_device_free", "reserved_bytes.all.current")
    x = bytes_of(12 * MiB)
    answer = [stats(*names)]
    torch.cuda.empty_cache()
    answer.append(stats(*names))
    del x
    torch.cuda.empty_cache()
    answer.append(stats(*names))
    torch.cuda.empty_cache()
    answer.append(stats(*names))
    return answer


@scenario()
def pending_memory_is_active_and_not_allocated() -> Any:
    kinds = "allocated_bytes active_bytes allocation active requested_bytes reserved_bytes".split()
    names = [f"{kind}.all.current" for kind in kinds]
    side = torch.cuda.Stream()
    x = bytes_of(12 * MiB - 100)
    x.record_stream(side)
    busy(side)
    answer = [stats(*names)]
    del x
    answer.append(stats(*names))
    let_pass()
    y = bytes_of(1)  # at a malloc at the latest it is known
    answer.append(stats(*names))
    del y
    answer.append(stats(*names))
    return answer


@scenario()
def wrong_devices() -> Any:
    return [
        type_of_error(lambda: torch.cuda.memory_stats(99)),
        type_of_error(lambda: torch.cuda.memory_stats("cpu")),
        type_of_error(lambda: torch.cuda.reset_peak_memory_stats(99)),
        type_of_error(lambda: torch.cuda.set_per_process_memory_fraction(0.5, 99)),
        type_of_error(lambda: torch.cuda.set_per_process_memory_fraction(1.5)),
        type_of_error(lambda: torch.cuda.set_per_process_memory_fraction("half")),
        type_of_error(lambda: torch.cuda.mem_get_info(99)),
    ]
