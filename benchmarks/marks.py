"""Marks, and uses that are seen: what they cost, also in a captured graph."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import loops
import torch
from common import MIB, OURS
from measuring import machine, use_allocator
from models import gpt2
from streams import mark

# --- the memory of a captured graph ------------------------------------------
GRAPH_ELEMENTS, STRIDE = 4 * MIB, 4096  # of float32: 16 MiB
LAYERS, JOIN_AFTER = 32, 2
CAPTURES, REPLAYS = 7, 5


def over(tries: Sequence[dict[str, float]], first: int = 0) -> dict[str, float]:
    """Medians of the figures from try `first` on; what is wrong, of all tries together."""
    found = {key: statistics.median(one[key] for one in tries[first:]) for key in tries[0]}
    return {**found, "wrong": sum(one["wrong"] for one in tries)}


@torch.no_grad()
def captures(allocator: str, marks: str) -> dict[str, Any]:
    """pool_mib: memory of the graph's private pool. capture_ms: the captured code itself, on the
    host. replay_ms: one replay, on the GPU. wrong: elements that the side stream, or the end of
    the chain, got wrong."""
    use_allocator(allocator)
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
            mark(marks, y, side)
            reads.append(side.record_event())
            if layer >= JOIN_AFTER:
                main.wait_event(reads[layer - JOIN_AFTER])
        last.copy_(y)
        main.wait_stream(side)

    def once(value: float) -> dict[str, float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            begin = time.perf_counter()
            chain()
            end = time.perf_counter()
        pool = tuple(graph.pool())
        segments = torch.cuda.memory_snapshot()
        held = sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == pool)
        wrong = 0
        times = []
        layers = torch.arange(1, LAYERS + 1, device="cuda").view(-1, 1)
        for turn in range(REPLAYS):
            start, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            x.fill_(value + turn)
            samples.zero_()
            start.record()
            graph.replay()
            done.record()
            done.synchronize()
            times.append(start.elapsed_time(done))
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
    made = [once(100.0 * number) for number in range(CAPTURES)]
    return {"machine": machine(), **over(made, first=1)}


# --- what a mark costs -------------------------------------------------------
MARK_REPEATS, MARK_CALLS = 15, 2000
C_ROUNDS, C_CALLS = 15, 5000


def nanoseconds(call: Callable[[], object]) -> float:
    """Median ns of `call`; the device's queues are emptied between repeats."""
    for _ in range(200):
        call()
    figures = []
    for _ in range(MARK_REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(MARK_CALLS):
            call()
        figures.append((time.perf_counter_ns() - begin) / MARK_CALLS)
    torch.cuda.synchronize()
    return statistics.median(figures)


@torch.no_grad()
def mark_costs(allocator: str) -> dict[str, Any]:
    """ns of each."""
    use_allocator(allocator)
    side = torch.cuda.Stream()
    x = torch.empty(1024, device="cuda")

    cases: dict[str, Callable[[], object]] = {
        "record_stream, cycle": lambda: torch.empty(1024, device="cuda").record_stream(side),
        "record_stream, call": lambda: x.record_stream(side),
    }
    if allocator == OURS:
        from esper_alloc import record_use, using

        def using_cycle() -> None:
            with using(torch.empty(1024, device="cuda"), stream=side):
                pass

        y = torch.empty(1024, device="cuda")
        cases |= {
            "record_use, call": lambda: record_use(y, side),
            "record_use, cycle": lambda: record_use(torch.empty(1024, device="cuda"), side),
            "using, cycle": using_cycle,
        }
    gc.disable()
    figures = {name: nanoseconds(call) for name, call in cases.items()}
    if allocator == OURS:
        figures |= loops.mark_costs(C_ROUNDS, C_CALLS)
    return {"machine": machine(), **figures}


# --- what automatic uses cost an operator ------------------------------------
REPEATS, CALLS = 31, 2000
STEP_REPEATS, STEPS = 15, 5
KINDS = ("marked", "automatic")

Loop = Callable[[], object]


def by_turns(choose: Callable[[str], None], call: Loop, whole: bool = False) -> dict[str, float]:
    """Median ns of `call` with each kind of uses. `whole`: `call` is a step of a job, and is over
    when the device's queues are empty."""
    figures: dict[str, list[float]] = {kind: [] for kind in KINDS}
    repeats, calls = (STEP_REPEATS, STEPS) if whole else (REPEATS, CALLS)
    for repeat in range(repeats + 1):
        for kind in KINDS if repeat % 2 else reversed(KINDS):
            choose(kind)
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(calls):
                call()
            if whole:
                torch.cuda.synchronize()
            taken = (time.perf_counter_ns() - begin) / calls
            torch.cuda.synchronize()
            if repeat:  # the first is to warm up
                figures[kind].append(taken)
    return {kind: statistics.median(taken) for kind, taken in figures.items()}


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
    """ "NAME, KIND": ns, of steps ms, with each kind of uses in this process."""
    import esper_alloc
    from esper_alloc import _torch

    esper_alloc.enable(uses="automatic")
    torch.cuda.init()
    gc.disable()
    figures: dict[str, Any] = {}

    def note(name: str, taken: dict[str, float], unit: float = 1) -> None:
        figures.update({f"{name}, {kind}": ns / unit for kind, ns in taken.items()})

    def choose(kind: str) -> None:
        _torch.automatic_uses(kind == "automatic")

    def observe(kind: str) -> None:
        """From now on operators are seen, or not."""
        choose(kind)
        if kind == "automatic":
            _torch.observe_now()

    def note_operators(where: str) -> None:
        for name, call in calls.items():
            note(f"{name}, {where}", by_turns(observe, call))

    a, b, out = (torch.ones(16, device="cuda") for _ in range(3))
    calls = {"add": lambda: torch.add(a, b, out=out), "view": lambda: a.view(4, 4)}
    with torch.no_grad():
        empty = by_turns(choose, lambda: torch.empty(1024, device="cuda"))
        note("torch.empty and drop, one stream", empty)
        note("add, one stream", by_turns(choose, calls["add"]))
    note("GPT-2 step, one stream", by_turns(choose, gpt2(False), whole=True), 1e6)
    assert not _torch.is_observing()
    with torch.no_grad():
        side = torch.cuda.Stream()
        note_operators("at home")
        with torch.cuda.stream(side):
            note_operators("elsewhere")
    note("prefetching GPT-2 step", by_turns(observe, prefetching(), whole=True), 1e6)
    return {"machine": machine(), **figures}
