"""Random programs over several streams on the GPU: stream_programs.py.

Usage: random_streams.py USES SEED COUNT

USES: automatic, or marked, which without marks is the control. Reports how many programs
found wrong values, and how many checks they made. A program keeps its compiled graphs and
captured graphs until it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import stream_programs
import torch
from device import OURS, other_streams, report, sleep, use_allocator, warm_up

import esper_alloc


class Gpu:
    device = "cuda"

    def __init__(self) -> None:
        first = torch.cuda.current_stream()
        self.streams = [first, *other_streams(stream_programs.STREAMS - 1)]
        self.wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in self.streams]
        self.checks = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.compiled = torch.compile(stream_programs._add, dynamic=False)
        torch.cuda.synchronize()

    def on(self, stream: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self.streams[stream])
        return context

    def record(self, stream: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.streams[stream])
        return event

    def wait(self, stream: int, event: torch.cuda.Event) -> None:
        self.streams[stream].wait_event(event)

    def delay(self, stream: int, milliseconds: int) -> None:
        sleep(self.streams[stream], milliseconds)

    def expect(self, stream: int, tensor: torch.Tensor, value: int) -> None:
        self.checks += 1
        with self.on(stream):
            self.wrong[stream].add_((tensor != value).sum())

    def replayed(
        self, capture: int, replay: int, work: Callable[[], None], order: Callable[[], None]
    ) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        self.graphs.append(graph)
        order()
        self.delay(replay, 1)
        with self.on(replay):
            graph.replay()

    def end(self) -> int:
        """How many elements were wrong in the program that ends."""
        torch.cuda.synchronize()
        self.graphs.clear()
        wrong = sum(int(one.item()) for one in self.wrong)
        for one in self.wrong:
            one.zero_()
        torch.cuda.synchronize()
        return wrong


def main(uses: str, seed: int, count: int) -> None:
    use_allocator(OURS)
    esper_alloc.enable(uses=uses)  # type: ignore[arg-type]
    warm_up()
    machine = Gpu()
    failed = []
    with ThreadPoolExecutor(1) as thread:
        for one in range(seed, seed + count):
            stream_programs.Run(machine, stream_programs.make_program(one), thread).run()
            if machine.end():
                failed.append(one)
    report(programs=count, failed=len(failed), first=failed[:5], checks=machine.checks)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
