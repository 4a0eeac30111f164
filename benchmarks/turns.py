"""Workers that are there at the same time and take turns on the GPU.

Starting a process, importing torch and building a model takes longer than what is to
be timed, and a machine is not the same from minute to minute. So all workers of a
comparison start at once, wait, and are asked for one measurement after the other:
A B C, C B A, A B C ... Only one of them works at any moment. The GPU must have room
for what all of them hold. Each allocator's worker imports torch itself, all at the same
time, since libraries read the choice from the environment as they are loaded.

The measuring side hands take_turns() an iterator; the conducting side is turns(). What
wants a fresh process each time measures in_children(): forked ones of a process that has
imported what they need and not touched the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from common import (
    OURS,
    Case,
    Results,
    Rounds,
    WorkerFailed,
    driver_version,
    nothing_measurable,
    report,
    result_in,
    worker_process,
)

#: What one process at a time needs at most: its threads and the driver's.
CORES = 4


def stay_on(cores: int) -> None:
    """Keeps this process on so many of the cores that it may use, the same ones as every
    other worker: what a step takes differs from core to core."""
    chosen = sorted(os.sched_getaffinity(0))[-cores:]
    os.sched_setaffinity(0, chosen)
    if "torch" in sys.modules:  # which has counted all cores
        sys.modules["torch"].set_num_threads(len(chosen))


def take_turns(measurements: Iterator[dict[str, Any]], cores: int | None = None) -> None:
    """Reports the next of `measurements` whenever the conductor asks. The first is
    asked for at once, while the other workers start: it imports, on all cores, and must not
    use the GPU. The others are on the same `cores`, where it says how many they need."""
    for number, _ in enumerate(sys.stdin):
        if cores and number == 1:
            stay_on(cores)
        try:
            found = next(measurements)
        except StopIteration:
            return
        report(found)


def end_with(parent: int) -> None:
    """A worker that is ended leaves no child behind that keeps the GPU busy."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def in_a_child(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` finds in a child of this process. Raises where it ends badly."""
    ours, its = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            end_with(parent)
            os.write(its, json.dumps(measure()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)  # nothing of the parent's is ended here
    os.close(its)
    with os.fdopen(ours) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a child ended with status {os.waitstatus_to_exitcode(status)}")
    return json.loads(told)


def in_children(
    allocator: str,
    measure: Callable[[], dict[str, Any]],
    imports: Callable[[], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """What `measure` finds in one child after the other, which chooses the allocator; `imports`
    is called before they are forked."""
    import torch  # noqa: F401

    if allocator == OURS:
        import esper_alloc  # noqa: F401
    if imports:
        imports()
    driver_version()  # known to all children then
    yield {}
    while True:
        yield in_a_child(measure)


class Worker:
    """A worker process that measures when it is asked."""

    def __init__(self, script: str | Path, case: Case) -> None:
        self.case = case
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command, environment = worker_process(script, case.allocator, case.args, case.environment)
        self._process = subprocess.Popen(
            command, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip

    def ask(self) -> None:
        """Lets it measure; answer() waits for the figures."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: answer() says so
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        """What it measured. Raises WorkerFailed where it ended, or took `timeout` s."""
        assert self._process.stdout
        printed: list[str] = []
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            for line in self._process.stdout:
                found = result_in(line)
                if found is not None:
                    return found
                printed.append(line)
        finally:
            timer.cancel()
        if late.is_set():
            raise WorkerFailed(f"{self.case.name}: no result within {timeout:.0f} s")
        self._errors.seek(0)
        tail = ("".join(printed) + self._errors.read())[-3000:]
        code = self._process.wait()
        raise WorkerFailed(f"{self.case.name}: exit status {code} and this output:\n{tail}")

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def turns(
    script: str | Path,
    cases: Sequence[Case],
    rounds: int,
    *,
    timeout: float = 300.0,
    seconds: float = float("inf"),
    together: bool = False,
    each: Callable[[Rounds], object] | None = None,
) -> Rounds:
    """What each case's worker reported in each round, by case; first what all reported
    while they started. A worker that fails is printed, and missing from then on. No
    round starts after `seconds`. `together`: all work at once. `each` is told after every
    round what there is so far."""
    begin = time.monotonic()
    workers = [Worker(script, case) for case in cases]
    measured: Rounds = []
    try:
        measured.append(_answers(workers, timeout))
        print(f"{len(workers)} workers started in {time.monotonic() - begin:.1f} s", flush=True)
        for number in range(rounds):
            if number and time.monotonic() - begin > seconds:
                print(f"stopped after {number} of {rounds} rounds: {seconds:.0f} s are over")
                break
            there = [worker for worker in workers if worker.case.name in measured[-1]]
            in_turn = [[worker] for worker in (there if number % 2 == 0 else reversed(there))]
            found: dict[str, dict[str, Any]] = {}
            for group in [there] if together else in_turn:
                found.update(_answers(group, timeout))
            measured.append(found)
            if each:
                each(measured)
    finally:
        for worker in workers:
            worker.end()
    took = time.monotonic() - begin
    print(f"{len(measured) - 1} rounds of {len(cases)} workers in {took:.1f} s", flush=True)
    return measured


def turns_of_children(
    script: str | Path,
    cases: Sequence[Case],
    rounds: int,
    *,
    each: Callable[[Rounds], object] | None = None,
    **more: Any,
) -> Rounds:
    """turns() of workers that measure in_children(), without what starting them said."""
    told = (lambda measured: each(measured[1:])) if each else None
    return turns(script, cases, rounds, each=told, **more)[1:]


def compare_children(
    script: str | Path,
    cases: Sequence[Case],
    options: argparse.Namespace,
    add: Callable[[Results, Rounds], object],
    ours: str | None = OURS,
) -> int:
    """A benchmark whose cases take turns in children: `add` makes the rows of its rounds, after
    each of them and at the end. The exit status. `ours`: as for Results.of_rounds()."""
    if nothing_measurable():
        return 1
    results = Results(Path(script).stem, options.out)
    measure = partial(turns_of_children, script, cases, options.rounds, seconds=options.seconds)
    if not results.of_rounds(measure, partial(add, results), ours=ours):
        print("nothing was measured" if ours is None else f"nothing was measured under {ours}")
        return 1
    return 0 if results.save() else 1


def measured_beside(
    script: str | Path,
    cases: Sequence[Case],
    options: argparse.Namespace,
    loops: str,
    add: Callable[[Rounds], object],
    results: Results,
    left_out: Mapping[str, str] | None = None,
) -> bool:
    """Runs a benchmark of the compiled loops `loops`: `add` makes the rows in `results` of its
    rounds, after each of them and at the end. False, and why is printed, where nothing can be
    or was measured."""
    if nothing_measurable():
        return False
    from loops import load

    load(loops)  # compile once, outside the workers' time
    measure = partial(turns_of_children, script, cases, options.rounds, seconds=options.seconds)
    if not results.of_rounds(measure, add, left_out):
        print("nothing was measured under esper_alloc")
        return False
    return True


def _answers(workers: Sequence[Worker], timeout: float) -> dict[str, dict[str, Any]]:
    """Of those that gave one; all measure at the same time."""
    found = {}
    for worker in workers:
        worker.ask()
    for worker in workers:
        try:
            found[worker.case.name] = worker.answer(timeout)
        except WorkerFailed as error:
            print(f"{worker.case.name}: {error}", flush=True)
    return found
