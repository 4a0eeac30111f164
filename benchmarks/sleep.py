"""What it costs to put memory to sleep and to wake it, and what is as it was afterwards."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from common import MIB, workers
from measuring import choose_allocator, device_used_mib, machine, nvidia_smi_used_mib, seconds_of
from models import gpt2
from torch import nn

GIB = 1 << 30
PIECE = 256 * MIB  # of the plain copy: a chunk of sleep's pinned memory
GRAPHS, GRAPH_CYCLES = 2, 100
STEPS = 12  # of training
TURNS, TURN_BYTES = 50, 8 * GIB


def make_tensors(size: int) -> list[Any]:
    """`size` bytes: for each parameter its weights and AdamW's two moments, of many sizes."""
    made: list[Any] = []
    left, number = size, 0
    while left > 0:
        piece = min(left, (1 + number * 37 % 64) * MIB)
        made.append(torch.full((piece // 4,), float(number), device="cuda"))
        left -= piece
        number += 1
    return made


def make_graphs() -> list[tuple[Any, Any, Any, Any]]:
    """Graphs with private pools of their own: (graph, input, output, what a replay gave)."""
    made = []
    for i in range(GRAPHS):
        x = torch.full((64 * MIB // 4,), float(i + 1), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2 + 1).sqrt()
        graph.replay()
        made.append((graph, x, y, y.clone()))
    return made


class PlainCopy:
    """As many bytes out and in again, through `room` bytes of pinned memory, piece by piece.

    Pinning takes far longer than copying, so there is less of it than of tensors, but several times
    as much as the processor's caches hold. It is pinned in chunks as large as those of sleep, by
    the same thread, so it lies as near to the GPU.
    """

    def __init__(self, size: int, room: int) -> None:
        self.device = torch.empty(PIECE, device="cuda", dtype=torch.uint8)
        self.count = max(size // PIECE, 1)
        self.host = [
            torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            for _ in range(min(max(room // PIECE, 1), self.count))
        ]

    def pieces(self) -> Iterator[Any]:
        return islice(cycle(self.host), self.count)

    def out(self) -> None:
        for piece in self.pieces():
            piece.copy_(self.device, non_blocking=True)

    def back(self) -> None:
        for piece in self.pieces():
            self.device.copy_(piece, non_blocking=True)

    @property
    def bytes(self) -> int:
        return self.count * PIECE


def used_mib() -> float:
    """Of the device, as nvidia-smi says, or else the driver."""
    found = nvidia_smi_used_mib()
    return device_used_mib() if found is None else found


def warm_up() -> None:
    """Loads kernels and has PyTorch and the driver allocate what they keep."""
    import esper_alloc

    with esper_alloc.tag("warm"):
        kept, graphs = make_tensors(64 * MIB), make_graphs()
    esper_alloc.sleep("warm")
    esper_alloc.wake("warm")
    for graph, _, y, before in graphs:
        graph.replay()
        torch.equal(y, before)
    del kept, graphs, graph, _, y, before
    torch.cuda.empty_cache()
    esper_alloc.trim_sleep()


def bandwidth(
    allocator: str, gib: float, cycles: int, plain_gib: float, saver: str = ""
) -> dict[str, Any]:
    """Tensors and the private pools of two graphs sleep and wake; between the cycles the same
    process copies as many bytes from the device to pinned memory and back. `saver`: see below."""
    if cycles < 2:
        raise ValueError("the first cycle pins host memory, so there must be two")
    if saver:
        measure_saver(gib, cycles, saver == "keeps host memory")
    import esper_alloc

    size, room = int(gib * GIB), int(plain_gib * GIB)
    choose_allocator(allocator)
    torch.zeros(1, device="cuda")
    plain = PlainCopy(size, room)
    warm_up()
    torch.cuda.synchronize()
    beside_mib = used_mib()
    with esper_alloc.tag("kept"):
        kept, graphs = make_tensors(size), make_graphs()
    expected = [float(x[-1]) for x in kept]
    found: dict[str, list[float]] = {"sleep": [], "wake": [], "out": [], "back": []}
    live = left_mib = 0.0
    for _ in range(cycles):
        done: list[Any] = []
        found["sleep"].append(seconds_of(lambda: done.append(esper_alloc.sleep("kept"))))
        left_mib = max(left_mib, used_mib() - beside_mib)
        live = float(done[0].kept)
        if done[0].stays:
            raise RuntimeError(f"some memory stays: {done[0].stays}")
        found["wake"].append(seconds_of(lambda: esper_alloc.wake("kept")))
        found["out"].append(seconds_of(plain.out))
        found["back"].append(seconds_of(plain.back))
        for one in graphs:
            one[0].replay()
        same = all(torch.equal(y, before) for _, _, y, before in graphs)
        if not same or [float(x[-1]) for x in kept] != expected:
            raise RuntimeError("contents are not what they were")
    host = esper_alloc.tag_stats()["kept"]["host_bytes"]
    nothing = [seconds_of(lambda: esper_alloc.sleep("kept", keep="nothing"))]
    nothing.append(seconds_of(lambda: esper_alloc.wake("kept")))
    del kept, graphs, one
    torch.cuda.synchronize()
    return {
        "machine": machine(),
        **rates(found, live, float(plain.bytes)),
        "a_gib_s": 1 / rates(found, live, live)["sleep_gib_s"],
        "first_sleep_s": found["sleep"][0],
        "nothing_sleep_s": nothing[0],
        "nothing_wake_s": nothing[1],
        "unmap_s": seconds_of(torch.cuda.empty_cache),
        "left_mib": left_mib,
        "host_share": host / live,
    }


def rates(found: dict[str, list[float]], live: float, copied: float) -> dict[str, float]:
    """GiB/s from the second cycle on."""
    moved = {"sleep": live, "wake": live, "out": copied, "back": copied}
    return {
        f"{name}_gib_s": moved[name] / GIB / statistics.median(seconds[1:])
        for name, seconds in found.items()
    }


def measure_saver(gib: float, cycles: int, keeps: bool) -> NoReturn:
    """The same tensors in a region of torch_memory_saver's. Its graphs do not keep contents.
    `keeps`: its host memory stays pinned; by default it is pinned anew for each pause.

    A block of the region that goes back to the driver while its thread is in no region ends the
    process. So nothing here empties PyTorch's cache, and the worker leaves before the region does:
    at the interpreter's exit the library would fail.
    """
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"  # no library is preloaded
    saver.retain_cpu_backup = keeps
    with saver.region(tag="kept", enable_cpu_backup=True):
        kept = make_tensors(int(gib * GIB))
    found: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(cycles):
        found["sleep"].append(seconds_of(lambda: saver.pause("kept")))
        found["wake"].append(seconds_of(lambda: saver.resume("kept")))
    live = float(sum(x.numel() * x.element_size() for x in kept))
    workers.report({**rates(found, live, live), "first_sleep_s": found["sleep"][0]})
    sys.stderr.flush()
    os._exit(0)


def graphs(allocator: str) -> dict[str, Any]:
    """Replays after many cycles: how many of them have another bit somewhere."""
    import esper_alloc

    choose_allocator(allocator)
    torch.manual_seed(0)
    square = torch.ones(64, 64, device="cuda")
    torch.mm(square, square)  # cuBLAS's workspace has no tag
    with esper_alloc.tag("graphs"), torch.no_grad():
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
        x = torch.randn(512, 1024, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
            z = y * 2 + x
    graph.replay()
    expected = y.clone(), z.clone()
    wrong = 0
    for _ in range(GRAPH_CYCLES):
        with esper_alloc.asleep("graphs") as result:
            if result.stays:
                raise RuntimeError(f"some memory stays: {result.stays}")
        graph.replay()
        wrong += not (torch.equal(y, expected[0]) and torch.equal(z, expected[1]))
    return {"machine": machine(), "wrong": float(wrong)}


def training(allocator: str) -> dict[str, Any]:
    """The losses of GPT-2, asleep after each step and not."""
    import esper_alloc

    choose_allocator(allocator)
    torch.use_deterministic_algorithms(True)
    host_share = 1.0

    def losses(sleeps: bool) -> list[str]:
        nonlocal host_share
        torch.manual_seed(0)
        step, seen = gpt2(small=False), []
        for _ in range(STEPS):
            seen.append(step())
            if sleeps:
                live = esper_alloc.sleep().kept
                host = sum(one["host_bytes"] for one in esper_alloc.tag_stats().values())
                host_share = max(host_share, host / live)
                esper_alloc.wake()
        return [float(loss).hex() for loss in seen]

    plain, sleeping = losses(False), losses(True)
    if len(set(plain)) < STEPS // 2:
        raise RuntimeError(f"the losses hardly change: {plain}")
    differing = float(sum(a != b for a, b in zip(plain, sleeping, strict=True)))
    return {"machine": machine(), "differing": differing, "host_share": host_share}


def take_turns(allocator: str, first: bool, other: Connection) -> int:
    """Turns without memory. Each process hands the turn to the other one. The `first` also fills
    the device but for half as much again as one of them needs, once both have their contexts."""
    import esper_alloc

    choose_allocator(allocator)
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    other.send("there")
    other.recv()
    if first:
        free = torch.cuda.mem_get_info()[0] - TURN_BYTES * 3 // 2
        with esper_alloc.tag("ballast"):
            ballast = torch.empty(max(free, 0), device="cuda", dtype=torch.uint8)
    kept: list[Any] = []
    wrong = short = 0
    for turn in range(TURNS):
        if turn or not first:
            other.recv()
        if not kept:
            with esper_alloc.tag("kept"):
                kept = make_tensors(TURN_BYTES)
            expected = [float(x[0]) for x in kept]
        else:
            try:
                esper_alloc.wake("kept")
            except torch.OutOfMemoryError:
                short += 1
        if not short:
            wrong += [float(x[0]) for x in kept] != expected
            wrong += len(esper_alloc.sleep("kept").stays)
            torch.cuda.empty_cache()
        other.send("your turn")
    if first:
        other.recv()
        del ballast
    if wrong:
        raise RuntimeError(f"contents were not what they were, or memory stayed: {wrong} times")
    return short


def turns(allocator: str) -> dict[str, Any]:
    """Two processes take turns. short: their turns without memory."""
    mine, its = Pipe()

    def second() -> None:
        mine.close()
        its.send(take_turns(allocator, False, its))

    get_context("fork").Process(target=second, daemon=True).start()
    its.close()
    short = take_turns(allocator, True, mine)
    return {"machine": machine(), "short": float(short + mine.recv())}
