"""What the programs of the GPU tests share: an allocator, delays, streams, patterns."""

import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from driver_calls import wait_for_value

OURS, NATIVE = "esper_alloc", "native"

#: Cycles a millisecond, at least: no shipped GPU has a faster clock.
_FASTEST_CYCLES_PER_MS = 3_000_000
_cycles_per_ms = 0.0
_begin = time.monotonic()


class Scenarios(dict[str, Callable[..., Any]]):
    """A program's functions by their names. It decorates them."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self[function.__name__] = function
        return function


def say(what: str) -> None:
    """Tells, on standard error, what begins: the last line of a program that hangs says where."""
    print(f"{time.monotonic() - _begin:.1f} s: {what}", file=sys.stderr, flush=True)


def use_allocator(name: str) -> None:
    """Makes `name` this process's allocator and initialises CUDA."""
    if name == OURS:
        import esper_alloc

        if not esper_alloc.is_enabled():
            esper_alloc.enable()
        assert esper_alloc.is_enabled(), "esper_alloc.enable() left it disabled"
    elif name != NATIVE:
        raise ValueError(f"unknown allocator {name!r}")
    torch.cuda.init()
    calibrate()


def report(**found: Any) -> None:
    """The program's result: one JSON line, the last that it prints."""
    sys.stdout.flush()
    print(json.dumps(found), flush=True)


def calibrate() -> None:
    """Finds how long a cycle of torch.cuda._sleep takes, with the clocks up."""
    global _cycles_per_ms
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rates = []
    torch.cuda._sleep(50_000_000)  # the clocks rise meanwhile
    for _ in range(5):
        begin.record()
        torch.cuda._sleep(5_000_000)
        end.record()
        end.synchronize()
        rates.append(5_000_000 / begin.elapsed_time(end))
    _cycles_per_ms = min(max(rates) * 1.1, _FASTEST_CYCLES_PER_MS)
    assert statistics.median(rates) > 1000, f"implausible cycles a millisecond: {rates}"


def sleep(stream: torch.cuda.Stream, milliseconds: float) -> None:
    """Keeps `stream` busy for at least about `milliseconds`; the host does not wait."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * _cycles_per_ms))


def hold_up(stream: torch.cuda.Stream, word: torch.Tensor) -> None:
    """What `stream` is given from now on waits until the int32 `word`, in pinned memory, is 1."""
    word[0] = 0
    with torch.cuda.device(stream.device):
        wait_for_value(stream, word, 1)


@contextlib.contextmanager
def held_up(stream: torch.cuda.Stream) -> Iterator[None]:
    """What `stream` is given meanwhile waits for the end of the block, however slow the host is.

    Kernels that are used inside must have run before: loading one may wait for the stream.
    """
    word = torch.zeros(1, dtype=torch.int32).pin_memory()
    hold_up(stream, word)
    try:
        yield
    finally:
        word[0] = 1
        stream.synchronize()


class HeldBack:
    """How long esper_alloc held the host back: in the first seconds, and afterwards."""

    FIRST_S = 5.0

    def __init__(self, *devices: int) -> None:
        self.devices = devices
        self.begin = time.monotonic()
        self.first: tuple[float, float] | None = None  # when, and how long by then

    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def figures(self) -> dict[str, float]:
        import esper_alloc

        stats = [esper_alloc.memory_stats(device) for device in self.devices]
        names = ("held_back", "held_back_seconds", "held_back_in_vain")
        return {name: sum(one[name] for one in stats) for name in names}

    def look(self) -> None:
        """To be called again and again: when the first seconds are over, it notes the figures."""
        if self.first is None and self.elapsed() > self.FIRST_S:
            self.first = self.elapsed(), self.figures()["held_back_seconds"]

    def found(self) -> dict[str, float]:
        figures = self.figures()
        when, before = self.first or (self.elapsed(), figures["held_back_seconds"])
        return {
            **figures,
            "first_lost": before,
            "later_lost": figures["held_back_seconds"] - before,
            "later_seconds": self.elapsed() - when,
        }


@functools.cache
def device_total() -> int:
    return int(torch.cuda.mem_get_info()[1])


@contextlib.contextmanager
def no_new_memory() -> Iterator[None]:
    """Meanwhile there is no new memory for more than 2 MiB."""
    limit = torch.cuda.memory_reserved() + (2 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / device_total())
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def other_streams(count: int, beside: torch.cuda.Stream | None = None) -> list[torch.cuda.Stream]:
    """`count` streams that run truly beside `beside` (default: the current) and each other.

    Streams may share a hardware queue, and then a wait on one blocks the other:
    a test that needs two streams to overlap has to pick them by trying.
    """
    chosen = [beside or torch.cuda.current_stream()]
    probe = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    seen: set[int] = {stream.cuda_stream for stream in chosen}
    for _ in range(64):
        if len(chosen) > count:
            break
        candidate = torch.cuda.Stream()
        if candidate.cuda_stream in seen:
            continue
        seen.add(candidate.cuda_stream)
        pairs = [pair for one in chosen for pair in ((candidate, one), (one, candidate))]
        if all(_overlap(busy, idle, probe) for busy, idle in pairs):
            chosen.append(candidate)
    assert len(chosen) > count, f"no {count} streams that overlap"
    return chosen[1:]


def _overlap(busy: torch.cuda.Stream, idle: torch.cuda.Stream, probe: torch.Tensor) -> bool:
    """Does work on `idle` run while `busy` has a kernel waiting behind another?"""
    if _launches_block():
        return True
    sleep(busy, 4)
    with torch.cuda.stream(busy):
        probe.add_(1)
    with torch.cuda.stream(idle):
        torch.cuda._sleep(1000)
        done = torch.cuda.Event()
        done.record()
    limit = time.perf_counter() + 0.5
    while not done.query() and time.perf_counter() < limit:
        pass
    overlapped = not busy.query()
    torch.cuda.synchronize()
    return overlapped


def _launches_block() -> bool:
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "1"


def warm_up() -> None:
    """Loads the kernels that programs use: loading one can stall the device."""
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for dtype in (torch.int32, torch.float32):
                x = torch.full((4096,), 1, dtype=dtype, device="cuda")
                y = torch.empty_like(x)
                y.copy_(x)
                x.fill_(2)
                x.zero_()
                x.repeat(4)
                wrong = torch.zeros((), dtype=torch.int64, device="cuda")
                wrong.add_((x != 1).sum())
                wrong.item()
                (x + y).mul_(2)
    torch.cuda.synchronize()


def wrong_elements(x: torch.Tensor, value: float) -> int:
    """How many elements of `x` are not `value`, after everything has run."""
    torch.cuda.synchronize()
    return int((x != value).sum().item())


def overlaps(a: torch.Tensor, start: int, size: int) -> bool:
    """Does `a` share bytes with the `size` bytes at `start`?"""
    first = a.data_ptr()
    return first < start + size and start < first + a.numel() * a.element_size()
