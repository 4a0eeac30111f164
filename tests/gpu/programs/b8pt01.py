"""A tensor is dropped while a delayed kernel on another stream has yet to read it.

Usage: b8pt01.py ALLOCATOR SOURCE TRIES PROTECTION...

PROTECTION: none, record_use, using, record_stream; one after the other.
SOURCE: kernel (the tensor comes from a kernel) or copy (from pinned memory by
a non-blocking copy, as in a fused validation step that moves its inputs to the
device, repeats them for every configuration, and returns the repeated ones).

Reports for each protection how many tries read something else than was written
(corrupted), and in how many the memory served again before the reader had finished.
"""

import contextlib
import sys

import torch
from device import (
    no_new_memory,
    other_streams,
    report,
    say,
    sleep,
    use_allocator,
    warm_up,
    wrong_elements,
)

import esper_alloc

ELEMENTS = 4 << 20  # 16 MiB of int32
COPIES = 2
DELAY_MS = 10.0


class Attempts:
    """Everything the tries share, so that nothing but the input is allocated in one."""

    def __init__(self, protection: str, source: str) -> None:
        self.protection = protection
        self.source = source
        self.main = torch.cuda.current_stream()
        (self.side,) = other_streams(1)
        self.host = torch.empty(ELEMENTS, dtype=torch.int32).pin_memory()
        self.fused = torch.empty(COPIES * ELEMENTS, dtype=torch.int32, device="cuda")
        self.side.wait_stream(self.main)

    def inputs(self, value: int) -> torch.Tensor:
        """A new tensor on the main stream, filled with `value`."""
        if self.source == "copy":
            self.host.fill_(value)
            return self.host.to("cuda", non_blocking=True)
        return torch.full((ELEMENTS,), value, dtype=torch.int32, device="cuda")

    def read(self, x: torch.Tensor) -> None:
        """The delayed reader, on the current stream."""
        sleep(torch.cuda.current_stream(), DELAY_MS)
        self.fused.view(COPIES, ELEMENTS).copy_(x.expand(COPIES, ELEMENTS))

    def fuse(self, value: int) -> int:
        """Reads a new input on the side stream, then drops it: its address."""
        x = self.inputs(value)
        if self.protection == "using":
            with esper_alloc.using(x, stream=self.side):
                self.read(x)
        else:
            self.side.wait_stream(self.main)
            with torch.cuda.stream(self.side):
                self.read(x)
            if self.protection == "record_use":
                esper_alloc.record_use(x, self.side)
            elif self.protection == "record_stream":
                x.record_stream(self.side)
            elif self.protection != "none":
                raise ValueError(f"unknown protection {self.protection!r}")
        return x.data_ptr()

    def attempt(self, value: int) -> tuple[bool, bool]:
        """One try: was the reader served wrong, was the memory reused?"""
        torch.cuda.empty_cache()  # memory is short: nothing else is there to be taken
        address = self.fuse(value)
        pressure = []
        # The same memory is asked for again, and waited for: there is no other.
        with no_new_memory() if esper_alloc.is_enabled() else contextlib.nullcontext():
            for _ in range(4):
                other = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")
                other.fill_(-value)
                pressure.append(other)
                if other.data_ptr() == address:
                    break
        reused = pressure[-1].data_ptr() == address
        return wrong_elements(self.fused, value) > 0, reused


def main(allocator: str, source: str, tries: int, *protections: str) -> None:
    use_allocator(allocator)
    warm_up()
    found = {}
    for protection in protections:
        say(protection)
        attempts = Attempts(protection, source)
        with torch.no_grad():  # as in validation: no backward pass reads it
            for value in (1, 2):  # everything warm, its outcome not counted
                attempts.attempt(value)
            outcomes = [attempts.attempt(value) for value in range(3, tries + 3)]
        found[protection] = {
            "tries": len(outcomes),
            "corrupted": sum(wrong for wrong, _ in outcomes),
            "reused": sum(reused for _, reused in outcomes),
        }
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
