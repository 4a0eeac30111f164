"""Fresh processes that measure, one allocator each: of ``bench``, and of benchmarks/.

PyTorch's allocator is chosen once per process. So a command that compares allocators conducts:
it starts a process for each of them, in turn, round by round, and reads the line that it reports.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

OURS = "esper_alloc"
NATIVE = "native"
EXPANDABLE = "native, expandable"
ASYNC = "cudaMallocAsync"

#: What each allocator needs in the environment before torch is imported.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    OURS: {},
    NATIVE: {},
    EXPANDABLE: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ASYNC: {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
}

#: Variables that would choose another allocator, or tune one of PyTorch's.
FOREIGN = (
    "ESPER_ALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
)

_MARK = "benchmark-result: "

#: What was measured: figures by the name of the case, for each round.
Rounds = list[dict[str, dict[str, Any]]]


class WorkerFailed(RuntimeError):
    """A measuring process ended badly; the message holds the end of its output. `brief`: the
    same in one line."""

    def __init__(self, why: str, output: str = "") -> None:
        self.brief = ": ".join([why, *output.strip().splitlines()[-1:]])
        super().__init__(f"{why} and this output:\n{output[-3000:]}" if output else why)


def gpu_missing() -> str | None:
    """Why nothing can be measured on this machine, or None. Imports no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver of this machine finds no GPU"
    return None


def report(figures: Mapping[str, Any]) -> None:
    """Hands what a worker measured to the conductor."""
    print(_MARK + json.dumps(figures), flush=True)


def reported(line: str) -> dict[str, Any] | None:
    """The figures that a line of a worker's output reports, or None."""
    return json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None


def environment(
    chosen: Mapping[str, str], without: Iterable[str] = FOREIGN, **more: str
) -> dict[str, str]:
    """This process's environment without those variables, and with `chosen` and `more`."""
    kept = {key: value for key, value in os.environ.items() if key not in set(without)}
    return {**kept, **chosen, **more}


def run_worker(
    command: Sequence[str], variables: Mapping[str, str], timeout: float | None = None
) -> dict[str, Any]:
    """The figures that a fresh process reports. Raises WorkerFailed."""
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise WorkerFailed(f"no result within {timeout:.0f} s") from None
    if done.returncode == 0:
        for line in reversed(done.stdout.splitlines()):
            found = reported(line)
            if found is not None:
                return found
    raise WorkerFailed(f"exit status {done.returncode}", done.stdout + done.stderr)


def alternate(
    names: Sequence[str],
    rounds: int,
    measure: Callable[[int, str], dict[str, Any] | None],
    failed: Callable[[int, str, WorkerFailed], object],
    *,
    patience: int,
    another: Callable[[int], bool] = lambda _: True,
    each: Callable[[Rounds], object] = lambda _: None,
) -> Rounds:
    """Lets measure(round, name) measure each name once a round, in turn: A B C, A B C.

    A measurement that raises WorkerFailed is told to `failed`, and missing from its round; a
    name that failed `patience` times is not tried again. None is missing as well. Before each
    round but the first, another(round) says whether there is time for it. `each` is told after
    every measurement what there is so far.
    """
    measured: Rounds = []
    failures = dict.fromkeys(names, 0)
    for turn in range(rounds):
        if turn and not another(turn):
            break
        measured.append({})
        for name in names:
            if failures[name] >= patience:
                continue
            try:
                found = measure(turn, name)
            except WorkerFailed as error:
                failures[name] += 1
                failed(turn, name, error)
            else:
                if found is not None:
                    measured[-1][name] = found
                    each(measured)
    return measured
