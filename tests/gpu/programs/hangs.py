"""Work that waits for what is not yet enqueued, and memory that is wanted meanwhile.

Usage: hangs.py SCENARIO MARK [TRIES]

value: a reader waits for a flag that the owner's stream sets after its next
allocation, into which it writes.
value_later: the same, but the reader waits after the mark and before the free.
ring: two ranks, on two devices (ring) or one (ring_on_one), send a block each
and drop it; the sending is over when the other rank has received, and each
rank receives into memory that it asks for after the drop.

MARK is how the reading is marked: gate_false, trait (the reader's stream is
declared to do rendezvous work), record_stream, or gate: the control, which may
hang. With _until_free behind it, the mark is made in grad mode while others hold the block, so it
lasts until the free. What hangs is let go by the host and counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import driver_calls as driver
import torch
from device import (
    OURS,
    other_streams,
    overlaps,
    report,
    say,
    use_allocator,
    warm_up,
)

import esper_alloc

MIB = 1 << 20
ELEMENTS = 8 * MIB  # of int32: 32 MiB
BYTES = 4 * ELEMENTS
PATIENCE = 5.0  # seconds
CONTROLS = ("gate", "gate_until_free")


def declare(stream: torch.cuda.Stream, mark: str) -> None:
    """Says of the stream what `mark` needs to be said beforehand."""
    if mark.startswith("trait"):
        esper_alloc.set_stream_traits(stream, rendezvous=True)


def protect(x: torch.Tensor, stream: torch.cuda.Stream, mark: str) -> None:
    if mark == "record_stream":
        x.record_stream(stream)
        return
    others = [x]
    with torch.set_grad_enabled(mark.endswith("_until_free")):
        esper_alloc.record_use(x, stream, gate=not mark.startswith("gate_false"))
    others.clear()


def finished(streams: Sequence[torch.cuda.Stream], mark: str) -> bool:
    """Do the streams come to their end while the host enqueues nothing more?"""
    limit = time.monotonic() + (1.0 if mark in CONTROLS else PATIENCE)
    while not all(stream.query() for stream in streams):
        if time.monotonic() > limit:
            return False
        time.sleep(0.0002)
    return True


def wrong_elements(x: torch.Tensor, value: int) -> int:
    """How many elements of `x` are not `value`; takes no memory that a try wants to reuse."""
    torch.cuda.synchronize()
    return int((x.cpu() != value).sum())


class Rank:
    """One side of the ring: a device, the stream that owns memory, the one that sends."""

    def __init__(
        self, number: int, owner: torch.cuda.Stream, sender: torch.cuda.Stream, mark: str
    ) -> None:
        self.number = number
        self.device = owner.device.index
        self.owner = owner
        self.sender = sender
        declare(sender, mark)
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self.owner):
                self.sent = torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")
                # The block that is sent and received into; until both ranks have
                # theirs, or the other would borrow it.
                self.own: torch.Tensor | None = torch.full_like(self.sent, 1)
                self.sent.copy_(self.own)
            torch.cuda.synchronize()

    def send(self, received: torch.Tensor, value: int, mark: str) -> int:
        """Enqueues the sending of a block full of `value`; the block's address."""
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self.owner):
                x = torch.full((ELEMENTS,), value, dtype=torch.int32, device="cuda")
            self.sender.wait_stream(self.owner)
            driver.wait_for_value(self.sender, received[self.number : self.number + 1], value)
            with torch.cuda.stream(self.sender):
                self.sent.copy_(x)
            protect(x, self.sender, mark)
            return x.data_ptr()

    def receive(self, received: torch.Tensor, value: int) -> torch.Tensor:
        """Enqueues the receiving, which lets the other rank's sending go on."""
        with torch.cuda.device(self.device):
            with torch.cuda.stream(self.owner):
                y = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")
                y.fill_(-value)
            other = 1 - self.number
            driver.write_value(self.owner, received[other : other + 1], value)
            return y


def ring(devices: tuple[int, int], mark: str, tries: int) -> dict[str, Any]:
    # Streams that do not share a hardware queue: there one would block another.
    if devices[0] == devices[1]:
        pool = other_streams(4)
    else:
        pool = []
        for device in devices:
            with torch.cuda.device(device):
                pool += other_streams(2)
    ranks = [Rank(number, *pool[2 * number : 2 * number + 2], mark) for number in range(2)]
    for rank in ranks:
        rank.own = None
    received = torch.zeros(2, dtype=torch.int32).pin_memory()  # seen by both devices
    streams = [stream for rank in ranks for stream in (rank.owner, rank.sender)]
    hung = wrong = reused = 0
    for value in range(1, tries + 1):
        say(f"try {value}, {hung} hung so far")
        sent_from = [rank.send(received, value, mark) for rank in ranks]
        into = [rank.receive(received, value) for rank in ranks]
        reused += all(overlaps(y, at, BYTES) for y, at in zip(into, sent_from, strict=True))
        if not finished(streams, mark):
            hung += 1
            received.fill_(value)  # the host lets them go
        for rank, y in zip(ranks, into, strict=True):
            with torch.cuda.device(rank.device):
                wrong += wrong_elements(rank.sent, value) + wrong_elements(y, -value) > 0
        del into, y
        if hung and mark not in CONTROLS:
            break
    return {"hung": hung, "wrong": wrong, "reused": reused}


def value_wait(mark: str, tries: int, later: bool) -> dict[str, Any]:
    owner, reader = other_streams(2)
    declare(reader, mark)
    flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    hung = wrong = reused = 0
    with torch.cuda.stream(owner):
        out = torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")
    for value in range(1, tries + 1):
        say(f"try {value}, {hung} hung so far")
        with torch.cuda.stream(owner):
            x = torch.full((ELEMENTS,), value, dtype=torch.int32, device="cuda")
        reader.wait_stream(owner)
        if not later:
            driver.wait_for_value(reader, flag, value)
        with torch.cuda.stream(reader):
            out.copy_(x)
        protect(x, reader, mark)
        if later:
            driver.wait_for_value(reader, flag, value)
        address = x.data_ptr()
        del x
        with torch.cuda.stream(owner):
            y = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")
            y.fill_(-value)
        driver.write_value(owner, flag, value)
        reused += overlaps(y, address, BYTES)
        if not finished((owner, reader), mark):
            hung += 1
            flag.fill_(value)
        wrong += wrong_elements(out, value) + wrong_elements(y, -value) > 0
        del y
        if hung and mark not in CONTROLS:
            break
    return {"hung": hung, "wrong": wrong, "reused": reused}


def main(scenario: str, mark: str, tries: int = 20) -> None:
    use_allocator(OURS)
    warm_up()
    with torch.no_grad():
        if scenario.startswith("value"):
            outcome = value_wait(mark, tries, scenario == "value_later")
        else:
            outcome = ring((0, 0) if scenario == "ring_on_one" else (0, 1), mark, tries)
    report(tries=tries, **outcome)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(argument) for argument in sys.argv[3:]))
