"""A stream that waits for another one, and is the first to use what that one is given afterwards.

    wait_then_allocate.py USES TRIES CASE...

Communication libraries are written like this: the communication stream waits for the
computation's, the result is allocated for the computation's stream, and the communication stream
writes it. Nothing is ordered after the allocation, so no other stream may be at work on the memory
when it is handed out. Here blocks are read late on a third stream, each into a copy, and dropped;
then comes such a result, and the copies are compared.

A CASE is a protection and how much memory there is, such as record_stream-short. Protections:
record_use (the use ends at the mark), until_free (the same in grad mode), record_stream, nothing
(for USES automatic; with USES marked it is the control), and own: nothing, and the blocks are the
reading stream's. Memory: short (there is none but the blocks'), plenty, or captured (a CUDA graph
does all of it; a branch of the graph is the communication stream). Reports for each case in how
many tries a value was wrong, and after how many mallocs the reading was over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from device import OURS, other_streams, report, say, sleep, use_allocator, warm_up

import esper_alloc

ELEMENTS = 8 << 20  # of int32: 32 MiB
BYTES = 4 * ELEMENTS
MANY = 6  # blocks: more than the default allowance
DELAY_MS = 10.0


def protect(x: torch.Tensor, stream: torch.cuda.Stream, how: str) -> None:
    if how == "record_stream":
        x.record_stream(stream)
    elif how in ("record_use", "until_free"):
        with torch.set_grad_enabled(how == "until_free"):
            esper_alloc.record_use(x, stream)


class Case:
    def __init__(self, how: str) -> None:
        self.how = how
        self.main = torch.cuda.current_stream()
        self.reader, self.comm = other_streams(2)
        self.read = torch.cuda.Event()  # the last of the copies
        self.copies = [blank() for _ in range(MANY)]
        self.copied = blank()  # of the result
        torch.cuda.synchronize()

    def read_late(self, blocks: Sequence[torch.Tensor]) -> None:
        for x, copy in zip(blocks, self.copies):
            sleep(self.reader, DELAY_MS)
            with torch.cuda.stream(self.reader):
                copy.copy_(x)
            self.read.record(self.reader)
            protect(x, self.reader, self.how)

    def use_first(self, value: int) -> torch.Tensor:
        """The result, for which the main stream still has to wait."""
        self.comm.wait_stream(self.main)  # first this,
        result = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")  # then the memory
        with torch.cuda.stream(self.comm):
            result.fill_(value)
            self.copied.copy_(result)
        protect(result, self.comm, self.how)
        return result

    def is_wrong(self, count: int, value: int) -> bool:
        """Whether a copy is not of its block, which was full of the value and its place."""
        torch.cuda.synchronize()
        return any(
            bool((copy != expected).any())
            for copy, expected in [
                *((self.copies[place], value + place) for place in range(count)),
                (self.copied, -value),
            ]
        )

    def attempt(self, value: int, short: bool) -> dict[str, bool]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.reader if self.how == "own" else self.main):
            blocks = [blank().fill_(value + place) for place in range(1 if short else MANY)]
        count = len(blocks)
        torch.cuda.synchronize()
        if short:
            limit = torch.cuda.memory_reserved() + BYTES // 2
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        try:
            self.read_late(blocks)
            blocks.clear()
            result = self.use_first(-value)
            waited = self.read.query()
            self.main.wait_stream(self.comm)
            del result
            torch.cuda.synchronize()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return {"wrong": self.is_wrong(count, value), "waited": waited}


class Captured(Case):
    """The same in a graph, with one block, whose input changes from replay to replay."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.input = blank()
        torch.add(self.input, 0, out=self.copied)  # loads the kernels
        torch.mul(self.input, -1, out=self.copied)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.main = torch.cuda.current_stream()
            x = self.input + 0
            self.reader.wait_stream(self.main)
            self.read_late([x])
            del x
            result = self.use_first(-1)
            self.main.wait_stream(self.reader)
            self.main.wait_stream(self.comm)
            del result

    def use_first(self, value: int) -> torch.Tensor:
        self.comm.wait_stream(self.main)
        result = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")
        with torch.cuda.stream(self.comm):
            torch.mul(self.input, value, out=result)
            self.copied.copy_(result)
        protect(result, self.comm, self.how)
        return result

    def attempt(self, value: int, short: bool) -> dict[str, bool]:
        self.input.fill_(value)
        self.graph.replay()
        return {"wrong": self.is_wrong(1, value), "waited": False}


def blank() -> torch.Tensor:
    return torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")


def run(name: str, tries: int) -> dict[str, Any]:
    say(name)
    how, memory = name.split("-")
    case = (Captured if memory == "captured" else Case)(how)
    case.attempt(1, memory == "short")  # everything is warm
    outcomes = [case.attempt(value, memory == "short") for value in range(100, 100 + tries)]
    torch.cuda.synchronize()
    return {
        "tries": len(outcomes),
        "wrong": sum(one["wrong"] for one in outcomes),
        "waited": sum(one["waited"] for one in outcomes),
    }


def main(uses: str, tries: int, *cases: str) -> None:
    use_allocator(OURS)
    esper_alloc.enable(uses=uses)  # type: ignore[arg-type]
    warm_up()
    with torch.no_grad():
        report(**{name: run(name, tries) for name in cases})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
