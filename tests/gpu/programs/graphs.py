"""CUDA graphs as PyTorch makes them. The rules of captures are in tests/episodes.

Usage: graphs.py SCENARIO

Each scenario captures, replays several times with new input, and counts the
replays whose output is wrong. Delays are kernels of the graph: without the
right edges the numbers are wrong in every replay.
"""

import sys
from collections.abc import Callable
from typing import Any

import driver_calls as driver
import torch
from device import (
    OURS,
    Scenarios,
    other_streams,
    report,
    sleep,
    use_allocator,
    warm_up,
    wrong_elements,
)

import esper_alloc

ELEMENTS = 8 << 20  # of int32: 32 MiB
DELAY_MS = 10.0
REPLAYS = 8

scenario = Scenarios()


def blank() -> torch.Tensor:
    return torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")


def reserved() -> int:
    return int(torch.cuda.memory_stats()["reserved_bytes.all.current"])


def warm() -> None:
    """Loads the kernels of the scenarios: that may not happen in a capture."""
    x, y = blank(), blank()
    y.copy_(x + 1)
    y.copy_(x - 1)
    y.copy_((x + 3) + x * 2)
    y.fill_(1)
    torch.cuda._sleep(1000)
    wrong_elements(y, 1)


def replay(
    graph: torch.cuda.CUDAGraph,
    x: torch.Tensor,
    outs: dict[int, tuple[torch.Tensor, Callable[[int], int]]],
) -> int:
    """Replays with new input: how many replays had a wrong output.

    outs: what each output tensor must be, as a function of the input's value.
    """
    wrong = 0
    for value in range(1, REPLAYS + 1):
        x.fill_(value)
        for out, _ in outs.values():
            out.fill_(-7)
        graph.replay()
        wrong += any(wrong_elements(out, of(value)) for out, of in outs.values())
    return wrong


@scenario
def reset_frees() -> dict[str, Any]:
    """A graph's memory goes when the graph goes, and not before."""
    x = blank()
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):  # PyTorch keeps a random state for captures
        x.add_(0)
    first.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x + 1
        out.mul_(2)
        (out + 3).sub_(1)
    torch.cuda.empty_cache()
    held = reserved() - base
    wrong = 0
    for value in range(1, REPLAYS + 1):
        x.fill_(value)
        graph.replay()
        wrong += wrong_elements(out, 2 * value + 2) > 0
    graph.replay()  # runs on while the graph goes
    graph.reset()
    torch.cuda.empty_cache()
    wrong += wrong_elements(out, 2 * REPLAYS + 2) > 0  # an output outlives its graph
    del out
    torch.cuda.empty_cache()
    return {"wrong": wrong, "held": held, "kept": reserved() - base}


@scenario
def conditional_body() -> dict[str, Any]:
    """What is freed while a conditional node's body is captured, and was allocated outside
    it, serves neither in the body nor after it: a side stream reads it late."""
    x, late, first, second, after = blank(), blank(), blank(), blank(), blank()
    side, inside = other_streams(2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        a = x + 1
        outer = a.data_ptr()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            sleep(side, DELAY_MS)
            late.copy_(a)
        a.record_stream(side)
        body = driver.add_condition(main)
        driver.begin_capture_to(inside, body)
        with torch.cuda.stream(inside):
            del a
            b = x * 3
            address, taken = b.data_ptr(), b.data_ptr() == outer
            first.copy_(b)
            del b
            c = x * 5
            reused = c.data_ptr() == address
            second.copy_(c)
            del c
        driver.end_capture_to(inside)
        d = x + 7
        taken |= d.data_ptr() in (outer, address)
        after.copy_(d)
        del d
        main.wait_stream(side)
    outs = {
        0: (late, lambda v: v + 1),
        1: (first, lambda v: 3 * v),
        2: (second, lambda v: 5 * v),
        3: (after, lambda v: v + 7),
    }
    return {"wrong": replay(graph, x, outs), "reused": reused, "taken": taken}


@scenario
def child_graph() -> dict[str, Any]:
    """A graph that is one node of another, and late: what is read behind it and marked
    serves again behind the join."""
    x, first, late, after = blank(), blank(), blank(), blank()
    (side,) = other_streams(1)
    own = driver.OwnStream()
    torch.cuda.synchronize()
    own.begin_capture(driver.RELAXED)  # the allocator hears nothing of it
    with torch.cuda.stream(own.torch):
        sleep(own.torch, DELAY_MS)
        inner = x * 5
        first.copy_(inner)
        del inner
    child = own.end_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        a = x + 1
        address = a.data_ptr()
        side.wait_stream(main)
        driver.add_child(side, child)
        with torch.cuda.stream(side):
            late.copy_(a)
        esper_alloc.record_use(a, side)
        del a
        b = x - 1
        reused = b.data_ptr() == address
        after.copy_(b)
        del b
        main.wait_stream(side)
        c, d = x + 3, x + 0
        again = address in (c.data_ptr(), d.data_ptr())
        after.add_(c)
        del c, d
    outs = {
        0: (first, lambda v: 5 * v),
        1: (late, lambda v: v + 1),
        2: (after, lambda v: 2 * v + 2),
    }
    return {"wrong": replay(graph, x, outs), "reused": reused, "reused_after_join": again}


def _two_devices(protect: Callable[..., None]) -> dict[str, Any]:
    """A capture over two devices: memory of the second is written by a stream of the
    first, read late by another of the second, and its owner goes on."""
    x, main_device = blank(), torch.cuda.current_device()
    with torch.cuda.device(1):
        here, late, after = blank(), blank(), blank()
        owner, reader = other_streams(2)
        late.copy_(x)  # enables what a capture may not
        after.copy_(here * 2)
        here.fill_(4)
        sleep(owner, 1)
    torch.cuda.synchronize(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        owner.wait_stream(main)
        with torch.cuda.stream(owner):
            a = torch.empty_like(here)
            address = a.data_ptr()
        reader.wait_stream(owner)
        with torch.cuda.device(1), torch.cuda.stream(reader):
            a.copy_(x)  # runs on the source's stream: main; the reader waits for it
            sleep(reader, DELAY_MS)
            late.copy_(a)
        protect(a, [main, reader])
        del a
        with torch.cuda.stream(owner):
            sleep(owner, DELAY_MS / 3)  # unprotected, b is written between copy and read
            b = here * 2
            reused = b.data_ptr() == address
            after.copy_(b)
            del b
        owner.wait_stream(main)
        owner.wait_stream(reader)
        with torch.cuda.stream(owner):
            c, d = here * 2, here * 1
            again = address in (c.data_ptr(), d.data_ptr())
            after.copy_(c)
            del c, d
        main.wait_stream(owner)
    assert torch.cuda.current_device() == main_device
    wrong = 0
    for value in range(1, REPLAYS + 1):
        x.fill_(value)
        late.fill_(-7)
        after.fill_(-7)
        torch.cuda.synchronize(1)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.synchronize(1)
        wrong += wrong_elements(late, value) + wrong_elements(after, 8) > 0
    return {"wrong": wrong, "reused": reused, "reused_after_join": again}


@scenario
def two_devices() -> dict[str, Any]:
    def mark(a: torch.Tensor, streams: list[torch.cuda.Stream]) -> None:
        for stream in streams:
            esper_alloc.record_use(a, stream)

    return _two_devices(mark)


@scenario
def two_devices_unmarked() -> dict[str, Any]:
    return _two_devices(lambda a, streams: None)


def main(name: str) -> None:
    use_allocator(OURS)
    warm_up()
    with torch.no_grad():
        warm()
        torch.cuda.synchronize()
        found = scenario[name]()
        torch.cuda.synchronize()
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1])
