"""What a measuring process asks and is told: its allocator, and what that took."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common import ASYNC, CAPTURE_REUSE, MIB, NATIVE, OURS, ROOT, workers

#: What each allocator needs in the environment before torch is imported.
ENVIRONMENTS = {
    **workers.ENVIRONMENTS,
    CAPTURE_REUSE: {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"},
}


def choose_allocator(name: str) -> None:
    """Makes `name` the allocator of this process, which has not used CUDA yet."""
    if name == OURS:
        import esper_alloc

        esper_alloc.enable()
        if not esper_alloc.is_enabled():
            raise RuntimeError("esper_alloc.enable() returned, but it is not enabled")
    elif name not in ENVIRONMENTS:
        raise ValueError(f"unknown allocator {name!r}; known: {', '.join(ENVIRONMENTS)}")


def use_allocator(name: str) -> None:
    """The same, and initialises CUDA. Raises RuntimeError where another one is in use."""
    import torch

    choose_allocator(name)
    torch.cuda.init()
    if name != OURS:
        backend = torch.cuda.get_allocator_backend()
        expected = ASYNC if name == ASYNC else NATIVE
        if backend != expected:
            raise RuntimeError(f"asked for {name}, but torch runs on {backend!r}")


def shares_a_gpu() -> bool:
    """Whether all ranks use one GPU: ESPER_ONE_GPU=1. NCCL, which refuses a second rank of a host on
    a GPU, then takes each for a host of its own, and messages go by sockets: good for outputs and
    memory, and not for times."""
    return os.environ.get("ESPER_ONE_GPU") == "1"


def use_gpu_of_rank() -> None:
    """The GPU of a process that torchrun started: its own, or the first one for all."""
    import torch

    if shares_a_gpu() and "RANK" in os.environ:
        os.environ.update(
            NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", LOCAL_RANK="0"
        )  # fmt: skip
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def memory_figures() -> dict[str, float]:
    """MiB of this process: allocated and reserved at the most; and mallocs that needed a second
    try."""
    import torch

    return {
        "peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def device_used_mib() -> float:
    """What is in use of the device, by everybody, as the driver says."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def machine() -> dict[str, str]:
    """The GPU, driver and torch of this process, for the result file."""
    import torch

    name = torch.cuda.get_device_name(0)
    return {"gpu": name, "driver": driver_version(), "torch": torch.__version__}


@functools.cache
def driver_version() -> str:
    """As nvidia-smi says it, which takes long enough to ask once, before children are forked."""
    command = "nvidia-smi --query-gpu=driver_version --format=csv,noheader".split()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def example(name: str) -> Any:
    """A program of examples/, as a module."""
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


def seconds_of(work: Callable[[], object]) -> float:
    """What it takes, from an idle device to an idle device."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def ms_a_step(step: Callable[[], object], steps: int) -> float:
    """Milliseconds of one of so many steps, among which nobody waits."""

    def work() -> None:
        for _ in range(steps):
            step()

    return seconds_of(work) * 1e3 / steps
