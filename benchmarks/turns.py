"""Workers that are there at the same time and take turns on the GPU.

Starting a process, importing torch and building a model takes longer than what is to be timed, and
a machine is not the same from minute to minute. So all workers of a comparison start at once, wait,
and are asked for one measurement after the other: A B C, C B A, A B C ... Only one of them works at
any moment. The GPU must have room for what all of them hold. Each imports torch itself, since
libraries read the choice of an allocator from the environment as they are loaded.

The measuring side hands take_turns() an iterator; the conducting side is turns(). What wants a
fresh process each time measures in_children(): forked ones of a process that has imported what they
need and not touched the GPU. Or each measurement is a worker of its own, which imports anew. Where
fresh processes set up for longer than they are timed, they set up together: each calls ready()
before the time that counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any

from common import OURS, Rounds, workers
from measuring import driver_version

WorkerFailed, report, reported = workers.WorkerFailed, workers.report, workers.reported

#: What one process at a time needs at most: its threads and the driver's.
CORES = 4
#: Seconds for a worker that has reported to end by itself, with all that it started.
LEAVES_S = 10.0


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


def ready(asked: int = 0) -> None:
    """Says that this worker has set up, and waits until it is asked to go on. `asked`: the file of
    its standard input. A forked child has another one, and needs a copy of the worker's."""
    report({})
    os.read(asked, 1)


def end_with(parent: int) -> None:
    """A worker that is ended leaves no child behind that keeps the GPU busy."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def in_a_child(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` finds in a child of this process. The child is killed then: its libraries'
    threads may end the way out by a signal, or never. Raises WorkerFailed where it ends before."""
    fork, parent = multiprocessing.get_context("fork"), os.getpid()
    answers, answer = fork.Pipe(duplex=False)

    def work() -> None:
        end_with(parent)
        answer.send(measure())

    child = fork.Process(target=work)
    child.start()
    answer.close()
    try:
        found: dict[str, Any] = answers.recv()
    except EOFError:
        child.join()
        raise WorkerFailed(f"a child ended with {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
    return found


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

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
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
                found = reported(line)
                if found is not None:
                    return found
                printed.append(line)
        finally:
            timer.cancel()
        if late.is_set():
            raise WorkerFailed(f"no result within {timeout:.0f} s")
        self._errors.seek(0)
        code = self._process.wait()
        raise WorkerFailed(f"exit status {code}", "".join(printed) + self._errors.read())

    def end(self, patience: float = 0.0) -> None:
        """Ends the process, whatever it does after `patience` s, in which nobody asks it."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def turns(
    commands: Mapping[str, tuple[Sequence[str], Mapping[str, str]]],
    rounds: int,
    *,
    fresh: bool = False,
    once: Collection[str] = (),
    together: bool = False,
    may_fail: bool = False,
    least: int = 1,
    timeout: float = 300.0,
    seconds: float = float("inf"),
    tight: bool = False,
    each: Callable[[Rounds], object] = lambda _: None,
) -> Rounds:
    """What each case's worker reported in each round, by case.

    commands: the command of each and its environment.
    fresh: each measurement is a new worker; otherwise they stay, and all start together.
    once: cases that are measured in the first round alone.
    together: in each round all set up at once, until they call ready(); then they take turns.
    may_fail: a failure is a figure; otherwise it is printed, and the case left out from then on.
    seconds, least: no round starts after so many seconds, but so many rounds are measured.
    tight: no case is begun for which there is less time left than the longest took; of those that
        set up together no round.
    each: is told after every measurement what there is so far.
    """
    begin, longest = time.monotonic(), 0.0
    started = {} if fresh else {name: Worker(*how) for name, how in commands.items()}
    there, again = [*commands], set()  # again: those that failed, and import anew
    measured: Rounds = []

    def answer(name: str) -> dict[str, Any] | None:
        try:
            return started[name].answer(timeout)
        except WorkerFailed as error:
            print(f"{name}: {error}", flush=True)
            if may_fail:
                again.add(name)
                return {"failed": 1, "why": error.brief}
            there.remove(name)
            return None

    def fresh_start(name: str) -> dict[str, Any] | None:
        """A worker that can be asked to measure; figures only if it failed at its imports."""
        if fresh:
            started[name] = Worker(*commands[name])
        elif name in again:
            again.remove(name)
            started[name].end()
            started[name] = Worker(*commands[name])
            started[name].ask()
            return answer(name) or None
        return None

    def set_up(names: Sequence[str]) -> dict[str, dict[str, Any] | None]:
        """Figures of those that are over by the time they should be ready."""
        over = {name: failed for name in names if (failed := fresh_start(name))}
        for name in names:
            if name not in over and not fresh:  # which begins by itself
                started[name].ask()
        found = {name: answer(name) for name in names if name not in over}
        return over | {name: one for name, one in found.items() if one != {}}

    def measure(name: str) -> dict[str, Any] | None:
        failed = None if together else fresh_start(name)
        if not failed:
            started[name].ask()
        return failed or answer(name)

    def too_late(start: float) -> bool:
        return tight and begin + seconds < start + longest

    try:
        for worker in started.values():
            worker.ask()
        for name in started:
            answer(name)
        for number in range(rounds):
            first = time.monotonic()
            if number >= least and (begin + seconds < first or (together and too_late(first))):
                print(f"stopped after {number} of {rounds} rounds: {seconds:.0f} s are over")
                break
            measured.append({})
            names = [
                name for name in there[:: 1 if number % 2 == 0 else -1]
                if not (number and name in once)
            ]  # fmt: skip
            over = set_up(names) if together else {}
            if together:
                took = time.monotonic() - first
                print(f"round {number + 1}: ready after {took:.1f} s", flush=True)
            for name in names:
                start = time.monotonic()
                if not together and too_late(start):
                    print(f"round {number + 1}: {name}: left out, no time is left", flush=True)
                    continue
                found = over[name] if name in over else measure(name)
                took = time.monotonic() - start
                longest = max(longest, took)
                if fresh:  # while a process gives its memory back, the driver serves others late
                    started[name].end(LEAVES_S)
                if took > 1:
                    print(f"round {number + 1}: {name}: took {took:.1f} s", flush=True)
                if found is not None:
                    measured[-1][name] = found
                    each(measured)
            if together:
                longest = time.monotonic() - first
    finally:
        for worker in started.values():
            worker.end()
    return measured
