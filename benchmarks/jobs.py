"""Whole jobs: passes through the schedules of models.py."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from common import OURS
from measuring import (
    device_used_mib,
    driver_version,
    machine,
    memory_figures,
    nvidia_smi_used_mib,
    use_allocator,
)
from models import JOBS, Step, import_job


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
