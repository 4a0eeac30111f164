"""Validation on an environment's stream, while the memory of its batch is wanted.

Usage: fused_validation.py ALLOCATOR race TRIES
       fused_validation.py ALLOCATOR take|far

race: the environment's stream is busy, the batch is handed over and dropped,
and the same memory is asked for and written before the stream gets to it. What goes
wrong without a mark is in b8pt01.py.

ours       fused_validation_batch
current    fused_validation_batch without a stream, the environment's being current

The batch is pinned, pageable, or on the device. Reports, for each pair, how many
tries read something else than was written (corrupted), and in how many the
batch's memory served again (reused).

take, far: the results are taken to the current stream; an environment is on the other device.
"""

import contextlib
import sys
from typing import Any

import torch
from device import no_new_memory, other_streams, report, say, sleep, use_allocator, warm_up

import esper_alloc
from esper_alloc.helpers.validation import fused_validation_batch

CONFIGS = 4
DELAY_MS = 10.0
LONG_DELAY_MS = 60.0  # where memory must have served again meanwhile, on a slow host too

# --- race ---------------------------------------------------------------------

ROWS, WIDTH = 256, 16384  # 16 MiB of float32


def evaluate(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Every element of a row should be the row's target."""
    right = inputs == targets[:, None]
    return inputs.amax(dim=1), right, right.numel()


def ours(inputs: torch.Tensor, targets: torch.Tensor, stream: torch.cuda.Stream) -> Any:
    found = fused_validation_batch(inputs, targets, CONFIGS, stream, evaluate=evaluate)
    return found.correct, found.total


def current(inputs: torch.Tensor, targets: torch.Tensor, stream: torch.cuda.Stream) -> Any:
    """What another stream allocated is protected on the current one."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = fused_validation_batch(inputs, targets, CONFIGS, evaluate=evaluate, device="cuda")
    return found.correct, found.total


class Race:
    """What the tries share, so that each allocates little but its batch."""

    def __init__(self, how: str, source: str) -> None:
        self.how = how
        self.source = source
        (self.side,) = other_streams(1)
        self.host = torch.empty(ROWS, WIDTH)
        if source == "pinned":
            self.host = self.host.pin_memory()
        self.targets = torch.empty(ROWS, device="cuda")

    def batch(self, value: int) -> torch.Tensor:
        if self.source == "device":
            return torch.full((ROWS, WIDTH), float(value), device="cuda")
        return self.host.fill_(value)

    def pressure(self, address: int, value: int) -> bool:
        """Asks for as much memory as the batch took, and writes it: was it the batch's? Memory of
        the device that a mark protects is waited for: there is no other."""
        waits = self.source == "device" and esper_alloc.is_enabled()
        taken = []
        with no_new_memory() if waits else contextlib.nullcontext():
            for _ in range(4):
                other = torch.empty(ROWS, WIDTH, device="cuda")
                other.fill_(-value)
                taken.append(other)
                if other.data_ptr() == address:
                    break
        return taken[-1].data_ptr() == address

    def attempt(self, value: int) -> tuple[bool, bool]:
        """One try: was something else read, was the memory reused?"""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory is short: nothing else is there to be taken
        self.targets.fill_(value)
        batch = self.batch(value)
        address = batch.data_ptr()
        sleep(self.side, LONG_DELAY_MS if self.source == "device" else DELAY_MS)
        how = {"ours": ours, "current": current}[self.how]
        correct, total = how(batch, self.targets, self.side)
        del batch
        reused = self.pressure(address, value)
        torch.cuda.synchronize()
        return correct.tolist() != [total] * CONFIGS, reused


def race(tries: int) -> None:
    found = {}
    for how in ("ours", "current"):
        for source in ("pinned", "pageable", "device"):
            say(f"{how}, {source}")
            work = Race(how, source)
            with torch.inference_mode():
                for value in (1, 2):  # everything warm, its outcome not counted
                    work.attempt(value)
                outcomes = [work.attempt(value) for value in range(3, tries + 3)]
            found[f"{how}, {source}"] = {
                "tries": len(outcomes),
                "corrupted": sum(wrong for wrong, _ in outcomes),
                "reused": sum(reused for _, reused in outcomes),
            }
    report(**found)


# --- the results on the caller's stream ---------------------------------------


def take() -> None:
    """Results that the current stream reads at once, the environment's stream being busy."""
    (side,) = other_streams(1)
    wrong = 0
    for number in range(20):
        value = float(number + 1)
        inputs = torch.full((ROWS, WIDTH), value, device="cuda")
        targets = torch.full((ROWS,), value, device="cuda")
        sleep(side, 2.0)
        found = fused_validation_batch(inputs, targets, CONFIGS, side, evaluate=evaluate, take=True)
        del inputs, targets
        torch.full((ROWS, WIDTH), -value, device="cuda")
        wrong += found.loss.tolist() != [value] * CONFIGS
        wrong += found.correct.tolist() != [found.total] * CONFIGS
    report(wrong=wrong)


def far() -> None:
    """An environment of the second device, the first one being current."""
    stream = torch.cuda.Stream("cuda:1")
    wrong = 0
    for number in range(20):
        value = float(number + 1)
        where = ("cuda:0", "cuda:1", "cpu")[number % 3]
        inputs = torch.full((ROWS, WIDTH), value, device=where)
        targets = torch.full((ROWS,), value, device=where)
        sleep(stream, 2.0)
        found = fused_validation_batch(
            inputs, targets, CONFIGS, stream, evaluate=evaluate, take=True
        )
        del inputs, targets
        if where != "cpu":
            torch.full((ROWS, WIDTH), -value, device=where)
        wrong += found.loss.device != stream.device
        wrong += found.loss.tolist() != [value] * CONFIGS
        wrong += found.correct.tolist() != [found.total] * CONFIGS
    report(wrong=wrong, current=torch.cuda.current_device())


def main(allocator: str, scenario: str, *args: str) -> None:
    use_allocator(allocator)
    warm_up()
    if scenario == "race":
        race(int(args[0]))
    else:
        {"take": take, "far": far}[scenario]()


if __name__ == "__main__":
    main(*sys.argv[1:])
