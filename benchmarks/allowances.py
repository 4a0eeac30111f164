"""Allowances beside each other, on jobs with cross-stream uses.

  pipeline  the FSDP-like steps of pipeline.py
  prefetch  the batches of prefetch.py, compute-bound
  churn     blocks of 0.5 to 32 MiB on four streams, each read late on another
            stream, marked, and dropped at random among 40 live ones

For each allocation of a job's own two figures are taken, and the 99.9th
percentile shown:

  malloc time  what torch.empty took on the host, Python included
  GPU stall    between an event recorded on the stream right before the
               allocation and one right after it. There is no work between them,
               so where the host is ahead this is next to nothing. A stream that
               ran out of work while the host was held back, or for another
               reason, waits for the host: the call's own time is included.

Both are of a second run of the job, which finds the first one's memory cached.
Beside them: time a step, how often and how long the host was held back in the second run, how
often in vain, and over both runs the peak of active and reserved memory over what was there before.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common import (
    OURS,
    Case,
    Results,
    machine,
    nothing_measurable,
    parser,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
#: The first is the default; the others are compared with it.
ALLOWANCES = ("128MiB", "0", "64MiB", "256MiB", "512MiB", "off")
HELD_BACK = ("held_back", "held_back_seconds", "held_back_in_vain")
CHURN_STREAMS = 4
CHURN_LIVE = 40
CHURN_MALLOCS = 12_000
CHURN_SLEEP = 60_000  # cycles, on average


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Meter:
    """Allocates, and notes how long the host and the stream took over it."""

    def __init__(self, most: int) -> None:
        import torch

        self.most = most
        self.events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(most)
        ]
        for pair in self.events:  # events are made at their first record
            for event in pair:
                event.record()
        self.host_ns: list[int] = []

    def clear(self) -> None:
        self.host_ns = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the current stream."""
        import torch

        if len(self.host_ns) >= self.most:
            return torch.empty(shape, dtype=dtype, device="cuda")
        before, after = self.events[len(self.host_ns)]
        before.record()
        begin = time.perf_counter_ns()
        made = torch.empty(shape, dtype=dtype, device="cuda")
        self.host_ns.append(time.perf_counter_ns() - begin)
        after.record()
        return made

    def figures(self) -> dict[str, float]:
        """After a synchronisation: 99.9th percentiles, us."""
        pairs = self.events[: len(self.host_ns)]
        stalls = [before.elapsed_time(after) * 1e3 for before, after in pairs]
        return {
            "malloc_us": percentile(self.host_ns, 0.999) / 1e3,
            "stall_us": percentile(stalls, 0.999),
            "stall_total_ms": sum(stalls) / 1e3,
            "mallocs": len(pairs),
        }


def pipeline_job(meter: Meter, small: bool) -> tuple[Callable[[], None], int]:
    """A function that runs some steps, and how many."""
    import torch
    from pipeline import LAYERS, ROWS, WIDTH, Pipeline

    class Metered(Pipeline):
        def gather(self, layer: int) -> tuple[torch.Tensor, torch.cuda.Event]:
            first, second = self.shards[layer]
            with torch.cuda.stream(self.comm):
                w = meter.empty((len(first) + len(second), first.shape[1]), first.dtype)
                torch.cat((first, second), out=w)
                ready = torch.cuda.Event()
                ready.record(self.comm)
            return w, ready

    job = Metered("record_use", *((4, 256, 512) if small else (LAYERS, WIDTH, ROWS)))
    steps = 2 if small else 40

    def run() -> None:
        for _ in range(steps):
            job.step()

    return run, steps


def prefetch_job(meter: Meter, small: bool) -> tuple[Callable[[], None], int]:
    import torch
    from prefetch import JOBS, ROWS, WIDTH, Prefetch

    class Metered(Prefetch):
        def load(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event]:
            host = self.pinned[index % len(self.pinned)]
            with torch.cuda.stream(self.copy):
                batch = meter.empty(host.shape, host.dtype)
                batch.copy_(host, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record(self.copy)
            return batch, ready

    shape = (256, 512) if small else (ROWS, WIDTH)
    job = Metered("record_use", JOBS["compute-bound"], *shape)
    runs, batches = (1, 4) if small else (12, 100)

    def run() -> None:
        for _ in range(runs):
            job.run(batches)

    return run, runs * batches


def churn_job(meter: Meter, small: bool) -> tuple[Callable[[], None], int]:
    import torch

    import esper_alloc

    streams = [torch.cuda.Stream() for _ in range(CHURN_STREAMS)]
    outs = [torch.zeros(1024, device="cuda") for _ in streams]
    mallocs = 200 if small else CHURN_MALLOCS
    torch.cuda.synchronize()

    def run() -> None:
        drawn = random.Random(1)
        live: list[torch.Tensor] = []
        for _ in range(mallocs):
            owner, reader = drawn.sample(range(CHURN_STREAMS), 2)
            elements = int(2 ** drawn.uniform(17, 23))
            if len(live) >= CHURN_LIVE:
                live[drawn.randrange(len(live))] = live[-1]
                live.pop()
            with torch.cuda.stream(streams[owner]):
                x = meter.empty((elements,), torch.float32)
                x.zero_()
            streams[reader].wait_stream(streams[owner])
            with torch.cuda.stream(streams[reader]):
                torch.cuda._sleep(drawn.randrange(2 * CHURN_SLEEP))
                outs[reader].add_(x[:1024])
            esper_alloc.record_use(x, streams[reader])
            live.append(x)
            del x

    return run, mallocs


JOBS = {"pipeline": pipeline_job, "prefetch": prefetch_job, "churn": churn_job}


def measure(job: str, small: bool) -> dict:
    """One job under the allowance that the environment chose: us, ms, MiB."""
    use_allocator(OURS)
    import torch

    import esper_alloc

    with torch.no_grad():
        meter = Meter(500 if small else CHURN_MALLOCS)
        run, steps = JOBS[job](meter, small)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_stats()["active_bytes.all.current"]
        reserved_base = torch.cuda.memory_reserved()
        run()  # warm: kernels are loaded, and the memory that the job needs is there
        torch.cuda.synchronize()
        meter.clear()
        before = esper_alloc.memory_stats()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - begin) * 1e3 / steps
        stats, after = torch.cuda.memory_stats(), esper_alloc.memory_stats()
        return {
            "machine": machine(),
            "step_ms": step_ms,
            "peak_over_base_mib": (stats["active_bytes.all.peak"] - base) / MIB,
            "reserved_mib": (stats["reserved_bytes.all.peak"] - reserved_base) / MIB,
            **{name: after[name] - before[name] for name in HELD_BACK},
            **meter.figures(),
        }


def name_of(allowance: str) -> str:
    """As cases and rows are called."""
    return f"allowance {allowance}"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--job", choices=JOBS, action="append", help="default: all")
    arguments.add_argument(
        "--allowance",
        metavar="SIZE|off",
        action="append",
        help=f"what the default is compared with; default: {', '.join(ALLOWANCES[1:])}",
    )
    arguments.add_argument("--small", action="store_true", help="tiny jobs: to try the script")
    options = arguments.parse_args()
    jobs = options.job or list(JOBS)
    if options.worker:
        take_turns(in_children(options.worker, lambda: measure(jobs[0], options.small)))
        return 0

    if nothing_measurable():
        return 1
    default, *others = (ALLOWANCES[0], *(options.allowance or ALLOWANCES[1:]))
    results = Results("allowances", options.out)
    met = True
    for job in jobs:
        extra = ("--job", job, *(("--small",) if options.small else ()))
        cases = [
            Case(name_of(one), OURS, extra, {"ESPER_ALLOC_ALLOWANCE": one})
            for one in (default, *others)
        ]
        rounds = turns_of_children(
            __file__, cases, options.rounds, seconds=options.seconds / len(jobs)
        )
        found = [one for measured in rounds for one in measured.values()]
        if not found:
            print(f"{job}: nothing was measured")
            return 1
        if results.run is None:
            results.describe(found[0]["machine"])
        for peer in others:
            for name, unit, key in (
                ("step time", "ms", "step_ms"),
                ("malloc time, 99.9th percentile", "us", "malloc_us"),
                ("GPU stall, 99.9th percentile", "us", "stall_us"),
                ("GPU stall, all told", "ms", "stall_total_ms"),
                ("peak active over base", "MiB", "peak_over_base_mib"),
                ("reserved over base", "MiB", "reserved_mib"),
                ("the host was held back", "times", "held_back"),
                ("the host was held back, all told", "s", "held_back_seconds"),
                ("the host was held back in vain", "times", "held_back_in_vain"),
            ):
                results.compare(
                    f"{job}, {name_of(default)}: {name}",
                    unit,
                    rounds,
                    key,
                    name_of(default),
                    name_of(peer),
                )
        met = results.save() and met  # what is measured stays, whatever ends the rest
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
