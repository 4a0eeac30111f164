"""Work on several streams: when does memory that another stream reads serve again?

Nobody waits within a measurement, so the host runs far ahead of the GPU. What keeps memory until
it was read is what is compared, and called marks here: record_use, record_stream, by hand, or
nothing.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from common import MIB
from measuring import machine, ms_a_step, seconds_of, use_allocator


def mark(marks: str, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Says that `tensor` was used on `stream`; no marks of any other kind are made here."""
    if marks == "record_use":
        import esper_alloc

        esper_alloc.record_use(tensor, stream)
    elif marks == "record_stream":
        tensor.record_stream(stream)


class Base:
    """What is there before a measurement: an empty cache, and peaks from now on."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.active = torch.cuda.memory_stats()["active_bytes.all.current"]
        self.reserved = torch.cuda.memory_reserved()

    def peaks(self) -> dict[str, float]:
        """MiB over what was there."""
        stats = torch.cuda.memory_stats()
        return {
            "peak_over_base_mib": (stats["active_bytes.all.peak"] - self.active) / MIB,
            "reserved_mib": (stats["reserved_bytes.all.peak"] - self.reserved) / MIB,
        }


# --- weights, gathered on one stream and used on another ---------------------
#: Layers, width and rows of x: as they are measured, and to try them.
SHAPES = {"small": ((48, 4096, 8192), (4, 256, 512)), "large": ((8, 16384, 2048), (3, 512, 128))}
WARM_STEPS, TIMED_STEPS, CHECKED_STEPS = 2, 6, 3
BLOCKS = 10  # of TIMED_STEPS steps each


class Pipeline:
    """As FSDP's: each layer's weight is concatenated from two shards on a communication stream,
    layer i+1's before layer i is used. The compute stream waits for it, computes x = tanh(x @ w)
    and drops the weight."""

    def __init__(self, marks: str, layers: int, width: int, rows: int) -> None:
        self.compute = torch.cuda.current_stream()
        self.comm = torch.cuda.Stream()
        self.random: torch.Generator | None = None
        # Large enough that x keeps its scale, so a wrong weight shows at the end.
        scale = 1.5 / width**0.5
        self.shards = [
            tuple(self.normal(scale, width // 2, width) for _ in range(2)) for _ in range(layers)
        ]
        self.base = Base()
        self.x = self.normal(1.0, rows, width)
        self.views = marks == "views"  # a weight is a view of what was gathered
        self.marks = "record_use" if self.views else marks
        self.kept: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # by the recipe

    def normal(self, scale: float, *shape: int) -> torch.Tensor:
        """Numbers that are the same in each process."""
        if self.random is None:
            self.random = torch.Generator("cuda").manual_seed(1)
        made = torch.randn(shape, generator=self.random, device="cuda", dtype=torch.bfloat16)
        return made.mul_(scale)

    def whole(self, layer: int) -> torch.Tensor:
        """A layer's weight, made on the current stream."""
        return torch.cat(self.shards[layer])

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w)

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The whole weight, and the event after which it is there."""
        with torch.cuda.stream(self.comm):
            while len(self.kept) >= 2:  # the recipe: drop the oldest on this stream
                oldest, used = self.kept.popleft()
                self.comm.wait_event(used)
                del oldest
            w = self.whole(layer)
            if self.views:
                w = w.view(w.shape)
            return w, self.comm.record_event()

    def step(self, wait: bool = False, after: Callable[[], None] | None = None) -> torch.Tensor:
        """x after all layers. `wait`: the host waits for the GPU after each; `after` is
        called after each."""
        x = self.x
        coming = self.gather(0)
        for layer in range(len(self.shards)):
            w, ready = coming
            if layer + 1 < len(self.shards):
                coming = self.gather(layer + 1)
            self.compute.wait_event(ready)
            x = self.layer(x, w)
            if self.marks == "recipe":
                self.kept.append((w, self.compute.record_event()))
            mark(self.marks, w, self.compute)
            if wait:
                torch.cuda.synchronize()
            if after:
                after()
        return x

    def by_layer(self, steps: int) -> list[float]:
        """MiB active over the shards, after each layer of so many steps among which nobody
        waits."""
        found: list[float] = []

        def note() -> None:
            stats = torch.cuda.memory_stats_as_nested_dict()  # quick: the host shall stay ahead
            active = stats["active_bytes"]["all"]["current"] - self.base.active
            found.append(active / MIB)

        for _ in range(steps):
            self.step(after=note)
        return found


def pipeline(allocator: str, marks: str, layers: str, small: bool = False) -> dict[str, Any]:
    """step_ms: median over blocks of steps. by_layer: MiB over the shards after each layer of
    TIMED_STEPS steps. wrong: elements of x that differ from those of a step that waited."""
    use_allocator(allocator)
    with torch.set_grad_enabled(marks == "views"):
        job = Pipeline(marks, *SHAPES[layers][small])
        for _ in range(WARM_STEPS):
            job.step()
        times = [ms_a_step(job.step, TIMED_STEPS) for _ in range(2 if small else BLOCKS)]
        peaks = job.base.peaks()
        by_layer = job.by_layer(TIMED_STEPS)
        wanted = job.step(wait=True)
        if float(wanted.float().square().mean()) < 0.01:
            raise RuntimeError("x vanished on the way: a wrong weight would not show in it")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        (job.step() != wanted).sum()  # loads what the check needs
        torch.cuda.synchronize()
        for _ in range(CHECKED_STEPS):
            wrong += (job.step() != wanted).sum()
        figures = {"step_ms": statistics.median(times), "by_layer": by_layer, "wrong": int(wrong)}
    return {"machine": machine(), **figures, **peaks}


# --- batches, copied on a stream of their own --------------------------------
AHEAD = 2  # batches
PINNED = 4  # different batches in host memory
BATCHES, REPEATS = 100, 5
BATCH_SHAPE, SMALL_BATCH = (4096, 8192), (256, 512)  # in bf16: 64 MiB


class Prefetch:
    """Each batch is allocated on a copy stream and filled from pinned memory, two batches ahead of
    the compute stream, which waits for it, reads it first and last in its step, and drops it. By
    hand the copy stream waits for the compute stream before each copy."""

    def __init__(self, marks: str, layers: int, rows: int, width: int) -> None:
        self.marks = marks
        self.compute = torch.cuda.current_stream()
        self.copy = torch.cuda.Stream()
        shape = (rows, width)
        random = torch.Generator().manual_seed(1)
        numbers = (torch.randn(shape, generator=random) for _ in range(PINNED))
        self.pinned = [one.to(torch.bfloat16).pin_memory() for one in numbers]
        scale = 1.5 / width**0.5
        self.weights = [
            torch.randn((width, width), device="cuda", dtype=torch.bfloat16).mul_(scale)
            for _ in range(layers)
        ]
        self.figures = torch.zeros(BATCHES, dtype=torch.float64, device="cuda")

    def load(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Batch `index` on the GPU, and the event after which it is there."""
        if self.marks == "by_hand":
            self.copy.wait_stream(self.compute)
        with torch.cuda.stream(self.copy):
            batch = self.pinned[index % PINNED].to("cuda", non_blocking=True)
            return batch, self.copy.record_event()

    def work(self, index: int, batch: torch.Tensor) -> None:
        """Reads `batch` first and last, as a training step does."""
        out = batch
        for weight in self.weights:
            out = torch.tanh(out @ weight)
        self.figures[index] = torch.mul(out, batch).sum(dtype=torch.float32)

    def run(self, batches: int, wait: bool = False) -> None:
        """Loads and works on `batches`. `wait`: the host waits after each."""
        coming = deque(self.load(index) for index in range(min(AHEAD, batches)))
        for index in range(batches):
            batch, ready = coming.popleft()
            self.compute.wait_event(ready)
            self.work(index, batch)
            mark(self.marks, batch, self.compute)
            if wait:
                torch.cuda.synchronize()
            del batch
            if index + AHEAD < batches:
                coming.append(self.load(index + AHEAD))


def prefetch(allocator: str, marks: str, layers: int, small: bool = False) -> dict[str, Any]:
    """batch_ms: median of the repeats. wrong: figures that differ from a run that waited."""
    use_allocator(allocator)
    with torch.no_grad():
        job = Prefetch(marks, layers, *(SMALL_BATCH if small else BATCH_SHAPE))
        batches = 8 if small else BATCHES
        base = Base()
        job.run(min(10, batches))
        taken = [seconds_of(lambda: job.run(batches)) * 1e3 for _ in range(REPEATS)]
        peaks = base.peaks()
        job.run(batches, wait=True)
        wanted = job.figures.clone()
        job.figures.zero_()
        torch.cuda.synchronize()
        job.run(batches)
        torch.cuda.synchronize()
        wrong = int((job.figures != wanted).sum())
    return {
        "machine": machine(),
        "batch_ms": statistics.median(taken) / batches,
        **peaks,
        "wrong": wrong,
    }


# --- copies in and out, beside computation -----------------------------------
COLUMNS, STEP_BATCHES, PRODUCTS = 1024, 8, 6
#: The least and the most MiB of a tensor, streams that compute, steps in a block.
OVERLAPS = {
    "small": (4, 64, 1, 40),
    "four": (4, 64, 2, 40),
    "large": (256, 1024, 1, 12),
    "four-large": (256, 1024, 2, 12),
}


class Overlap:
    """A tensor is copied in on one stream, matrix products run over it on a second, and the result
    is copied out on a third. Each tensor is marked where it is used last, and dropped at once. The
    host waits after each step. Sizes are drawn anew for each batch, the same for everybody."""

    def __init__(self, marks: str, least: int, most: int, computing: int) -> None:
        self.least, self.most, self.marks = least, most, marks
        self.copy_in, self.copy_out = torch.cuda.Stream(), torch.cuda.Stream()
        self.compute = [torch.cuda.Stream() for _ in range(computing)]
        rows = most * MIB // (2 * COLUMNS)
        self.source = torch.zeros((rows, COLUMNS), dtype=torch.bfloat16, pin_memory=True)
        self.target = torch.empty_like(self.source, pin_memory=True)
        self.weight = torch.eye(COLUMNS, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        self.drawn = random.Random(1)

    def batch(self, index: int) -> None:
        rows = self.drawn.randint(self.least, self.most) * MIB // (2 * COLUMNS)
        compute = self.compute[index % len(self.compute)]
        with torch.cuda.stream(self.copy_in):
            x = torch.empty((rows, COLUMNS), dtype=torch.bfloat16, device="cuda")
            x.copy_(self.source[:rows], non_blocking=True)
        compute.wait_stream(self.copy_in)
        with torch.cuda.stream(compute):
            y = torch.empty_like(x)
            for _ in range(PRODUCTS):
                torch.mm(x, self.weight, out=y)
        mark(self.marks, x, compute)
        del x
        self.copy_out.wait_stream(compute)
        with torch.cuda.stream(self.copy_out):
            self.target[:rows].copy_(y, non_blocking=True)
        mark(self.marks, y, self.copy_out)

    def step(self) -> None:
        for index in range(STEP_BATCHES):
            self.batch(index)
        torch.cuda.synchronize()


def overlap(allocator: str, marks: str, sizes: str, small: bool = False) -> dict[str, Any]:
    """step_ms: the mean of the blocks."""
    use_allocator(allocator)
    least, most, computing, steps = OVERLAPS[sizes]
    if small:
        least, most, steps = 1, 4, 1
    with torch.no_grad():
        job = Overlap(marks, least, most, computing)
        base = Base()
        times = [ms_a_step(job.step, steps) for _ in range(4)]  # the first is to warm up
        peaks = base.peaks()
        return {"machine": machine(), "step_ms": statistics.mean(times[1:]), **peaks}


# --- within little memory ----------------------------------------------------
LEAST_STEPS = 3, 40  # to warm up, then timed


def run_within(
    make: Callable[[], Callable[[], object]], steps: tuple[int, int], limit: int | None
) -> dict[str, Any]:
    """Steps of what `make` makes, with so many bytes at the most. failed: 1 where memory ran
    out; then there is no step_ms. reserved: bytes at the peak."""
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    why = step_ms = None
    warm, timed = steps
    try:
        step = make()
        ms_a_step(step, warm)
        step_ms = ms_a_step(step, timed)
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
    stats = torch.cuda.memory_stats()
    return {
        "failed": int(why is not None),
        "why": why,
        "step_ms": step_ms,
        "reserved": torch.cuda.max_memory_reserved(),
        "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "limit_mib": limit / MIB if limit else None,
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
    }


def least(
    allocator: str, marks: str, limit: int | None = None, small: bool = False
) -> dict[str, Any]:
    """The pipeline of small layers within `limit` bytes."""
    use_allocator(allocator)
    with torch.no_grad():
        shape = SHAPES["small"][small]
        found = run_within(
            lambda: Pipeline(marks, *shape).step, (1, 2) if small else LEAST_STEPS, limit
        )
    return {"machine": machine(), **found}
