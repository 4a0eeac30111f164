"""torch.multiprocessing with CUDA tensors: both ways, many, and who outlives whom."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ground import MiB, bytes_of, scenario, stats, type_of_error


def program(name: str) -> Any:
    """Runs share.py, whose processes use this one's allocator."""
    ours = torch.cuda.get_allocator_backend() != "native"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("share.py")), name],
        env={**os.environ, "ESPER_ALLOC": "1" if ours else "0"},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    complaints = [line for line in done.stderr.splitlines() if line.strip()]
    return [done.stdout.strip().splitlines()[-1:], complaints]


def by_processes(name: str) -> None:
    def run() -> Any:
        return program(name)

    run.__name__ = name
    scenario("gpu")(run)


for one in ("there_and_back", "thousands", "outlives", "comes_back", "writes"):
    by_processes(one)


@scenario()
def what_is_shared_looks_the_same() -> Any:
    """The tuple that travels, but for the handles in it."""
    _x = bytes_of(5000)
    y = bytes_of(3000)
    device, handle, size, offset, *_ = y.untyped_storage()._share_cuda_()
    segment = min(s["address"] for s in torch.cuda.memory_snapshot())
    return [device, type(handle).__name__, size, offset == y.data_ptr() - segment]


@scenario()
def what_is_no_memory_cannot_be_shared() -> Any:
    _x = bytes_of(3 * MiB)
    foreign = torch._C._construct_storage_from_data_pointer(4096 * 77, torch.device("cuda", 0), 512)
    return [type_of_error(foreign._share_cuda_), stats("allocation.all.current")]
