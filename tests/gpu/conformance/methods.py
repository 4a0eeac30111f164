"""What C++ programs alone reach: trackers, observers, sizes (methods.cpp)."""

import ctypes
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ground import MiB, bytes_of, scenario, type_of_error

HERE = Path(__file__).resolve().parent
MOST = 1000
ANNOTATE = 9  # of c10::CachingDeviceAllocator::TraceEntry::Action


@functools.cache
def library() -> ctypes.CDLL:
    sys.path.insert(0, str(HERE.parents[1] / "shim"))  # before the package of that name
    import build

    package = Path(torch.__file__).parent
    cuda = build.cuda_headers()
    assert cuda is not None, "no CUDA headers"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "methods.so"
        subprocess.run(
            [
                *shlex.split(os.environ.get("CXX") or "c++"),
                "-std=c++20",
                "-O0",
                "-shared",
                "-fPIC",
                "-o",
                made,
            ]
            + [HERE / "methods.cpp", f"-I{package / 'include'}", f"-I{cuda}"]
            + [f"-L{package / 'lib'}", "-lc10_cuda", "-lc10"],
            check=True,
        )
        return ctypes.CDLL(str(made))


def rows_of(function: Callable[..., int], *arguments: int) -> list[list[int]]:
    room = (ctypes.c_longlong * (4 * MOST))()
    count = function(*arguments, room)
    return [list(room[4 * i : 4 * i + 4]) for i in range(count)]


@functools.cache
def tracked() -> ctypes.CDLL:
    library().track()  # for good
    return library()


@scenario()
def trackers_are_told_of_pools() -> Any:
    pool = torch.cuda.MemPool()
    take = tracked().take_told
    rows_of(take)
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(12 * MiB - 7)
    y = bytes_of(1000)
    del x, y
    alloc, requested, completed = 0, 1, 2
    return [
        [action, size, (first, second) == pool.id]
        for action, size, first, second in rows_of(take)
        if action in (alloc, requested, completed)
    ]


@scenario()
def trackers_are_told_of_annotations() -> Any:
    """Whether or not anything is recorded, or recorded of them."""
    annotate = getattr(torch.cuda.memory, "_annotate_tensor", None)
    if annotate is None:
        return None
    pool = torch.cuda.MemPool()
    take = tracked().take_told
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(12 * MiB - 7)
    y = bytes_of(1000)
    answer = []
    record = torch.cuda.memory._record_memory_history
    for start in (lambda: None, record, lambda: record(skip_actions=["annotate"])):
        start()
        rows_of(take)
        annotate(x, "mine")
        annotate(y, "yours")
        answer.append([[a, size, (p, q) == pool.id] for a, size, p, q in rows_of(take)])
        record(enabled=None)
    assert answer[0][0][0] == ANNOTATE
    return answer


@scenario()
def observers_are_told_of_rejections() -> Any:
    if not library().watch_rejections():
        return None
    torch.cuda.memory._set_allocator_settings(
        "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.25"
    )
    total = torch.cuda.mem_get_info()[1]
    size = total // 2 // (32 * MiB) * 32 * MiB
    error, told = type_of_error(lambda: bytes_of(size)), rows_of(library().take_rejected)
    for _ in range(500):  # native's may be told a little later
        if told:
            break
        time.sleep(0.01)
        told = rows_of(library().take_rejected)
    answer: list[Any] = [error, told]
    torch.cuda.memory._set_allocator_settings("")
    assert len(answer[1]) == 1
    answer.append(answer[1][0][1] == size)
    x = bytes_of(size // 8)
    return [*answer, x.numel() == size // 8, rows_of(library().take_rejected)]


@scenario()
def sizes_of_expandable_segments() -> Any:
    """All that the snapshot shows as such: none, where segments are classic."""
    side = torch.cuda.Stream()
    x, small = bytes_of(12 * MiB), bytes_of(1000)
    with torch.cuda.stream(side):
        y = bytes_of(30 * MiB)
    found: dict[tuple[int, bool], int] = {}
    for stream, is_small, size, _ in rows_of(library().expandable_sizes, 0):
        found[stream, bool(is_small)] = found.get((stream, bool(is_small)), 0) + size
    shown: dict[tuple[int, bool], int] = {}
    for segment in torch.cuda.memory_snapshot():
        if segment["is_expandable"]:
            key = (segment["stream"], segment["segment_type"] == "small")
            shown[key] = shown.get(key, 0) + segment["total_size"]
    del x, y, small
    return [
        found == shown,
        rows_of(library().expandable_sizes, 1) if torch.cuda.device_count() > 1 else [],
    ]


@scenario()
def segments_are_numbered_by_their_birth() -> Any:
    """The numbers by which NCCL orders its registration, the same in every rank."""
    pool = torch.cuda.MemPool()
    sizes = (30, 12, 42, 0.5, 18)
    with torch.cuda.use_mem_pool(pool):
        live = [bytes_of(int(size * MiB)) for size in sizes]
    rows = rows_of(library().segments_of_pool, *map(ctypes.c_longlong, pool.id))
    rows.sort(key=lambda row: row[2])
    places = {address: i for i, (address, *_) in enumerate(rows)}
    return [
        [size for _, size, _, _ in rows],
        all(number >= 0 for _, _, number, _ in rows),
        [places.get(x.data_ptr()) for x in live],
    ]
