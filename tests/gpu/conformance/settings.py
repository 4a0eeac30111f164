"""Options at run time, and what the snapshot says of them."""

from typing import Any

import torch
from ground import MiB, bytes_of, error_of, scenario, stats, type_of_error

REJECTED = ("num_alloc_retries", "num_ooms", "num_oom_rejections", "segment.all.current")


def put(text: str) -> None:
    torch.cuda.memory._set_allocator_settings(text)


def shown() -> dict[str, Any]:
    return torch.cuda.memory._snapshot()["allocator_settings"]


@scenario()
def shown_in_the_snapshot() -> Any:
    answer = [shown()]
    put("max_split_size_mb:64,roundup_power2_divisions:4")
    answer.append(shown())
    put("garbage_collection_threshold:0.8")
    answer.append(shown())
    put("")
    return [*answer, shown()]


@scenario()
def they_act_at_once() -> Any:
    put("roundup_power2_divisions:4")
    x = bytes_of(5 * MiB + 1)
    rounded = stats("allocated_bytes.all.current")
    put("max_split_size_mb:100")
    split = shown()["max_split_size"]
    del x
    y = bytes_of(5 * MiB + 1)  # each parse resets the rest
    plain = stats("allocated_bytes.all.current")
    put("")
    del y
    return [rounded, split, plain, shown()["max_split_size"]]


@scenario()
def wrong_ones() -> Any:
    answers = [
        type_of_error(lambda text=text: put(text))
        for text in (
            "nonsense:1", "max_split_size_mb:1", "max_split_size_mb:x", "max_split_size_mb",
            "garbage_collection_threshold:2", "roundup_power2_divisions:3",
            "per_process_memory_fraction:2", "backend:cudaMallocAsync",
        )
    ]  # fmt: skip
    put("")
    x = bytes_of(1000)
    return [answers, x.numel(), shown()["max_split_size"]]


@scenario()
def all_names_are_accepted() -> Any:
    answers = {}
    for text in (
        "max_split_size_mb:64", "max_non_split_rounding_mb:64", "large_segment_size_mb:40",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "garbage_collection_threshold:0.5",
        "expandable_segments:False", "release_lock_on_cudamalloc:True",
        "graph_capture_record_stream_reuse:False", "pinned_use_cuda_host_register:False",
        "pinned_num_register_threads:2", "pinned_use_background_threads:False",
        "per_process_memory_fraction:1.0",
    ):  # fmt: skip
        answers[text] = type_of_error(lambda text=text: put(text))
        x = bytes_of(3 * MiB)
        del x
    return answers


@scenario()
def the_native_backend_may_be_named() -> Any:
    """Though the current allocator has another name. Another back end is refused, and
    what else the settings say is checked as ever."""
    answer = []
    for way in (put, torch._C._accelerator_setAllocatorSettings):
        for text in (
            "backend:native", "backend:native,max_split_size_mb:64", "max_split_size_mb:72,backend:native",
            "max_split_size_mb:80,backend:native,roundup_power2_divisions:4", "backend:native,backend:native",
            " backend : native , max_split_size_mb : 88", "backend:native,max_split_size_mb:1",
            "backend:native,nonsense:1", "backend:cudaMallocAsync,max_split_size_mb:100",
            "backend:native,backend:cudaMallocAsync", "backend:nonsense", "backend:[native]", "backend",
        ):  # fmt: skip
            answer.append([text, type_of_error(lambda: way(text)), shown()])  # noqa: B023
    put("backend:native,roundup_power2_divisions:4")
    x = bytes_of(5 * MiB + 1)
    answer.append(stats("allocated_bytes.all.current"))
    del x
    put("")
    return [answer, error_of(lambda: put("backend:native,per_process_memory_fraction:2"))]


@scenario()
def growth_is_rejected() -> Any:
    """throw_on_cudamalloc_oom, which PyTorch 2.11 does not know yet."""
    unit = int(torch.cuda.mem_get_info()[1] // 500)
    answer: list[Any] = [
        type_of_error(lambda: put("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.06"))
    ]
    if answer == [None]:
        x, y = bytes_of(10 * unit), bytes_of(15 * unit)
        del y
        answer.append([error_of(lambda: bytes_of(20 * unit)), stats(*REJECTED)])
        y = bytes_of(15 * unit)
        answer.append(stats(*REJECTED))
        del x, y
        put("throw_on_cudamalloc_oom:False,per_process_memory_fraction:1.0")
    return answer
