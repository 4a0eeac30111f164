"""Random programs over several streams, every read checked.

Usage: stress.py marked|unmarked SEED COUNT [LIMIT_MIB]

A program writes tensors on random streams, reads them late on others, marks
the reads in a random way, and drops tensors at random. Some tensors are written
on a stream that waited for their own before they were allocated, and that is
marked, too. Each read compares the whole tensor with what was written. LIMIT_MIB
bounds the memory, so that programs live on reuse. `unmarked` leaves the marks out,
as the control: it reads something else, or pages that went elsewhere meanwhile,
which the device reports and nothing survives.
"""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from device import OURS, other_streams, report, sleep, use_allocator, warm_up

import esper_alloc

MIB = 1 << 20
LIVE_BYTES = 96 * MIB
STEPS = 60
MARKS = ("record_use", "using", "record_stream", "event", "thread", "late")


@dataclass(eq=False)
class Written:
    tensor: torch.Tensor
    value: int
    owner: int
    writer: int


class Program:
    """One seeded program. Streams and error counters are shared by all."""

    def __init__(
        self,
        seed: int,
        streams: list[torch.cuda.Stream],
        errors: list[torch.Tensor],
        thread: ThreadPoolExecutor,
        marked: bool,
    ) -> None:
        self.random = random.Random(seed)
        self.streams = streams
        self.errors = errors
        self.thread = thread
        self.marked = marked
        self.live: list[Written] = []
        self.unmarked: list[tuple[Written, int]] = []  # marks that come late, before the drop
        self.value = seed * STEPS
        self.reads = 0
        self.out_of_memory = 0

    def run(self) -> None:
        for _ in range(STEPS):
            steps = (self.write, self.write_behind, self.read, self.drop)
            step = self.random.choices(steps, (3, 1, 5, 3))[0]
            try:
                step()
            except torch.cuda.OutOfMemoryError:
                self.out_of_memory += 1
                while self.live:
                    self.drop()
        while self.live:
            self.drop()

    def draw_elements(self) -> int:
        """Makes room for them, too."""
        elements = int(2 ** self.random.uniform(7, 22))
        while self.live and self.live_bytes() + 4 * elements > LIVE_BYTES:
            self.drop()
        return elements

    def write(self) -> None:
        elements = self.draw_elements()
        owner = self.random.randrange(len(self.streams))
        self.value += 1
        with torch.cuda.stream(self.streams[owner]):
            tensor = torch.empty(elements, dtype=torch.int32, device="cuda")
            self.delay(owner)
            tensor.fill_(self.value)
        self.live.append(Written(tensor, self.value, owner, owner))

    def write_behind(self) -> None:
        """The writer waits for the owner before the memory is allocated."""
        elements = self.draw_elements()
        owner, writer = (self.random.randrange(len(self.streams)) for _ in range(2))
        self.value += 1
        self.streams[writer].wait_stream(self.streams[owner])
        with torch.cuda.stream(self.streams[owner]):
            tensor = torch.empty(elements, dtype=torch.int32, device="cuda")
        with torch.cuda.stream(self.streams[writer]):
            tensor.fill_(self.value)
        one = Written(tensor, self.value, owner, writer)
        self.live.append(one)
        self.mark(one, writer, self.random.choice(MARKS))

    def read(self) -> None:
        if not self.live:
            return
        one = self.random.choice(self.live)
        reader = self.random.randrange(len(self.streams))
        stream = self.streams[reader]
        stream.wait_stream(self.streams[one.writer])
        mark = self.random.choice(MARKS)
        self.reads += 1
        if self.marked and mark == "using":
            with esper_alloc.using(one.tensor, stream=stream):
                self.compare(one, reader)
            return
        with torch.cuda.stream(stream):
            self.compare(one, reader)
        self.mark(one, reader, mark)

    def mark(self, one: Written, reader: int, mark: str) -> None:
        if not self.marked or reader == one.owner:
            return
        stream = self.streams[reader]
        if mark == "record_stream":
            one.tensor.record_stream(stream)
        elif mark == "event":
            event = torch.cuda.Event()
            event.record(stream)
            self.delay(reader)
            esper_alloc.record_use(one.tensor, event=event)
        elif mark == "thread":
            self.thread.submit(esper_alloc.record_use, one.tensor, stream).result()
        elif mark == "late":
            self.unmarked.append((one, reader))
        else:
            esper_alloc.record_use(one.tensor, stream)

    def drop(self) -> None:
        if not self.live:
            return
        one = self.live.pop(self.random.randrange(len(self.live)))
        for late in [late for late in self.unmarked if late[0] is one]:
            self.unmarked.remove(late)
            esper_alloc.record_use(one.tensor[:1], self.streams[late[1]])

    def compare(self, one: Written, reader: int) -> None:
        """On the reader's stream, which is current: late, and over every element."""
        self.delay(reader)
        self.errors[reader].add_((one.tensor != one.value).sum())

    def delay(self, stream: int) -> None:
        if self.random.random() < 0.4:
            sleep(self.streams[stream], self.random.uniform(0.02, 0.5))

    def live_bytes(self) -> int:
        return sum(4 * one.tensor.numel() for one in self.live)


def statistics_agree() -> bool:
    """Do the statistics equal the sums over the snapshot, with nothing running?"""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    segments = torch.cuda.memory_snapshot()
    return stats["reserved_bytes.all.current"] == sum(
        segment["total_size"] for segment in segments
    ) and stats["allocated_bytes.all.current"] == sum(
        segment["allocated_size"] for segment in segments
    )


def main(marks: str, seed: int, count: int, limit_mib: int = 0) -> None:
    use_allocator(OURS)
    warm_up()
    marked = {"marked": True, "unmarked": False}[marks]
    without_grad = ThreadPoolExecutor(1, initializer=torch.set_grad_enabled, initargs=(False,))
    with torch.no_grad(), without_grad as thread:
        streams = [torch.cuda.current_stream(), *other_streams(3)]
        errors = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        if limit_mib:
            total = torch.cuda.mem_get_info()[1]
            limit = torch.cuda.memory_reserved() + limit_mib * MIB
            torch.cuda.set_per_process_memory_fraction(limit / total)
        wrong_programs = reads = out_of_memory = 0
        agree = True
        for number in range(count):
            program = Program(seed + number, streams, errors, thread, marked)
            try:
                program.run()
                torch.cuda.synchronize()
            except torch.AcceleratorError as error:
                if marked or "illegal memory access" not in str(error):
                    raise
                report(wrong=wrong_programs + 1)
                os._exit(0)
            reads += program.reads
            out_of_memory += program.out_of_memory
            if sum(int(one) for one in errors):
                wrong_programs += 1
                for one in errors:
                    one.zero_()
                torch.cuda.synchronize()
            if number % 20 == 0:
                agree = agree and statistics_agree()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        leaked = torch.cuda.memory_allocated() - base
        active = torch.cuda.memory_stats()["active_bytes.all.current"]
        allocated = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    report(
        programs=count,
        reads=reads,
        wrong=wrong_programs,
        out_of_memory=out_of_memory,
        peak_reserved_mib=peak // MIB,
        leaked=leaked,
        pending=active - allocated,
        statistics_agree=agree,
    )


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
