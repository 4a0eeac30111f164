"""Whole jobs: passes through the schedules of models.py."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from common import OURS
from measuring import driver_version, machine, memory_figures, use_allocator
from models import JOBS, import_job


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


def measure(
    allocator: str, job: str, small: bool = False, watched: bool = False
) -> Iterator[dict[str, Any]]:
    """One process, of which each turn but the first is a pass through the schedule.

    The pass's step_ms and outputs, and the memory_figures() until then. `watched`: by `top`.
    """
    import_job(job)
    driver_version()
    yield {}
    prepare(allocator, JOBS[job].strict)
    top = None
    if watched:
        command = [sys.executable, "-m", "esper_alloc", "top", str(os.getpid())]
        top = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # it ends with this process
    step, steps = JOBS[job].make(small), JOBS[job].small_steps if small else JOBS[job].steps
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
        if top is not None and top.poll() is not None:
            raise RuntimeError(f"nobody watched: `top` ended with status {top.returncode}")
        if figures["retries"]:
            raise RuntimeError(
                "memory ran out beside the other workers: this GPU is too small for so many"
            )
        if turn == 0:
            check_segments(allocator)
            figures["machine"] = machine()
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
