"""Marks from Python beside captures, with delayed readers that check what they read.

Usage: marks.py SCENARIO [TRIES]

Every scenario lets a reader on another stream run late, drops what it reads,
puts the allocator under pressure, and counts the tries in which the reader got
something else than was written (wrong). Where nothing but the dropped memory is to
be had, the host has to wait for the reader. The rules
themselves are in tests/episodes.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import driver_calls as driver
import torch
from device import (
    OURS,
    Scenarios,
    device_total,
    no_new_memory,
    other_streams,
    overlaps,
    report,
    sleep,
    use_allocator,
    warm_up,
    wrong_elements,
)

import esper_alloc

MIB = 1 << 20
WHOLE = 8 * MIB  # elements of int32: 32 MiB
BYTES = 4 * WHOLE
DELAY_MS = 10.0

Try = Callable[[int], dict[str, Any]]
scenario = Scenarios()  # each prepares, and returns what one try does


def written(value: int, elements: int = WHOLE) -> torch.Tensor:
    """A tensor full of `value`, on the current stream."""
    return torch.full((elements,), value, dtype=torch.int32, device="cuda")


def blank(elements: int = WHOLE) -> torch.Tensor:
    return torch.zeros(elements, dtype=torch.int32, device="cuda")


def read_late(stream: torch.cuda.Stream, x: torch.Tensor, out: torch.Tensor) -> None:
    """`stream` copies x to out, late; ordered after x was written."""
    stream.wait_stream(torch.cuda.current_stream())
    sleep(stream, DELAY_MS)
    with torch.cuda.stream(stream):
        out.copy_(x)


def press(address: int, value: int) -> bool:
    """Asks for memory until it overlaps the bytes at `address`, overwriting all
    it gets with `value`: whether it did."""
    kept = []
    with no_new_memory():
        for _ in range(4):
            other = torch.empty(WHOLE, dtype=torch.int32, device="cuda")
            other.fill_(value)
            kept.append(other)
            if overlaps(other, address, BYTES):
                return True
    return False


def _beside_capture(mode: int) -> Try:
    """While another thread captures on a stream of its own, marks protect, and the capture lives."""
    (owner,) = other_streams(1)
    (side,) = other_streams(1, beside=owner)
    with torch.cuda.stream(owner):
        out = blank()
        captured = blank(1024)
        captured.add_(1)  # the kernel is loaded before anything captures
    # The owner stream must not borrow or lend: a loan waits for all streams, which beside a
    # capture nobody can ask for.
    torch.cuda.empty_cache()

    def attempt(value: int) -> dict[str, Any]:
        stream = driver.OwnStream()
        opened, closed = threading.Event(), threading.Event()
        outcome: dict[str, Any] = {}

        def capture() -> None:
            try:
                with esper_alloc.capturing():
                    stream.begin_capture(mode)
                    with torch.cuda.stream(stream.torch):
                        captured.add_(1)
                    opened.set()
                    closed.wait()
                    outcome["graph"] = stream.end_capture()
            except Exception as error:  # reported by the main thread
                outcome["error"] = repr(error)
                opened.set()

        with torch.cuda.stream(owner):
            x = written(value)
            thread = threading.Thread(target=capture)
            thread.start()
            opened.wait()
            try:
                read_late(side, x, out)
                esper_alloc.record_use(x, side)
                address = x.data_ptr()
                del x
                reused = press(address, -value)
            finally:
                closed.set()
                thread.join()
            if "error" in outcome:
                raise RuntimeError(f"the capture of the other thread: {outcome['error']}")
            wrong = wrong_elements(out, value) > 0
            count = int(captured[0].item())
            driver.launch(outcome["graph"], owner)
            wrong = wrong or int(captured[0].item()) != count + 1
        stream.destroy()
        return {"wrong": wrong, "reused": reused}

    return attempt


@scenario
def capture_in_other_thread() -> Try:
    return _beside_capture(driver.THREAD_LOCAL)


@scenario
def global_capture_in_other_thread() -> Try:
    return _beside_capture(driver.GLOBAL)


@scenario
def cupy_captures() -> Try:
    """CuPy captures behind our back; memory comes and goes on the capturing stream."""
    import cupy

    (owner,) = other_streams(1)
    with torch.cuda.stream(owner):
        out = blank()
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    as_torch = torch.cuda.ExternalStream(stream.ptr)

    def attempt(value: int) -> dict[str, Any]:
        with torch.cuda.stream(owner):
            x = written(value)
        torch.cuda.synchronize()
        with torch.cuda.stream(as_torch):
            stream.begin_capture()
            doubled = x + x  # allocated on a capturing stream
            out.copy_(doubled)
            address = doubled.data_ptr()
            del doubled  # freed there
            graph = stream.end_capture()
        with torch.cuda.stream(owner):
            other = torch.empty(WHOLE, dtype=torch.int32, device="cuda")
            other.fill_(-value)
        torch.cuda.synchronize()
        graph.launch(stream)
        stream.synchronize()
        wrong = wrong_elements(out, 2 * value) + wrong_elements(other, -value)
        return {"wrong": wrong > 0, "reused": overlaps(other, address, BYTES)}

    return attempt


def main(name: str, tries: int = 20) -> None:
    use_allocator(OURS)
    warm_up()
    device_total()
    with torch.no_grad():
        attempt = scenario[name]()
        torch.cuda.synchronize()
        attempt(1)  # everything warm, its outcome not counted
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        active = torch.cuda.memory_stats()["active_bytes.all.current"]
        outcomes = [attempt(value) for value in range(2, tries + 2)]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        leaked = torch.cuda.memory_stats()["active_bytes.all.current"] - active
    report(
        tries=len(outcomes),
        wrong=sum(one["wrong"] for one in outcomes),
        reused=sum(one["reused"] for one in outcomes),
        leaked=leaked,
    )


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
