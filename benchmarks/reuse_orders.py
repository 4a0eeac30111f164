"""The reuse orders auto, gate and grow beside each other, on jobs with cross-stream uses.

  pipeline  the FSDP-like steps of pipeline.py
  prefetch  the batches of prefetch.py, compute-bound
  churn     blocks of 0.5 to 32 MiB on four streams, each read late on another
            stream, marked, and dropped at random among 40 live ones

For each allocation of a job's own two figures are taken, and the 99.9th
percentile shown:

  malloc time  what torch.empty took on the host, Python included
  GPU stall    between an event recorded on the stream right before the
               allocation and one right after it. There is nothing between them
               but the waits that the allocator put there, so where the host is
               ahead this is how long the stream stood still for the allocation.
               Where it is not, the stream also waits for the host: the call's
               own time is included.

Both are of a second run of the job, which finds the first one's memory cached.
Beside them: time a step, and over both runs the peak of active and reserved
memory over what was there before. An order that the installed esper_alloc does
not have is left out.
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
    WorkerFailed,
    machine,
    nothing_measurable,
    parser,
    report,
    run_worker,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
ORDERS = ("auto", "gate", "grow")
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
    """One job under the order that the environment chose: us, ms, MiB."""
    use_allocator(OURS)
    import torch

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
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - begin) * 1e3 / steps
        stats = torch.cuda.memory_stats()
        return {
            "machine": machine(),
            "step_ms": step_ms,
            "peak_over_base_mib": (stats["active_bytes.all.peak"] - base) / MIB,
            "reserved_mib": (stats["reserved_bytes.all.peak"] - reserved_base) / MIB,
            **meter.figures(),
        }


def probe() -> dict:
    """Makes the allocator serve, which refuses an order that it does not know."""
    use_allocator(OURS)
    import torch

    torch.zeros(1, device="cuda")
    return {"serves": True}


def environment(order: str) -> dict[str, str]:
    return {"ESPER_ALLOC_REUSE": order}


def known_orders(orders: Sequence[str]) -> list[str]:
    """Those of `orders` that the installed esper_alloc has; the others are named."""
    known = []
    for order in orders:
        try:
            run_worker(__file__, OURS, ("--probe",), more=environment(order))
            known.append(order)
        except WorkerFailed as error:
            if "is no reuse order" not in str(error):
                raise
            print(f"reuse order {order}: this esper_alloc does not have it; left out", flush=True)
    return known


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--job", choices=JOBS, action="append", help="default: all")
    arguments.add_argument("--order", choices=ORDERS, action="append", help="default: all")
    arguments.add_argument("--small", action="store_true", help="tiny jobs: to try the script")
    arguments.add_argument("--probe", action="store_true", help="only ask whether it serves")
    options = arguments.parse_args()
    jobs = options.job or list(JOBS)
    if options.worker and options.probe:
        report(probe())
        return 0
    if options.worker:
        take_turns(in_children(options.worker, lambda: measure(jobs[0], options.small)))
        return 0

    if nothing_measurable():
        return 1
    orders = known_orders(options.order or ORDERS)
    results = Results("reuse_orders", options.out)
    met = True
    for job in jobs:
        extra = ("--job", job, *(("--small",) if options.small else ()))
        cases = [Case(f"order {order}", OURS, extra, environment(order)) for order in orders]
        rounds = turns_of_children(
            __file__, cases, options.rounds, seconds=options.seconds / len(jobs)
        )
        found = [one for measured in rounds for one in measured.values()]
        if not found:
            print(f"{job}: nothing was measured")
            return 1
        if results.run is None:
            results.describe(found[0]["machine"])
        for ours, peer in (("auto", "gate"), ("auto", "grow"), ("gate", "grow")):
            if ours not in orders or peer not in orders:
                continue
            for name, unit, key in (
                ("step time", "ms", "step_ms"),
                ("malloc time, 99.9th percentile", "us", "malloc_us"),
                ("GPU stall, 99.9th percentile", "us", "stall_us"),
                ("GPU stall, all told", "ms", "stall_total_ms"),
                ("peak active over base", "MiB", "peak_over_base_mib"),
                ("reserved over base", "MiB", "reserved_mib"),
            ):
                results.compare(
                    f"{job}, order {ours}: {name}",
                    unit,
                    rounds,
                    key,
                    f"order {ours}",
                    f"order {peer}",
                )
        met = results.save() and met  # what is measured stays, whatever ends the rest
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
