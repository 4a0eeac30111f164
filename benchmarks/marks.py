"""Marks, and uses that are seen: how precise they are, and what they cost."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import loops
import torch
from common import MIB, OURS
from measuring import machine, use_allocator
from models import gpt2

# --- when dropped memory serves again ----------------------------------------
ELEMENTS = 16 * MIB  # of int32: 64 MiB
READ_MS = 2.0
UNRELATED_MS = 50.0
TRIES = 20


def precision(allocator: str, marks: str) -> dict[str, Any]:
    """Figures over the tries: medians in ms and MiB, and counts.

    reused: tries in which the next allocation got the dropped memory at once.
    beside_work: of these, how many were written while the unrelated work ran.
    gpu_wait_ms: from the allocation to its first write, on the GPU.
    serves_again_ms: from the drop until the memory serves again.
    grown_mib: memory that the next allocation took from the device.
    wrong: elements that the reader got wrong.
    """
    use_allocator(allocator)
    with torch.no_grad():
        tries = _tries(marks)
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


def _tries(marks: str) -> list[dict]:
    main = torch.cuda.current_stream()
    cycles_per_ms = _cycles_per_ms()
    side = _beside(main, cycles_per_ms)
    out = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")

    def sleep(milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * cycles_per_ms))

    def read_and_mark(x: torch.Tensor) -> None:
        if marks == "using":
            import esper_alloc

            with esper_alloc.using(x, stream=side):
                sleep(READ_MS)
                out.copy_(x)
            return
        side.wait_stream(main)
        with torch.cuda.stream(side):
            sleep(READ_MS)
            out.copy_(x)
        if marks == "record_use":
            import esper_alloc

            esper_alloc.record_use(x, side)
        elif marks == "record_stream":
            x.record_stream(side)
        else:
            raise ValueError(f"unknown marks {marks!r}")

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


# --- the memory of a captured graph ------------------------------------------
GRAPH_ELEMENTS = 4 * MIB  # of float32: 16 MiB
STRIDE = 4096
LAYERS = 32
JOIN_AFTER = 2  # layers
CAPTURES = 7
REPLAYS = 5


def captures(allocator: str, marks: str) -> dict[str, Any]:
    """Figures over the captures: medians, but sums of what is wrong.

    pool_mib: memory of the graph's private pool after the capture.
    capture_ms: the captured code itself, on the host.
    replay_ms: one replay, on the GPU.
    wrong: elements that the side stream, or the end of the chain, got wrong.
    """
    use_allocator(allocator)
    with torch.no_grad():
        found = _captures(marks)
    return {
        "machine": machine(),
        "wrong": sum(one["wrong"] for one in found),
        **{
            key: statistics.median(one[key] for one in found[1:])
            for key in ("pool_mib", "capture_ms", "replay_ms")
        },
    }


def _captures(marks: str) -> list[dict]:
    if marks == "record_use":
        import esper_alloc

        protect = esper_alloc.record_use
    else:

        def protect(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
            tensor.record_stream(stream)

    side = torch.cuda.Stream()
    x = torch.zeros(GRAPH_ELEMENTS, device="cuda")
    last = torch.zeros_like(x)
    samples = torch.zeros(LAYERS, GRAPH_ELEMENTS // STRIDE, device="cuda")

    def chain() -> None:
        main = torch.cuda.current_stream()
        reads: list[torch.cuda.Event] = []
        y = x
        for layer in range(LAYERS):
            y = y + 1
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000)  # some 30 us
                samples[layer].copy_(y.view(-1, STRIDE)[:, 0])
            protect(y, side)
            reads.append(side.record_event())
            if layer >= JOIN_AFTER:
                main.wait_event(reads[layer - JOIN_AFTER])
        last.copy_(y)
        main.wait_stream(side)

    def once(value: float) -> dict:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            begin = time.perf_counter()
            chain()
            end = time.perf_counter()
        pool = graph.pool()
        held = sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        )
        wrong = 0
        times = []
        for turn in range(REPLAYS):
            start = torch.cuda.Event(enable_timing=True)
            done = torch.cuda.Event(enable_timing=True)
            x.fill_(value + turn)
            samples.zero_()
            start.record()
            graph.replay()
            done.record()
            done.synchronize()
            times.append(start.elapsed_time(done))
            layers = torch.arange(1, LAYERS + 1, device="cuda").view(-1, 1)
            wrong += int((samples != value + turn + layers).sum())
            wrong += int((last != value + turn + LAYERS).sum())
        return {
            "pool_mib": held / MIB,
            "capture_ms": (end - begin) * 1e3,
            "replay_ms": statistics.median(times),
            "wrong": wrong,
        }

    chain()  # every kernel loaded
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [once(100.0 * number) for number in range(CAPTURES)]


# --- what a mark costs -------------------------------------------------------
MARK_REPEATS, MARK_CALLS = 15, 2000
C_ROUNDS, C_CALLS = 15, 5000
HELD_UP = (1000, 10_000)  # tensors
HELD_UP_SIZE = 1 << 12  # bytes of each: all together are within the allowance
BESIDE = 200  # allocations


def nanoseconds(call: Callable[[], object], drain: Callable[[], object]) -> float:
    """Median ns of `call`; `drain` empties the device's queues between repeats."""
    for _ in range(200):
        call()
    drain()
    figures = []
    for _ in range(MARK_REPEATS):
        begin = time.perf_counter_ns()
        for _ in range(MARK_CALLS):
            call()
        figures.append((time.perf_counter_ns() - begin) / MARK_CALLS)
        drain()
    return statistics.median(figures)


def beside_pending(count: int) -> float:
    """ns an allocation beside `count` tensors that a busy stream holds up, the median."""
    side = torch.cuda.Stream()
    figures = []
    for _ in range(5):
        held = [torch.empty(HELD_UP_SIZE, dtype=torch.uint8, device="cuda") for _ in range(count)]
        with torch.cuda.stream(side):
            torch.cuda._sleep(500_000_000)  # longer than the rest takes
        for one in held:
            one.record_stream(side)
        del one
        held.clear()
        begin = time.perf_counter_ns()
        kept = [torch.empty(HELD_UP_SIZE, dtype=torch.uint8, device="cuda") for _ in range(BESIDE)]
        figures.append((time.perf_counter_ns() - begin) / BESIDE)
        if side.query():
            raise RuntimeError("the stream was idle before the allocations were over")
        del kept
        torch.cuda.synchronize()
    return statistics.median(figures)


def c_costs() -> dict[str, float]:
    """ns a call, each the median of rounds in which the four took turns."""
    names = ("cuEventRecord", "esper_alloc_record_use", "esper_record_use", "eight blocks")
    columns = zip(*loops.mark_costs(C_ROUNDS, C_CALLS), strict=True)
    return {f"C, {name}": statistics.median(one) for name, one in zip(names, columns, strict=True)}


def mark_costs(allocator: str) -> dict[str, Any]:
    """Every figure under one allocator, ns, as {name: value}."""
    use_allocator(allocator)
    figures: dict[str, Any] = {"event record, C++": loops.call("event_record_ns", 20000)}
    side = torch.cuda.Stream()
    x = torch.empty(1024, device="cuda")
    event = torch.cuda.Event()

    def plain_cycle() -> None:
        torch.empty(1024, device="cuda")

    def stream_cycle() -> None:
        torch.empty(1024, device="cuda").record_stream(side)

    def stream_eight() -> None:
        for one in [torch.empty(1024, device="cuda") for _ in range(8)]:
            one.record_stream(side)

    cases: dict[str, Callable[[], object]] = {
        "event record, Python": lambda: event.record(side),
        "cycle, unmarked": plain_cycle,
        "record_stream, cycle": stream_cycle,
        "record_stream, eight": stream_eight,
        "record_stream, call": lambda: x.record_stream(side),
    }
    if allocator == OURS:
        import esper_alloc

        def use_cycle() -> None:
            esper_alloc.record_use(torch.empty(1024, device="cuda"), side)

        def use_eight() -> None:
            esper_alloc.record_use([torch.empty(1024, device="cuda") for _ in range(8)], side)

        def using_cycle() -> None:
            with esper_alloc.using(torch.empty(1024, device="cuda"), stream=side):
                pass

        y = torch.empty(1024, device="cuda")
        cases["record_use, call"] = lambda: esper_alloc.record_use(y, side)
        cases["record_use, cycle"] = use_cycle
        cases["record_use, eight"] = use_eight
        cases["using, cycle"] = using_cycle

    gc.disable()
    with torch.no_grad():
        for name, call in cases.items():
            figures[name] = nanoseconds(call, torch.cuda.synchronize)
    for name in ("record_stream, eight", "record_use, eight"):
        if name in figures:
            figures[name] /= 8
    if allocator == OURS:
        with torch.no_grad():
            figures.update(c_costs())
    for count in HELD_UP:  # last: they leave thousands of blocks behind
        figures[f"beside {count:,}"] = beside_pending(count)
    return {"machine": machine(), **figures}


# --- what automatic uses cost an operator ------------------------------------
REPEATS, CALLS = 31, 2000
STEP_REPEATS, STEPS = 15, 5
KINDS = ("marked", "automatic")
OPERATORS = ("add", "view", "add of lists, a tensor")
LIST = 100  # tensors
ONE_STREAM = ("torch.empty and drop", "add")
ONE_STREAM_STEP, STEP = "GPT-2 step, one stream", "prefetching GPT-2 step"

Loop = Callable[[], object]


def by_turns(
    choose: Callable[[str], None], call: Loop, drain: Loop, whole: bool = False, calls: int = 0
) -> dict[str, float]:
    """Median ns of `call` with each kind of uses; `drain` empties the device's queues. `whole`:
    `call` is a step of a job, and is over when the queues are empty. `calls`: CALLS by default."""
    figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
    repeats, calls = (STEP_REPEATS, STEPS) if whole else (REPEATS, calls or CALLS)
    for repeat in range(repeats + 1):
        for kind in KINDS if repeat % 2 else reversed(KINDS):
            choose(kind)
            drain()
            begin = time.perf_counter_ns()
            for _ in range(calls):
                call()
            if whole:
                drain()
            taken = (time.perf_counter_ns() - begin) / calls
            drain()
            if repeat:  # the first is to warm up
                figures[kind].append(taken)
    return {kind: statistics.median(taken) for kind, taken in figures.items()}


def operators(device: str) -> dict[str, Loop]:
    """Calls of one operator each, on tensors that are made here."""
    a, b, out = (torch.ones(16, device=device) for _ in range(3))
    many = [torch.ones(16, device=device) for _ in range(LIST)]

    def add_lists() -> None:
        torch._foreach_add_(many, 1.0)

    made: tuple[Loop, ...] = (lambda: torch.add(a, b, out=out), lambda: a.view(4, 4), add_lists)
    return dict(zip(OPERATORS, made, strict=True))


def observe(kind: str) -> None:
    """From now on operators are seen, or not."""
    from esper_alloc import _torch

    _torch.automatic_uses(kind == "automatic")
    if kind == "automatic":
        _torch.observe_now()


def measure_operators(
    figures: dict[str, float], where: str, calls: dict[str, Loop], drain: Loop
) -> None:
    for name, call in calls.items():
        tensors = LIST if "lists" in name else 1
        for kind, ns in by_turns(observe, call, drain, calls=CALLS * 10 // (9 + tensors)).items():
            figures[f"{name}, {where}, {kind}"] = ns / tensors


def prefetching() -> Loop:
    """A training step whose batch is copied on a stream of its own, and marked."""
    import esper_alloc
    from esper_alloc import _torch

    step = gpt2(False)
    host = torch.randint(50257, (8, 1024)).pin_memory()
    tokens = torch.empty_like(host, device="cuda")
    copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()

    def call() -> None:
        with torch.cuda.stream(copies):
            batch = host.to("cuda", non_blocking=True)
        compute.wait_stream(copies)
        tokens.copy_(batch)
        step()
        if not _torch.is_observing():
            esper_alloc.record_use(batch, compute)

    return call


def automatic(allocator: str) -> dict[str, Any]:
    """Every figure, in this process, as {name: value}."""
    import esper_alloc
    from esper_alloc import _torch

    esper_alloc.enable(uses="automatic")
    torch.cuda.init()
    gc.disable()
    figures: dict[str, Any] = {}
    synchronize = torch.cuda.synchronize
    with torch.no_grad():
        calls = operators("cuda")
        alone: dict[str, Loop] = {
            ONE_STREAM[0]: lambda: torch.empty(1024, device="cuda"),
            ONE_STREAM[1]: calls["add"],
        }

        def choose(kind: str) -> None:
            _torch.automatic_uses(kind == "automatic")

        for name, call in alone.items():
            for kind, ns in by_turns(choose, call, synchronize).items():
                figures[f"{name}, one stream, {kind}"] = ns
    for kind, ns in by_turns(choose, gpt2(False), synchronize, whole=True).items():
        figures[f"{ONE_STREAM_STEP}, {kind}"] = ns / 1e6
    assert not _torch.is_observing()
    with torch.no_grad():
        side = torch.cuda.Stream()
        measure_operators(figures, "at home", calls, synchronize)
        with torch.cuda.stream(side):
            measure_operators(figures, "elsewhere", calls, synchronize)

        x = torch.ones(16, device="cuda")

        def use_and_drop() -> None:
            y = torch.empty(16, device="cuda")
            with torch.cuda.stream(side):
                torch.add(x, x, out=y)

        measure_operators(figures, "dropped", {"add": use_and_drop}, synchronize)
    for kind, ns in by_turns(observe, prefetching(), synchronize, whole=True).items():
        figures[f"{STEP}, {kind}"] = ns / 1e6
    return {"machine": machine(), **figures}
