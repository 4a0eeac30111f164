"""What still works when memory is short: the largest batch, 99% in use, a neighbour.

    limits.py --what batch         # the largest batch within 20 GiB
    limits.py --what tight         # steps while 99% of 20 GiB are in use
    limits.py --what neighbour     # steps while another process takes the rest

Each allocator gets fresh processes; the 20 GiB are a fraction of the card, by
set_per_process_memory_fraction (RMM's pool knows no fraction and is left out). The
largest batches are looked for side by side, on a card with room for all; what is timed
has the GPU to itself.

  batch      Bisected in one process, each try on a new model and an emptied cache.
             GPT-2: sequences of 256 tokens, 3 steps. llama_varlen: 12 steps of
             random length up to 512 and up to that many sequences, the last third
             after one with the most of both. Goal: at least the best peer's.
  tight      The job runs once; then a tensor is allocated beside it that lets
             the sum of its peak and that tensor be 99% of the limit, and the job
             runs again. Goal: no failure where a peer goes on.
  neighbour  No fraction. The job runs once; then another process takes so much that
             1.1 times the job's peak is left for it, and half way through its
             second run so much that 1.05 times is. The same goal.

The jobs of the last two are gpt2 and llama_varlen as in jobs.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import (
    ASYNC,
    EXPANDABLE,
    MIB,
    NATIVE,
    OURS,
    RMM,
    Case,
    Results,
    machine,
    memory_figures,
    nothing_measurable,
    parser,
)
from jobs import check_segments, environment, prepare, title_of
from neighbour import Client
from turns import in_children, take_turns, turns_of_children
from workloads import JOBS, SMALL, Shape, import_job, llama_trainer, varlen_schedule

PEERS = (NATIVE, EXPANDABLE, ASYNC)
WHATS = ("batch", "tight", "neighbour")
NAMES = ("gpt2", "llama_varlen")
LIMIT = 20 << 30
IN_USE = 0.99
ROOM = 1.10  # of the job's peak, beside a neighbour ...
ROOM_THEN = 1.05  # ... and half way
SLACK = 64 << 20  # what the driver itself may want meanwhile
MOST = 1024
BEST = "best peer"


# --- the measuring side ------------------------------------------------------


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, 0 if none does: doubled until
    one does not fit, then bisected."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def trial(name: str, batch: int, small: bool) -> None:
    """Trains a new model for some steps of at most `batch` sequences."""
    import torch

    torch.manual_seed(0)
    if name == "gpt2":
        import train

        with torch.device("cuda"):
            step = train.gpt2(small, 256)
        for _ in range(3):
            step(batch)
    else:
        shape = SMALL if small else Shape(longest=512)
        steps = llama_trainer(shape)
        for sequences, length in varlen_schedule(12, batch, shape.longest):
            steps(sequences, length)
    torch.cuda.synchronize()


def survives(work: Callable[[], object]) -> str | None:
    """What memory ran out of, or None. The failed work is forgotten entirely."""
    import torch

    why = None
    try:
        work()
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
    gc.collect()
    return why


def set_limit() -> None:
    """From now on 20 GiB are all that this process may have."""
    import torch

    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.mem_get_info()[1])


def find_batch(name: str, small: bool) -> dict[str, Any]:
    import torch

    set_limit()
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        why = survives(lambda: trial(name, batch, small))
        torch.cuda.empty_cache()
        return why is None

    return {"batch": largest(fits, 4 if small else MOST), "tries": len(tried)}


def peak_bytes() -> int:
    """What was live at the most, as it was asked for where the allocator knows."""
    import torch

    stats = torch.cuda.memory_stats()
    return int(stats.get("requested_bytes.all.peak") or torch.cuda.max_memory_allocated())


def take(size: int) -> Any:
    """So many bytes, from this process's allocator."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cuda")


def run_under_pressure(what: str, name: str, small: bool) -> dict[str, Any]:
    """failed: 1 where memory ran out; then there is no step_ms."""
    import torch

    job = JOBS[name]
    steps = job.small_steps if small else job.steps
    if what == "tight":
        set_limit()
    step = job.make(small)
    for number in range(steps):
        step(number)
    torch.cuda.synchronize()
    peak = peak_bytes()
    torch.cuda.empty_cache()
    took: list[float] = []

    def again(half_way: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(steps):
            if number == steps // 2:
                half_way()
            step(number)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) * 1e3 / steps)

    def tight() -> None:
        beside = take(int(LIMIT * IN_USE) - peak)
        again(lambda: None)
        del beside

    def neighbour() -> None:
        with Client() as other:

            def leave(room: float) -> None:
                torch.cuda.synchronize()
                other.leave(max(int(room * peak) - torch.cuda.memory_reserved(), 0) + SLACK)

            leave(ROOM)
            again(lambda: leave(ROOM_THEN))

    why = survives(tight if what == "tight" else neighbour)
    return {
        "failed": int(why is not None),
        "why": why,
        "step_ms": took[0] if took else None,
        "peak_mib": peak / MIB,
        "retries": memory_figures()["retries"],
    }


def measure(allocator: str, what: str, name: str, small: bool) -> dict[str, Any]:
    prepare(allocator)
    found = find_batch(name, small) if what == "batch" else run_under_pressure(what, name, small)
    check_segments(allocator)
    return {"machine": machine(), **found}


# --- the conducting side -----------------------------------------------------


def with_best(
    rounds: Sequence[dict[str, dict[str, Any]]], key: str, most: bool
) -> list[dict[str, dict[str, Any]]]:
    """The rounds, each with its best peer of that figure under a name of its own."""
    added = []
    for one in rounds:
        values = [one[peer][key] for peer in PEERS if one.get(peer, {}).get(key) is not None]
        more = dict(one)
        if values:
            more[BEST] = {key: max(values) if most else min(values)}
        added.append(more)
    return added


TITLES = {"tight": "99% of 20 GiB in use", "neighbour": "beside a neighbour"}


def add_rows(
    results: Results, what: str, title: str, rounds: Sequence[dict[str, dict[str, Any]]]
) -> None:
    if what == "batch":
        name = f"{title}: largest batch within 20 GiB"
        best = with_best(rounds, "batch", True)
        results.compare(name, "sequences", best, "batch", OURS, BEST, 1.0, "at_least")
        for peer in PEERS:
            results.compare(name, "sequences", rounds, "batch", OURS, peer)
        return
    name = f"{title}, {TITLES[what]}"
    results.compare(
        f"{name}: failed", "runs", with_best(rounds, "failed", False), "failed",
        OURS, BEST, 0.0, "difference",
    )  # fmt: skip
    results.compare(
        f"{name}: step time", "ms", with_best(rounds, "step_ms", False), "step_ms", OURS, BEST
    )
    for peer in PEERS:
        results.compare(f"{name}: failed", "runs", rounds, "failed", OURS, peer)
        if any(one.get(peer, {}).get("step_ms") is not None for one in rounds):
            results.compare(f"{name}: step time", "ms", rounds, "step_ms", OURS, peer)


def print_failures(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    for one in rounds:
        for case, figures in one.items():
            if figures.get("why"):
                print(f"{case}: {figures['why']}")


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=1)
    arguments.add_argument("--what", choices=WHATS, action="append", help="default: all")
    arguments.add_argument("--job", choices=NAMES, action="append", help="default: both")
    arguments.add_argument("--segments", choices=("classic", "mapped"), help="of ours")
    arguments.add_argument("--small", action="store_true", help="tiny models: to try the script")
    options = arguments.parse_args()
    whats, names = options.what or list(WHATS), options.job or list(NAMES)
    if options.worker:
        asked = (options.worker, whats[0], names[0], options.small)
        imports = lambda: import_job(names[0])  # noqa: E731
        take_turns(in_children(options.worker, lambda: measure(*asked), imports))
        return 0
    if nothing_measurable():
        return 1
    results = Results("limits", options.out)
    complete = True
    begin = time.monotonic()
    pairs = [(what, name) for what in whats for name in names]
    for index, (what, name) in enumerate(pairs):
        extra = ("--what", what, "--job", name, *(("--small",) if options.small else ()))
        cases = [Case(OURS, OURS, extra, environment(options.segments))]
        cases += [Case(peer, peer, extra, environment(None)) for peer in PEERS]
        left = options.seconds - (time.monotonic() - begin)
        rounds = turns_of_children(
            __file__,
            cases,
            options.rounds,
            seconds=left / (len(pairs) - index),
            together=what == "batch",  # each has its 20 GiB, and nothing is timed
        )
        print_failures(rounds)
        found = [one[OURS] for one in rounds if OURS in one]
        if not found:
            print(f"{what}, {name}: nothing was measured under esper_alloc")
            complete = False
            continue
        if results.run is None:
            results.describe(found[0]["machine"], {RMM: "it knows no memory fraction"})
        add_rows(results, what, title_of(name, options.segments), rounds)
    if results.run is None:
        print("nothing was measured")
        return 1
    return 0 if results.save() and complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
