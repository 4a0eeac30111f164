"""Prefetching: batches are copied from pinned memory on a stream of their own.

Each batch, 4096 x 8192 in bf16 (64 MiB), is allocated and filled on a copy
stream, two batches ahead of the compute stream, which waits for it, reads it
first and last in its step, and drops it. Two jobs: one in which computing
takes longer than copying, and one in which copying does. What keeps the memory
until it was read is what is compared:

  record_stream  native's own; also left as it is under esper_alloc
  by hand        the copy stream waits for the compute stream before each copy
  record_use     one line, after the last read; also with an allowance of a batch
  automatic uses no line: every operator is seen

Nobody waits within a measurement. Peaks are of active_bytes over what was
active before the first batch. Afterwards batches run once more, and the figure
that each gives is compared with that of a run in which each was waited for.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    machine,
    nothing_measurable,
    parser,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
AHEAD = 2  # batches
ROWS, WIDTH = 4096, 8192
PINNED = 4  # different batches in host memory
BATCHES = 100  # a measurement
REPEATS = 5
TIGHT = "esper_alloc, record_use, allowance 64MiB"
ALLOWANCE = 128  # MiB, the default
JOBS = {"compute-bound": 4, "copy-bound": 0}  # layers between the first read and the last

CASES = [
    Case("native, record_stream", NATIVE, ("--protection", "record_stream")),
    Case("native, by hand", NATIVE, ("--protection", "by_hand")),
    Case("esper_alloc, record_use", OURS, ("--protection", "record_use")),
    Case(TIGHT, OURS, ("--protection", "record_use"), {"ESPER_ALLOC_ALLOWANCE": "64MiB"}),
    Case("esper_alloc, record_stream", OURS, ("--protection", "record_stream")),
    Case(
        "esper_alloc, automatic uses",
        OURS,
        ("--protection", "none"),
        {"ESPER_ALLOC_USES": "automatic"},
    ),
]


class Prefetch:
    """Batches in pinned memory, two streams, and the work on a batch."""

    def __init__(self, protection: str, layers: int, rows: int, width: int) -> None:
        import torch

        self.protection = protection
        self.compute = torch.cuda.current_stream()
        self.copy = torch.cuda.Stream()
        self.shape = (rows, width)
        random = torch.Generator().manual_seed(1)
        self.pinned = []
        for _ in range(PINNED):
            host = torch.empty(self.shape, dtype=torch.bfloat16, pin_memory=True)
            self.pinned.append(host.copy_(torch.randn(self.shape, generator=random)))
        scale = 1.5 / width**0.5
        self.weights = [
            torch.randn((width, width), device="cuda", dtype=torch.bfloat16).mul_(scale)
            for _ in range(layers)
        ]
        self.figures = torch.zeros(BATCHES, dtype=torch.float64, device="cuda")

    def load(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Batch `index` on the GPU, and the event after which it is there."""
        import torch

        if self.protection == "by_hand":
            self.copy.wait_stream(self.compute)
        with torch.cuda.stream(self.copy):
            batch = self.pinned[index % PINNED].to("cuda", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self.copy)
        return batch, ready

    def work(self, index: int, batch: torch.Tensor) -> None:
        """Reads `batch` first and last, as a training step does."""
        import torch

        out = batch
        for weight in self.weights:
            out = torch.tanh(out @ weight)
        self.figures[index] = torch.mul(out, batch).sum(dtype=torch.float32)

    def run(self, batches: int, wait: bool = False) -> None:
        """Loads and works on `batches`. `wait`: the host waits after each."""
        import torch

        coming = deque(self.load(index) for index in range(min(AHEAD, batches)))
        for index in range(batches):
            batch, ready = coming.popleft()
            self.compute.wait_event(ready)
            self.work(index, batch)
            if self.protection == "record_stream":
                batch.record_stream(self.compute)
            elif self.protection == "record_use":
                import esper_alloc

                esper_alloc.record_use(batch, self.compute)
            if wait:
                torch.cuda.synchronize()
            del batch
            if index + AHEAD < batches:
                coming.append(self.load(index + AHEAD))


def measure(allocator: str, protection: str, job: str, small: bool) -> dict:
    """One process: ms a batch (median of the repeats), MiB, and wrong figures."""
    use_allocator(allocator)
    import torch

    with torch.no_grad():
        prefetch = Prefetch(protection, JOBS[job], *((256, 512) if small else (ROWS, WIDTH)))
        batches = 8 if small else BATCHES
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_stats()["active_bytes.all.current"]
        reserved_base = torch.cuda.memory_reserved()
        prefetch.run(min(10, batches))
        torch.cuda.synchronize()
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            prefetch.run(batches)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3 / batches)
        stats = torch.cuda.memory_stats()
        prefetch.run(batches, wait=True)
        wanted = prefetch.figures.clone()
        prefetch.figures.zero_()
        torch.cuda.synchronize()
        prefetch.run(batches)
        torch.cuda.synchronize()
        return {
            "machine": machine(),
            "batch_ms": statistics.median(times),
            "peak_over_base_mib": (stats["active_bytes.all.peak"] - base) / MIB,
            "reserved_mib": (stats["reserved_bytes.all.peak"] - reserved_base) / MIB,
            "wrong": int((prefetch.figures != wanted).sum()),
        }


def add_rows(results: Results, job: str, rounds: Rounds) -> None:
    for name, unit, key, peer, goal, judged in (
        ("time a batch", "ms", "batch_ms", "record_stream", 1.02, "mean_ratio"),
        ("time a batch", "ms", "batch_ms", "by hand", None, "ratio"),
        ("peak active over base", "MiB", "peak_over_base_mib", "record_stream", 1.0, "ratio"),
        ("peak active over base", "MiB", "peak_over_base_mib", "by hand")
        + (ALLOWANCE, "difference"),
        ("reserved over base", "MiB", "reserved_mib", "record_stream", None, "ratio"),
        ("reserved over base", "MiB", "reserved_mib", "by hand", None, "ratio"),
        ("figures that differ from a run that waited", "figures", "wrong", "record_stream")
        + (0.0, "ours"),
    ):
        results.compare(
            f"{job}: {name}",
            unit,
            rounds,
            key,
            "esper_alloc, record_use",
            f"native, {peer}",
            goal,
            judged,
        )
    # The newest two blocks are spared, which are more than this allowance: no goal for memory.
    for name, unit, key, goal, judged in (
        ("time a batch", "ms", "batch_ms", 1.02, "mean_ratio"),
        ("peak active over base", "MiB", "peak_over_base_mib", None, "ratio"),
        ("reserved over base", "MiB", "reserved_mib", None, "ratio"),
    ):
        peer = "native, by hand"
        title = f"{job}, allowance 64MiB: {name}"
        results.compare(title, unit, rounds, key, TIGHT, peer, goal, judged)
    for title, case in (
        ("record_stream", "esper_alloc, record_stream"),
        ("nothing marked", "esper_alloc, automatic uses"),
    ):
        for name, unit, key, goal, judged in (
            ("time a batch", "ms", "batch_ms", 1.01, "mean_ratio"),
            ("peak active over base", "MiB", "peak_over_base_mib", ALLOWANCE, "difference"),
            ("reserved over base", "MiB", "reserved_mib", None, "ratio"),
            ("figures that differ from a run that waited", "figures", "wrong", 0.0, "ours"),
        ):
            results.compare(
                f"{job}, {title}: {name}", unit, rounds, key, case, "native, by hand", goal, judged
            )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--protection", default="record_use")
    arguments.add_argument("--job", choices=JOBS, action="append", help="default: both")
    arguments.add_argument("--small", action="store_true", help="tiny batches: to try the script")
    options = arguments.parse_args()
    jobs = options.job or list(JOBS)
    if options.worker:
        take_turns(
            in_children(
                options.worker,
                lambda: measure(options.worker, options.protection, jobs[0], options.small),
            )
        )
        return 0

    if nothing_measurable():
        return 1
    results = Results("prefetch", options.out)
    for job in jobs:
        extra = ("--job", job, *(("--small",) if options.small else ()))
        cases = [replace(case, args=(*case.args, *extra)) for case in CASES]
        seconds = options.seconds / len(jobs)
        if not results.of_rounds(
            partial(turns_of_children, __file__, cases, options.rounds, seconds=seconds),
            partial(add_rows, results, job),
            ours=None,
        ):
            print(f"{job}: nothing was measured")
            return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
