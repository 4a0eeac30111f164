"""When does the memory of a dropped tensor serve again?

A tensor is read on stream B, its use is marked (``record_use``, or torch's
``record_stream``), then 50 ms of unrelated work are queued on B and the tensor
is dropped. The next allocation of that size on its own stream could have the
memory as soon as the read is over; with record_stream it has to wait for the
unrelated work, or take more memory. With the default allowance it takes more, too, so
that the host does not wait; with an allowance of 0 the host waits for the read.
"""

from __future__ import annotations

import statistics
import time

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    machine,
    parser,
    use_allocator,
)
from turns import CORES, compare_children, in_children, take_turns

MIB = 1 << 20
ELEMENTS = 16 * MIB  # of int32: 64 MiB
READ_MS = 2.0
UNRELATED_MS = 50.0
TRIES = 20

MARKED = Case("esper_alloc, record_use", OURS, ("--protection", "record_use"))
STRICT = Case("allowance=0", OURS, MARKED.args, {"ESPER_ALLOC_ALLOWANCE": "0"})
PEER = Case("native, record_stream", NATIVE, ("--protection", "record_stream"))
IMPRECISE = Case("esper_alloc, record_stream", OURS, ("--protection", "record_stream"))
CASES = (MARKED, STRICT, PEER, IMPRECISE)


def measure(allocator: str, protection: str) -> dict:
    """Figures over the tries: medians in ms and MiB, and counts.

    reused: tries in which the next allocation got the dropped memory at once.
    beside_work: of these, how many were written while the unrelated work ran.
    gpu_wait_ms: from the allocation to its first write, on the GPU.
    serves_again_ms: from the drop until the memory serves again.
    grown_mib: memory that the next allocation took from the device.
    wrong: elements that the reader got wrong.
    """
    use_allocator(allocator)
    import torch

    with torch.no_grad():
        tries = _tries(protection)
    return {
        "machine": machine(),
        "tries": len(tries),
        "reused": sum(one["reused"] for one in tries),
        "beside_work": sum(one["reused"] and one["beside_work"] for one in tries),
        "wrong": sum(one["wrong"] for one in tries),
        **{
            key: statistics.median(one[key] for one in tries)
            for key in ("gpu_wait_ms", "serves_again_ms", "grown_mib")
        },
    }


def _tries(protection: str) -> list[dict]:
    import torch

    main = torch.cuda.current_stream()
    cycles_per_ms = _cycles_per_ms()
    side = _beside(main, cycles_per_ms)
    out = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")

    def sleep(milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * cycles_per_ms))

    def read_and_mark(x: torch.Tensor) -> None:
        if protection == "using":
            import esper_alloc

            with esper_alloc.using(x, stream=side):
                sleep(READ_MS)
                out.copy_(x)
            return
        side.wait_stream(main)
        with torch.cuda.stream(side):
            sleep(READ_MS)
            out.copy_(x)
        if protection == "record_use":
            import esper_alloc

            esper_alloc.record_use(x, side)
        elif protection == "record_stream":
            x.record_stream(side)
        else:
            raise ValueError(f"unknown protection {protection!r}")

    def once(value: int) -> dict:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        x = torch.full((ELEMENTS,), value, dtype=torch.int32, device="cuda")
        read_and_mark(x)
        with torch.cuda.stream(side):
            sleep(UNRELATED_MS)
        before = torch.cuda.memory_stats()
        active = before["active_bytes.all.current"]
        start = torch.cuda.Event(enable_timing=True)
        written = torch.cuda.Event(enable_timing=True)
        address = x.data_ptr()
        del x
        dropped = time.perf_counter()
        start.record()
        z = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")
        z.fill_(-value)
        written.record()
        written.synchronize()
        beside_work = not side.query()
        reused = z.data_ptr() == address
        gpu_wait = start.elapsed_time(written)
        if reused:
            serves_again = gpu_wait
        else:  # z is active beside it: wait until only z is
            while torch.cuda.memory_stats()["active_bytes.all.current"] > active:
                torch.empty(1, device="cuda")  # native looks for what is done at a malloc
                if time.perf_counter() - dropped > 10:
                    raise RuntimeError("the dropped memory never became free again")
            serves_again = (time.perf_counter() - dropped) * 1e3
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.current"]
        torch.cuda.synchronize()
        return {
            "reused": reused,
            "beside_work": beside_work,
            "gpu_wait_ms": gpu_wait,
            "serves_again_ms": serves_again,
            "grown_mib": (reserved - before["reserved_bytes.all.current"]) / MIB,
            "wrong": int((out != value).sum()),
        }

    once(1), once(2)  # everything warm
    return [once(value) for value in range(3, 3 + TRIES)]


def _cycles_per_ms() -> float:
    """How many cycles torch.cuda._sleep needs for a millisecond, clocks up."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(50_000_000)
    rates = []
    for _ in range(5):
        begin.record()
        torch.cuda._sleep(5_000_000)
        end.record()
        end.synchronize()
        rates.append(5_000_000 / begin.elapsed_time(end))
    return max(rates)


def _beside(main, cycles_per_ms: float):
    """A stream whose waits do not block `main`: streams may share a hardware queue."""
    import torch

    probe = torch.zeros(1, device="cuda")
    for _ in range(32):
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(4 * cycles_per_ms))
            probe.add_(1)
        torch.cuda._sleep(1000)
        done = torch.cuda.Event()
        done.record(main)
        done.synchronize()
        if not side.query():
            torch.cuda.synchronize()
            return side
    raise RuntimeError("no stream runs beside the current one")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--protection", choices=("record_use", "using", "record_stream"))
    options = arguments.parse_args()
    if options.worker:
        how = options.worker, options.protection or "record_use"
        take_turns(in_children(options.worker, lambda: measure(*how)), CORES)
        return 0

    return compare_children(__file__, CASES, options, add_rows, MARKED.name)


def add_rows(results: Results, rounds: Rounds) -> None:
    at_once = f"of {TRIES} tries, memory reused at once"
    for name, unit, key, goal in (
        ("dropped memory serves again after, 50 ms of work queued", "ms", "serves_again_ms", 0.2),
        ("memory taken from the device for the next allocation", "MiB", "grown_mib", None),
        ("elements that the reader got wrong", "elements", "wrong", 0.0),
    ):
        results.compare(name, unit, rounds, key, MARKED.name, PEER.name, goal)
    for name, unit, key, goal in (
        ("memory taken from the device for the next allocation", "MiB", "grown_mib", 0.0),
        (at_once, "tries", "reused", None),
        (f"{at_once} and written beside the unrelated work", "tries", "beside_work", None),
        ("elements that the reader got wrong", "elements", "wrong", 0.0),
    ):
        name = f"{name}, {STRICT.name}"
        results.compare(name, unit, rounds, key, STRICT.name, PEER.name, goal)
    results.compare(at_once, "tries", rounds, "reused", STRICT.name, IMPRECISE.name)


if __name__ == "__main__":
    raise SystemExit(main())
