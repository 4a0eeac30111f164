"""Random programs over several streams on the GPU: stream_programs.py.

    random_streams.py [--uses automatic|marked] [--programs N] [--seed S] [--processes P]
                      [--delay MS] [--limit MIB] [--without compiled,graph]

Without marks, `marked` is the control. The programs have the seeds from S on; P processes share
them. A delay that a program asks for lasts MS milliseconds or up to three times as long. Reports
how many programs found wrong values, the seeds of the first of them, and how many checks there
were; with automatic uses, the exit status is 1 if any did. `--programs 1 --seed S` runs one of
them again. A program keeps its compiled graphs and captured graphs until it ends.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import stream_programs
import torch
from device import OURS, other_streams, report, say, sleep, use_allocator, warm_up

import esper_alloc


class Gpu(stream_programs.CudaStreams):
    def __init__(self, delay: float, alone: bool) -> None:
        self.milliseconds = delay
        count = stream_programs.STREAMS - 1
        # Beside other processes nobody can see which streams overlap.
        others = other_streams(count) if alone else [torch.cuda.Stream() for _ in range(count)]
        self.streams = [torch.cuda.current_stream(), *others]
        self.wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in self.streams]
        self.checks = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.compiled = torch.compile(stream_programs._add, dynamic=False)
        torch.cuda.synchronize()

    def delay(self, stream: int, milliseconds: int) -> None:
        sleep(self.streams[stream], milliseconds * self.milliseconds)

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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The programs, in this process."""
    use_allocator(OURS)
    esper_alloc.enable(uses=options.uses)
    if options.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.limit * 2**20 / total)
    warm_up()
    machine = Gpu(options.delay, alone=not options.beside)
    without = frozenset(filter(None, options.without.split(",")))
    failed = []
    with ThreadPoolExecutor(1) as thread:
        for seed in range(options.seed, options.seed + options.programs):
            if (seed - options.seed) % 20 == 0:
                say(f"seed {seed}, {len(failed)} failed so far")
            program = stream_programs.make_program(seed, without=without)
            stream_programs.Run(machine, program, thread).run()
            if machine.end():
                failed.append(seed)
    return {
        "programs": options.programs,
        "failed": len(failed),
        "first": failed[:5],
        "checks": machine.checks,
    }


def shares(programs: int, processes: int) -> list[int]:
    """Programs for each process that gets any."""
    each, more = divmod(programs, processes)
    return [one for one in (each + (number < more) for number in range(processes)) if one]


def run_in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """The same in several processes. Raises CalledProcessError if one of them fails."""
    running, seed = [], options.seed
    for share in shares(options.programs, options.processes):
        command = [
            sys.executable, __file__, "--beside", "--programs", str(share), "--seed", str(seed),
        ]  # fmt: skip
        for name in ("uses", "delay", "limit", "without"):
            command += [f"--{name}", str(getattr(options, name))]
        # Streams share hardware queues when there are more of them than queues.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **os.environ}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
        seed += share
    found: dict[str, Any] = {"programs": 0, "failed": 0, "first": [], "checks": 0}
    for process in running:
        printed, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        for name, figure in json.loads(printed.splitlines()[-1]).items():
            if name in found:
                found[name] += figure
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uses", choices=("automatic", "marked"), default="automatic")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=0.0)
    parser.add_argument("--without", default="")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.programs < 1 or options.processes < 1:
        parser.error("--programs and --processes are at least 1")
    unknown = set(filter(None, options.without.split(","))) - stream_programs.NEEDS_OTHERS
    if unknown:
        known = ", ".join(sorted(stream_programs.NEEDS_OTHERS))
        parser.error(f"--without {', '.join(sorted(unknown))}: what can be left out is {known}")
    begin = time.monotonic()
    found = run_in_processes(options) if options.processes > 1 else run(options)
    report(**found, seconds=round(time.monotonic() - begin, 1))
    return int(options.uses == "automatic" and found["failed"] > 0 and not options.beside)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status:
        sys.exit(status)
