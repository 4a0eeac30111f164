"""Whole jobs: passes through the schedules of models.py, and what works when memory is short."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import OURS, RMM
from measuring import (
    device_used_mib,
    driver_version,
    machine,
    memory_figures,
    nvidia_smi_used_mib,
    use_allocator,
)
from models import JOBS, SMALL, Shape, Step, gpt2, import_job, llama_trainer, varlen_schedule
from neighbour import Client
from streams import set_limit, survives

LIMIT = 20 << 30
IN_USE = 0.99
ROOM = 1.10  # of the job's peak, beside a neighbour ...
ROOM_THEN = 1.05  # ... and half way
SLACK = 64 << 20  # what the driver itself may want meanwhile
MOST = 1024  # sequences


def prepare(allocator: str, strict: bool = False) -> None:
    """The allocator, and settings under which a job repeats bit for bit; `strict` as
    in models.py."""
    use_allocator(allocator)
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # cuDNN's attention makes a plan for each new length, tens of ms of the host, and lengths
    # hardly repeat where a cache grows.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Fresh memory is not filled: that would be work which no job has.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)


def made(job: str, small: bool) -> tuple[Step, int]:
    """The step of a job, and how many a pass has."""
    return JOBS[job].make(small), JOBS[job].small_steps if small else JOBS[job].steps


def measure(allocator: str, job: str, small: bool = False) -> Iterator[dict[str, Any]]:
    """One process, of which each turn but the first is a pass through the schedule.

    The pass's step_ms and outputs, and the memory_figures() until then. Of the first
    pass also beyond_reserved_mib and smi_beyond_reserved_mib: what this process has
    of the device's memory at its end, less what is reserved then.
    """
    import_job(job)
    driver_version()
    yield {}
    others = nvidia_smi_used_mib()
    prepare(allocator, JOBS[job].strict)
    step, steps = made(job, small)
    for turn in itertools.count():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outputs = [step(number) for number in range(steps)]
        torch.cuda.synchronize()
        figures: dict[str, Any] = {
            "step_ms": (time.perf_counter() - begin) * 1e3 / steps,
            "outputs": [output.item().hex() for output in outputs],
            **memory_figures(),
        }
        if figures["retries"]:
            raise RuntimeError(
                "memory ran out beside the other workers: this GPU is too small for so many"
            )
        if turn == 0:
            check_segments(allocator)
            figures["machine"] = machine()
            smi = nvidia_smi_used_mib()
            if smi is not None and others is not None:
                taken = others + figures["reserved_mib"]
                figures["beyond_reserved_mib"] = device_used_mib() - taken
                figures["smi_beyond_reserved_mib"] = smi - taken
        yield figures


def check_segments(allocator: str) -> None:
    """Raises where ours has taken segments, and none of the kind that the environment asks for."""
    wanted = os.environ.get("ESPER_ALLOC_SEGMENTS")
    if allocator != OURS or wanted is None:
        return
    expandable = {bool(one.get("is_expandable")) for one in torch.cuda.memory_snapshot()}
    if expandable and (wanted == "mapped") not in expandable:
        raise RuntimeError(
            f"ESPER_ALLOC_SEGMENTS={wanted}, but no segment is {wanted}: this esper_alloc "
            "or this driver has no such segments"
        )


def record(
    allocator: str, job: str, path: str, passes: int = 1, small: bool = False
) -> dict[str, Any]:
    """So many passes with their history, which goes to `path`."""
    prepare(allocator, JOBS[job].strict)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    step, steps = made(job, small)
    for number in [*range(steps)] * passes:
        step(number)
    torch.cuda.synchronize()
    check_segments(allocator)
    torch.cuda.memory._dump_snapshot(path)
    return {"machine": machine(), **memory_figures()}


# --- little memory -----------------------------------------------------------
def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, 0 if none does: doubled until
    one does not fit, then bisected."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def trial(name: str, batch: int, small: bool) -> None:
    """Trains a new model for some steps of at most `batch` sequences."""
    torch.manual_seed(0)
    if name == "gpt2":
        step, schedule = gpt2(small, 256), [(batch,)] * 3
    else:
        shape = SMALL if small else Shape(longest=512)
        step, schedule = llama_trainer(shape), varlen_schedule(12, batch, shape.longest)
    for sizes in schedule:
        step(*sizes)
    torch.cuda.synchronize()


def find_batch(name: str, small: bool) -> dict[str, Any]:
    set_limit(LIMIT)

    def fits(batch: int) -> bool:
        why = survives(lambda: trial(name, batch, small))
        torch.cuda.empty_cache()
        return why is None

    return {"batch": largest(fits, 4 if small else MOST)}


def take(size: int) -> Any:
    """So many bytes, from this process's allocator."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def run_under_pressure(what: str, name: str, small: bool) -> dict[str, Any]:
    """failed: 1 where memory ran out; then there is no step_ms."""
    if what == "tight":
        set_limit(LIMIT)
    step, steps = made(name, small)
    for number in range(steps):
        step(number)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()  # what was live at the most: as asked for, where it is known
    peak = int(stats.get("requested_bytes.all.peak") or torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
    took: list[float] = []

    def again(half_way: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(steps):
            if number == steps // 2:
                half_way()
            step(number)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) * 1e3 / steps)

    def tight() -> None:
        beside = take(int(LIMIT * IN_USE) - peak)
        again(lambda: None)
        del beside

    def neighbour() -> None:
        with Client() as other:

            def leave(room: float) -> None:
                torch.cuda.synchronize()
                other.leave(max(int(room * peak) - torch.cuda.memory_reserved(), 0) + SLACK)

            leave(ROOM)
            again(lambda: leave(ROOM_THEN))

    why = survives(tight if what == "tight" else neighbour)
    return {"failed": int(why is not None), "why": why, "step_ms": took[0] if took else None}


def limits(allocator: str, what: str, job: str, small: bool = False) -> dict[str, Any]:
    prepare(allocator)
    found = find_batch(job, small) if what == "batch" else run_under_pressure(what, job, small)
    check_segments(allocator)
    return {"machine": machine(), **found, "left_out": {RMM: "it knows no memory fraction"}}
