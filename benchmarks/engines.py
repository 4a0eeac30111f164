"""PyTorch's own engines on one to four GPUs, under torchrun: DDP, FSDP2, and those beside them.

Everything repeats as far as PyTorch can make it: data, weights and the lengths of sequences have
seeds, and deterministic algorithms are asked for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import OURS, workers
from measuring import choose_allocator, machine, memory_figures, shares_a_gpu, use_gpu_of_rank
from topics import ENGINE_NAMES
from turns import end_with

if TYPE_CHECKING:
    from engine_steps import Engine, How

PATIENCE_S = 60.0  # for one collective
LIMIT_S = 280.0  # beside the soak
CPU_IS_BUSY = 10  # times as long where there is no GPU, as in tests
#: By these the ranks are told which engines are left, and where checkpoints lie.
LEFT, FOLDER = "ENGINES_LEFT", "ENGINES_FOLDER"


def lengths(steps: int, shortest: int, longest: int) -> list[int]:
    """Of the sequences of each step: multiples of 64, or of 8 where all are short."""
    draw = random.Random(11)
    unit = 64 if longest >= 512 else 8
    shortest = min(max(shortest // unit, 1) * unit, longest)
    return [draw.randrange(shortest, longest + 1, unit) for _ in range(steps)]


def untimed(steps: int) -> int:
    """The first steps, in which memory grows and NCCL connects."""
    return max(steps // 10, 1)


def conduct(engines: Sequence[str], ranks: int, limit: float) -> dict[str, Any]:
    """Lets torchrun start this command once for each rank; once more for the engines that are
    left, where one fails or hangs. All ends after `limit` s. What the first rank reported; "why"
    says what failed."""
    unknown = [one for one in engines if one not in ENGINE_NAMES]
    if unknown or ranks not in (1, 2, 4):
        wrong = f"no engine {unknown[0]!r}" if unknown else f"ranks={ranks}: 1, 2 or 4"
        raise SystemExit(f"{wrong}; the engines are {', '.join(ENGINE_NAMES)}")
    found: dict[str, Any] = {}
    why, left, end = "", [*engines], time.monotonic() + limit
    command = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    with tempfile.TemporaryDirectory() as folder:
        while left:
            process = subprocess.Popen(
                [sys.executable, *command, *sys.argv], text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, LEFT: ",".join(left), FOLDER: folder},
                preexec_fn=partial(end_with, os.getpid()),
            )  # fmt: skip
            assert process.stdout
            timer = threading.Timer(end - time.monotonic(), process.kill)
            timer.start()
            said = []
            for line in process.stdout:
                figures = workers.reported(line)
                found.update(figures or {})
                said += [line] * (figures is None)
            timer.cancel()
            if process.wait() == 0:
                break
            late = " by the end of its time" * (time.monotonic() > end)
            failed = next((one for one in left if f"{one} losses" not in found), left[-1])
            errors = [line for line in said if line.startswith("[rank")] or said
            why += f"{failed} failed{late}:\n{''.join(errors[-20:])}"
            left = [] if late else left[left.index(failed) + 1 :]
    if not found:
        raise SystemExit(why)
    return {**found, "why": why} if why else found


def measure(
    allocator: str,
    engines: Sequence[str],
    ranks: int,
    steps: int,
    shortest: int,
    device: str,
    activations: str = "none",
    soak: float = 0.0,
    bare: bool = False,
    small: bool = False,
) -> dict[str, Any]:
    """Figures, after the name of each engine. bare: without what FSDP2 keeps for other streams;
    shortest: tokens; soak: so many seconds of random lengths for all engines together."""
    if "RANK" not in os.environ:
        return conduct(engines, ranks, LIMIT_S * (1 if device == "cuda" else CPU_IS_BUSY) + soak)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with torchrun, which may be stopped
    import torch
    import torch.distributed as dist
    from engine_steps import MAKERS, How

    rank, cuda = int(os.environ["LOCAL_RANK"]), device == "cuda"
    if cuda:
        choose_allocator(allocator)  # before anything touches the GPU
        use_gpu_of_rank()
    patience = timedelta(seconds=PATIENCE_S * (1 if cuda else CPU_IS_BUSY))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    # Not warn_only: then the backward of flash attention would not repeat.
    torch.use_deterministic_algorithms(True)
    # Fresh memory is not filled: that would be work which no job has.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # cuDNN's attention does not repeat.
    torch.backends.cuda.enable_cudnn_sdp(False)
    about = machine() if cuda else {"gpu": "none"}
    of = "ranks on one" if shares_a_gpu() else "x"
    about["gpu"] = f"{ranks} {of} {about['gpu']}"
    for name in os.environ[LEFT].split(","):
        how = How(name, rank, ranks, device, small or not cuda, bare, activations,
                  Path(os.environ[FOLDER], name))  # fmt: skip
        torch.manual_seed(0)  # the same model everywhere
        figures = train(MAKERS[name](how), how, allocator, steps, shortest,
                        soak / len(engines))  # fmt: skip
        if rank == 0:
            found = {f"{name} {key}": value for key, value in figures.items()}
            workers.report({"machine": about, **found})
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of DDP and of gloo may end the way out by a signal


def train(
    engine: Engine, how: How, allocator: str, steps: int, shortest: int, soak: float
) -> dict[str, Any]:
    """Figures of all ranks: the largest, and some by rank."""
    import torch
    import torch.distributed as dist

    def settle() -> float:
        if how.cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    def held_back() -> float:
        if not how.cuda or allocator != OURS:
            return 0.0
        import esper_alloc

        return esper_alloc.memory_stats()["held_back_seconds"]

    def schedule() -> Iterator[int]:
        """Random lengths until time is over, of which all ranks hear every five steps."""
        over = torch.zeros(1, device=how.device)
        for number, length in enumerate(lengths(1_000_000, 1, engine.longest)):
            if number and number % 5 == 0:
                over.fill_(time.perf_counter() - begin > soak)
                dist.all_reduce(over)
                if over.item():
                    return
            yield length

    if how.cuda:
        torch.cuda.reset_peak_memory_stats()
    before = held_back()
    planned = (
        lengths(steps, shortest, engine.longest) if engine.varies else [engine.longest] * steps
    )
    warm = untimed(steps)
    losses = [engine.step(number, length) for number, length in enumerate(planned[:warm])]
    begin = settle()
    done = 0
    for number, length in enumerate(schedule() if soak else planned[warm:], warm):
        losses.append(engine.step(number, length))
        done += length
    took = settle() - begin
    figures = {**(memory_figures() if how.cuda else {}), "held_back_s": held_back() - before}
    sums = torch.stack(losses).double()
    dist.all_reduce(sums)
    everywhere: list[Any] = [None] * how.ranks
    dist.all_gather_object(everywhere, figures)
    by_rank = {key: [one[key] for one in everywhere] for key in figures}
    figures = {key: max(values) for key, values in by_rank.items()}
    mean = (sums / how.ranks).tolist()
    return {
        **figures, "tokens_s": engine.tokens * done / took, "by_rank": by_rank,
        "held_back_least_s": min(by_rank["held_back_s"]), "steps": len(losses),
        "losses": [] if soak else mean, "not_finite": sum(not abs(one) < 1e9 for one in mean),
    }  # fmt: skip
