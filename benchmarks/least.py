"""Pipelines within little memory: who completes where an allowance of 0 does?

  fsdp    the steps of pipeline.py: 48 layers of 32 MiB, gathered on one stream and used
          on another
  three   the batches of overlap.py: 4 to 64 MiB, copied in, computed on and copied out
          on three streams

First what esper_alloc reserves at its peak with an allowance of 0 is measured, in a process
without a limit. Then each allocator runs in a fresh process that may have 1.05 times as much, by
set_per_process_memory_fraction: ours with the default allowance and with 0, marks by
record_use; native with record_stream. Goals: ours completes, with both. Step time,
retries and out-of-memory errors stand beside. A pipeline takes about 25 s to start and 25 s
a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common import (
    MIB,
    NATIVE,
    OURS,
    Case,
    Results,
    WorkerFailed,
    machine,
    nothing_measurable,
    parser,
    use_allocator,
)
from limits import print_failures, survives
from turns import in_children, take_turns, turns_of_children

PIPELINES = ("fsdp", "three")
OF_LEAST = 1.05
DEFAULT, LEAST = "esper_alloc", "esper_alloc, allowance 0"
PEER = "native, record_stream"
#: Steps to warm up, then timed.
STEPS = {"fsdp": (3, 40), "three": (10, 80)}
SMALL_STEPS = (1, 2)
CASES = (
    Case(DEFAULT, OURS, ("--marks", "record_use")),
    Case(LEAST, OURS, ("--marks", "record_use"), {"ESPER_ALLOC_ALLOWANCE": "0"}),
    Case(PEER, NATIVE, ("--marks", "record_stream")),
)


def job(name: str, marks: str, small: bool) -> Callable[[], object]:
    """A step, with all that it needs made."""
    if name == "fsdp":
        import pipeline

        return pipeline.Pipeline(marks, *pipeline.SHAPES["small"][small]).step
    import overlap

    least, most, computing, *_ = overlap.PIPELINES["small"]
    return overlap.Pipeline(marks, *((1, 4) if small else (least, most)), computing).step


def run_within(
    make: Callable[[], Callable[[], object]], steps: tuple[int, int], limit: int | None
) -> dict[str, Any]:
    """Steps of what `make` makes, with so many bytes at the most. failed: 1 where memory ran
    out; then there is no step_ms. reserved: bytes at the peak."""
    import torch

    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    took: list[float] = []

    def work() -> None:
        step = make()
        warm, timed = steps
        for _ in range(warm):
            step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(timed):
            step()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) * 1e3 / timed)

    why = survives(work)
    stats = torch.cuda.memory_stats()
    return {
        "failed": int(why is not None),
        "why": why,
        "step_ms": took[0] if took else None,
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
    }


def measure(
    allocator: str, name: str, marks: str, small: bool, limit: int | None
) -> dict[str, Any]:
    use_allocator(allocator)
    import torch

    with torch.no_grad():
        steps = SMALL_STEPS if small else STEPS[name]
        found = run_within(lambda: job(name, marks, small), steps, limit)
    return {"machine": machine(), **found}


# --- the conducting side -----------------------------------------------------

Rounds = Sequence[Mapping[str, Mapping[str, Any]]]


def least_reserved(extra: Sequence[str]) -> int:
    """Bytes that an allowance of 0 reserves at its peak. Raises WorkerFailed."""
    [least] = [case for case in CASES if case.name == LEAST]
    rounds = turns_of_children(__file__, [replace(least, args=(*least.args, *extra))], 1)
    found = rounds[0].get(LEAST)
    if found is None or found["failed"]:
        raise WorkerFailed(
            "an allowance of 0 did not go through without a limit: there is nothing to compare"
        )
    return int(found["reserved"])


def add_rows(results: Results, name: str, limit: int, rounds: Rounds) -> None:
    title = f"{name}, within {OF_LEAST} of what an allowance of 0 reserves"
    for case, label in ((DEFAULT, ""), (LEAST, ", allowance 0")):
        results.compare(
            f"{title}{label}: failed", "runs", rounds, "failed", case, PEER, 0.0, "ours"
        )
        for what, key, unit in (
            ("step time", "step_ms", "ms"),
            ("retries", "retries", "retries"),
            ("out-of-memory errors", "ooms", "errors"),
        ):
            results.compare(f"{title}{label}: {what}", unit, rounds, key, case, PEER)
    results.compare(f"{title}: step time", "ms", rounds, "step_ms", DEFAULT, LEAST)
    reserved = [one[DEFAULT]["reserved"] / MIB for one in rounds if DEFAULT in one]
    results.row(f"{title}: peak reserved", "MiB", reserved, [limit / MIB], "the limit")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--pipeline", choices=PIPELINES, action="append", help="default: both")
    arguments.add_argument("--small", action="store_true", help="tiny tensors: to try the script")
    arguments.add_argument("--marks", default="record_use", help="of --worker")
    arguments.add_argument("--limit", type=int, help="of --worker: bytes at the most")
    options = arguments.parse_args()
    names = options.pipeline or list(PIPELINES)
    if options.worker:
        asked = (options.worker, names[0], options.marks, options.small, options.limit)
        take_turns(in_children(options.worker, lambda: measure(*asked)))
        return 0
    if nothing_measurable():
        return 1
    results = Results("least", options.out)
    begin = time.monotonic()
    complete = True
    for index, name in enumerate(names):
        extra = ("--pipeline", name, *(("--small",) if options.small else ()))
        left = (options.seconds - (time.monotonic() - begin)) / (len(names) - index)
        try:
            needed = least_reserved(extra)
        except WorkerFailed as error:
            print(f"{name}: {error}")
            complete = False
            continue
        limit = int(OF_LEAST * needed)
        cases = [replace(case, args=(*case.args, *extra, "--limit", str(limit))) for case in CASES]
        rounds = turns_of_children(__file__, cases, options.rounds, seconds=left)
        print_failures(rounds)
        found = [one[DEFAULT] for one in rounds if DEFAULT in one]
        if not found:
            print(f"{name}: nothing was measured under esper_alloc")
            complete = False
            continue
        if results.run is None:
            results.describe(found[0]["machine"])
        add_rows(results, name, limit, rounds)
    if results.run is None:
        print("nothing was measured")
        return 1
    return 0 if results.save() and complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
