"""What calls of the allocator take on the host: alone, among many live blocks, from many threads,
in recorded jobs, and at first; and what it takes to write their history. Hardly anything runs on
the GPU meanwhile."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import loops
import torch
from common import NATIVE, ROOT, percentile
from measuring import choose_allocator, device_used_mib, machine, use_allocator

TENSOR = 4096  # bytes


# --- a malloc and its free ---------------------------------------------------
def empty_ns(count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        torch.empty(TENSOR // 4, device="cuda")
    return (time.perf_counter() - begin) * 1e9 / count


def pairs(allocator: str) -> dict[str, Any]:
    """ns of each; what is allocated is dropped at once."""
    use_allocator(allocator)
    timed = {
        f"raw_alloc + raw_delete, {name}": partial(loops.call, "pair_ns", size)
        for name, size in (("512 B", 512), ("1 MiB", 1 << 20), ("64 MiB", 64 << 20))
    }
    timed["torch.empty and drop, 4 KiB"] = empty_ns
    figures: dict[str, Any] = {"machine": machine()}
    for name, ns in timed.items():
        ns(5000)
        figures[name] = statistics.median(ns(20000) for _ in range(15))
    return figures


# --- from many threads -------------------------------------------------------
def threads(allocator: str, most: int, milliseconds: int) -> dict[str, Any]:
    """Million pairs a second, the median of three, of at most `most` threads, each on a stream of
    its own. Handed on: the next thread frees a block; up to 16 are on the way."""
    use_allocator(allocator)
    figures: dict[str, Any] = {}
    for name, size in (("4 KiB", 4096), ("1 MiB", 1 << 20)):
        for kind, handing in (("pairs", False), ("pairs, handed on", True)):
            for count in (1, 4, 16):
                if handing < count <= most:
                    rates = [
                        loops.call("pairs_rate", count, size, handing, milliseconds)
                        for _ in range(3)
                    ]
                    figures[f"{kind}, {name}, {count} threads"] = statistics.median(rates)
    about = {**machine(), "cores": str(len(os.sched_getaffinity(0)))}
    return {"machine": about, **figures}


# --- among many live blocks --------------------------------------------------
LEAST = 9  # all blocks have 2^9 bytes or more
#: How many blocks, of up to 2^most bytes, and the power of u by which the exponent is drawn.
SETTINGS = (*((live, 23, 2) for live in (100, 1_000, 10_000, 100_000)), (1_000_000, 16, 1))


def churn(allocator: str, most: int, operations: int) -> dict[str, Any]:
    """ns of a free and a malloc in its place, of each setting of at most `most` blocks; 100,000
    take 44 GiB."""
    use_allocator(allocator)
    figures: dict[str, Any] = {"machine": machine()}
    for live, exponent, power in SETTINGS:
        if live > most:
            continue
        how = (LEAST, exponent, power, operations)
        size = f"{2**exponent >> 20} MiB" if exponent >= 20 else f"{2**exponent >> 10} KiB"
        figures[f"{live:,} live blocks up to {size}: ns"] = statistics.median(
            loops.churn(live, *how, rounds=5, longest=0.3)
        )
        torch.cuda.empty_cache()
    return figures


# --- in recorded jobs --------------------------------------------------------
REPETITIONS = 7


def run_figures(runs: Sequence[Sequence[int]], prefix: str) -> dict[str, float]:
    """Medians over runs of what each run's mallocs took: us."""
    return {
        f"{prefix}_median_us": statistics.median(percentile(one, 0.5) for one in runs) / 1e3,
        f"{prefix}_slow_us": statistics.median(percentile(one, 0.999) for one in runs) / 1e3,
        f"{prefix}_sum_us": statistics.median(sum(one) for one in runs) / 1e3,
    }


@functools.cache
def whole_jobs(*files: str) -> dict[str, Any]:
    """The recorded jobs that are whole and on one device, by the names of their files; by default
    those that come along. Raises ValueError where there is none."""
    from esper_alloc.replay import replay

    folders = (ROOT / "examples" / "traces", ROOT / "tests" / "traces")
    come_along = [path for folder in folders for path in folder.glob("*.pickle.gz")]
    paths = [Path(one) for one in files if one] or come_along
    found = {}
    for path in paths:
        jobs = [recording.operations for recording in replay.load_recordings(path)]
        if len(jobs) == 1 and not jobs[0].start:
            found[path.name.split(".")[0]] = jobs[0]
    if not found:
        raise ValueError("none of these is a whole job on one device")
    return found


def before_malloc_times(files: Sequence[str] = ()) -> None:
    """Reads the jobs once, for all children."""
    whole_jobs(*files)


def malloc_times(allocator: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """JOB: whole_... from an emptied cache, so memory comes from the device on the way; JOB:
    warm_... the same again, with the memory that is there."""
    use_allocator(allocator)
    torch.zeros(1, device="cuda")
    figures: dict[str, Any] = {"machine": machine()}
    for name, job in whole_jobs(*files).items():
        run = partial(loops.times_ns, job.packed, job.slots, max(job.streams, 1))
        whole = []
        for _ in range(REPETITIONS):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            whole.append(run())
        found = run_figures(whole, "whole")
        found |= run_figures([run() for _ in range(REPETITIONS)], "warm")
        torch.cuda.empty_cache()
        figures |= {f"{name}: {key}": value for key, value in found.items()}
    return figures


# --- the first of a process --------------------------------------------------
def first(allocator: str) -> dict[str, Any]:
    """Milliseconds and MiB of this process, in which CUDA was not used before."""
    choose_allocator(allocator)
    torch.cuda.init()
    torch.cuda.synchronize()  # makes the context
    figures: dict[str, Any] = {"idle_mib": device_used_mib()}
    begin = time.perf_counter()
    x = torch.empty(1 << 20, device="cuda")  # 4 MiB
    allocated = time.perf_counter()
    x.fill_(1.0)
    torch.cuda.synchronize()
    figures["first_ms"] = (time.perf_counter() - begin) * 1e3
    figures["first_allocation_us"] = (allocated - begin) * 1e6
    return {"machine": machine(), **figures}


# --- writing what the calls were ---------------------------------------------
def written(allocator: str, events: int, small: bool = False) -> dict[str, Any]:
    """Mallocs and frees among 1,000 live blocks of up to 1 MiB, `events` together, without stacks:
    s to write their history to a file, bytes an event, and s to read it and make a page of it."""
    events = 20_000 if small else events
    use_allocator(allocator)
    torch.zeros(1, device="cuda")
    if allocator == NATIVE:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=events)
    loops.churn(1_000, LEAST, 20, 2, events // 4, rounds=1, longest=60.0)  # and one before
    figures: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "history")
        begin = time.perf_counter()
        if allocator == NATIVE:
            torch.cuda.memory._dump_snapshot(str(path))
            count = events
        else:
            import esper_alloc

            esper_alloc.black_box(path)
        figures["write_s"] = time.perf_counter() - begin
        if allocator != NATIVE:
            count, figures["page_s"] = page_seconds(path)
        figures["bytes_an_event"] = os.path.getsize(path) / count
    torch.cuda.empty_cache()
    return figures


def page_seconds(path: Path) -> tuple[int, float]:
    """How many events a black box has; s to read it and write the page that shows it."""
    from esper_alloc.recorder.reading import load_black_box
    from esper_alloc.view.page import write_page

    begin = time.perf_counter()
    recording = load_black_box(path)
    write_page(recording, path.with_suffix(".html"))
    return len(recording), time.perf_counter() - begin
