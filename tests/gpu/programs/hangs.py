"""Work that waits for what is not yet enqueued, and memory that is wanted meanwhile.

Usage: hangs.py SCENARIO MARK [TRIES [SECONDS]]

spin: a reader is a kernel that spins until a copy sets a flag; the owner's stream
gets that after its next allocation, into which it writes.
ring: two ranks, on two devices (ring) or one (ring_on_one), send blocks
and drop them; the sending is over when the other rank has received, and each
rank receives into memory that it asks for after the drop.

MARK is how the reading is marked: record_use (without grad mode, so the use ends at the
mark), record_use_until_free (in grad mode) or record_stream. So many blocks are dropped at a
time that the allocator holds the host back, in vain. What hangs is let go by the
host and counted. Reports, too, how long the host was held back. With SECONDS the tries
go on for that long.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import driver_calls as driver
import torch
from device import OURS, HeldBack, other_streams, report, say, use_allocator, warm_up

import esper_alloc

MIB = 1 << 20
ELEMENTS = 4 * MIB  # of int32: 16 MiB
BLOCKS = 5  # dropped at a time: the last two are never waited for
PATIENCE = 5.0  # seconds

SPIN = """
extern "C" __global__ void spin(const volatile int *flag, int value)
{
  while (*flag < value) {
  }
}
"""


def protect(blocks: Sequence[torch.Tensor], stream: torch.cuda.Stream, mark: str) -> None:
    if mark == "record_stream":
        for x in blocks:
            x.record_stream(stream)
        return
    with torch.set_grad_enabled(mark == "record_use_until_free"):
        esper_alloc.record_use(blocks, stream)


def finished(streams: Sequence[torch.cuda.Stream]) -> bool:
    """Do the streams come to their end while the host enqueues nothing more?"""
    limit = time.monotonic() + PATIENCE
    while not all(stream.query() for stream in streams):
        if time.monotonic() > limit:
            return False
        time.sleep(0.0002)
    return True


def is_wrong(x: torch.Tensor, value: int) -> bool:
    """Whether elements of `x` are not `value`; takes no memory that a try wants to reuse."""
    torch.cuda.synchronize()
    return bool((x.cpu() != value).any())


class Tries:
    """Values to try, each with nothing else to be had, and what became of them."""

    def __init__(self, count: int, seconds: float, devices: tuple[int, ...]) -> None:
        self.count = count
        self.seconds = seconds
        self.held_back = HeldBack(*devices)
        self.tried = self.hung = self.wrong = 0

    def __iter__(self) -> Iterator[int]:
        while not self.hung and (
            self.tried < self.count or self.held_back.elapsed() < self.seconds
        ):
            self.tried += 1
            if self.tried <= self.count or self.tried % 100 == 0:
                say(f"try {self.tried}")
            torch.cuda.empty_cache()
            yield self.tried
            self.held_back.look()

    def found(self) -> dict[str, Any]:
        found = self.held_back.found()
        return {"tries": self.tried, "hung": self.hung, "wrong": self.wrong, **found}


class Rank:
    """One side of the ring: a device, the stream that owns memory, the one that sends."""

    def __init__(self, number: int, owner: torch.cuda.Stream, sender: torch.cuda.Stream) -> None:
        self.number = number
        self.device = owner.device.index
        self.owner = owner
        self.sender = sender
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self.owner):
                self.sent = torch.zeros(BLOCKS, ELEMENTS, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()

    def send(self, received: torch.Tensor, value: int, mark: str) -> None:
        """Enqueues the sending of blocks full of `value`."""
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self.owner):
                blocks = written(value)
            self.sender.wait_stream(self.owner)
            driver.wait_for_value(self.sender, received[self.number : self.number + 1], value)
            read(self.sender, blocks, self.sent)
            protect(blocks, self.sender, mark)

    def receive(self, received: torch.Tensor, value: int) -> list[torch.Tensor]:
        """Enqueues the receiving, which lets the other rank's sending go on."""
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self.owner):
                blocks = written(-value)
            other = 1 - self.number
            driver.write_value(self.owner, received[other : other + 1], value)
            return blocks


def written(value: int) -> list[torch.Tensor]:
    """Blocks full of `value`, on the current stream."""
    return [
        torch.empty(ELEMENTS, dtype=torch.int32, device="cuda").fill_(value) for _ in range(BLOCKS)
    ]


def read(stream: torch.cuda.Stream, blocks: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    with torch.cuda.stream(stream):
        for place, x in enumerate(blocks):
            out[place].copy_(x)


def ring(devices: tuple[int, int], mark: str, tries: Tries) -> None:
    # Streams that do not share a hardware queue: there one would block another.
    if devices[0] == devices[1]:
        pool = other_streams(4)
    else:
        pool = []
        for device in devices:
            with torch.cuda.device(device):
                pool += other_streams(2)
    ranks = [Rank(number, *pool[2 * number : 2 * number + 2]) for number in range(2)]
    received = torch.zeros(2, dtype=torch.int32).pin_memory()  # seen by both devices
    streams = [stream for rank in ranks for stream in (rank.owner, rank.sender)]
    for value in tries:
        for rank in ranks:
            rank.send(received, value, mark)
        into = [rank.receive(received, value) for rank in ranks]
        if not finished(streams):
            tries.hung += 1
            received.fill_(value)  # the host lets them go
        for rank, blocks in zip(ranks, into, strict=True):
            with torch.cuda.device(rank.device):
                wrong = [is_wrong(rank.sent, value), *(is_wrong(y, -value) for y in blocks)]
                tries.wrong += any(wrong)
        del into, blocks


def load_spin() -> Callable[[torch.cuda.Stream, torch.Tensor, int], None]:
    """Makes a stream wait until a flag in pinned memory is at least a value."""
    kernel = torch.cuda._compile_kernel(SPIN, "spin")

    def spin(stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
        kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[flag, value], stream=stream)

    return spin


def spinning(mark: str, tries: Tries) -> None:
    owner, reader = other_streams(2)
    flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    wait = load_spin()
    wait(reader, flag, 0)
    torch.cuda.synchronize()  # it is loaded
    with torch.cuda.stream(owner):
        out = torch.zeros(BLOCKS, ELEMENTS, dtype=torch.int32, device="cuda")
        number = torch.zeros(1, dtype=torch.int32, device="cuda")
    for value in tries:
        with torch.cuda.stream(owner):
            blocks = written(value)
        reader.wait_stream(owner)
        wait(reader, flag, value)
        read(reader, blocks, out)
        protect(blocks, reader, mark)
        blocks.clear()
        with torch.cuda.stream(owner):
            after = written(-value)
            flag.copy_(number.fill_(value), non_blocking=True)
        if not finished((owner, reader)):
            tries.hung += 1
            flag.fill_(value)
        tries.wrong += any([is_wrong(out, value), *(is_wrong(y, -value) for y in after)])
        after.clear()


def main(scenario: str, mark: str, tries: int = 20, seconds: int = 0) -> None:
    use_allocator(OURS)
    warm_up()
    with torch.no_grad():
        given = Tries(tries, seconds, (0, 1) if scenario == "ring" else (0,))
        if scenario == "spin":
            spinning(mark, given)
        else:
            ring((0, 0) if scenario == "ring_on_one" else (0, 1), mark, given)
    report(**given.found())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(argument) for argument in sys.argv[3:]))
