"""What it costs to put memory to sleep and to wake it."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, NoReturn

import torch
from common import MIB, workers
from measuring import choose_allocator, device_used_mib, machine, seconds_of

GIB = 1 << 30
PIECE = 256 * MIB  # of the plain copy: a chunk of sleep's pinned memory
GRAPHS = 2


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
    beside_mib = device_used_mib()
    with esper_alloc.tag("kept"):
        kept, graphs = make_tensors(size), make_graphs()
    expected = [float(x[-1]) for x in kept]
    found: dict[str, list[float]] = {"sleep": [], "wake": [], "out": [], "back": []}
    live = left_mib = 0.0
    for _ in range(cycles):
        done: list[Any] = []
        found["sleep"].append(seconds_of(lambda: done.append(esper_alloc.sleep("kept"))))
        left_mib = max(left_mib, device_used_mib() - beside_mib)
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
