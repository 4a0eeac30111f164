"""Runs out of memory in every way, and goes on. Usage: oom.py ALLOCATOR"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from device import report, say, use_allocator

GIB = 1 << 30


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def failure(request: Callable[[], object]) -> dict[str, Any]:
    """The exception that a request ends in."""
    try:
        request()
    except Exception as error:  # which type it is, is the question
        return {
            "type": type(error).__name__,
            "out_of_memory": isinstance(error, torch.cuda.OutOfMemoryError),
            "message": str(error),
        }
    return {"type": None, "out_of_memory": False, "message": "it succeeded"}


def works() -> bool:
    """Does a small computation still come out right?"""
    x = torch.arange(1000, device="cuda")
    return int((x * 2).sum().item()) == 999000


def fill() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Takes the card a GiB at a time, each piece with its own pattern."""
    pieces: list[torch.Tensor] = []
    while True:
        try:
            piece = take(GIB)
        except torch.cuda.OutOfMemoryError:
            break
        piece.fill_(len(pieces) % 251)
        pieces.append(piece)
        assert len(pieces) < 4096, "the card never filled"
    return pieces, failure(lambda: take(GIB))


def intact(pieces: list[torch.Tensor], numbers: list[int]) -> bool:
    """Do the pieces hold what was written, at both ends and in between?"""
    return all(
        bool((piece[:: 1 << 16] == number % 251).all().item()) and int(piece[-1]) == number % 251
        for piece, number in zip(pieces, numbers, strict=True)
    )


def main(allocator: str) -> None:
    use_allocator(allocator)
    kept = torch.arange(1 << 20, device="cuda")
    found: dict[str, Any] = {}

    before = torch.cuda.memory_stats()["num_ooms"]
    found["huge"] = failure(lambda: take(800_000_000 * GIB))
    found["works_after_huge"] = works()
    found["exabyte"] = failure(lambda: take(1 << 60))
    found["more_exabytes"] = failure(lambda: take(1 << 62))
    found["works_after_exabyte"] = works()
    found["ooms_counted"] = torch.cuda.memory_stats()["num_ooms"] - before

    say("filling the card")
    reserve = take(64 << 20)  # so that the checks below have memory to work in
    pieces, found["full"] = fill()
    found["pieces"] = len(pieces)
    del reserve
    found["works_when_full"] = works()
    found["intact"] = intact(pieces, list(range(len(pieces))))

    say("going on")
    allocated = torch.cuda.memory_allocated()
    pieces.pop()
    again = take(GIB)  # a fitting request
    again.fill_(7)
    found["fitting_request"] = int(again[-1].item()) == 7
    found["allocated_as_before"] = torch.cuda.memory_allocated() == allocated
    del again

    # Every other piece goes: two GiB in a row exist only after cached
    # segments were given back.
    numbers = list(range(0, len(pieces), 2))
    pieces = pieces[::2]
    if len(pieces) >= 3:
        joined = take(2 * GIB)
        joined.fill_(9)
        found["joined_request"] = int(joined[-1].item()) == 9
        del joined
    found["intact_after_joining"] = intact(pieces, numbers)
    pieces.clear()

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    most = take(int(free * 0.9))
    most[-1] = 3
    found["most_of_the_card"] = int(most[-1].item()) == 3
    del most
    torch.cuda.empty_cache()

    say("the memory fraction")
    torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
    found["fraction"] = failure(lambda: take(3 * GIB))
    torch.cuda.set_per_process_memory_fraction(1.0)
    after = take(3 * GIB)
    found["works_after_fraction"] = works()
    del after
    found["kept"] = bool((kept == torch.arange(1 << 20, device="cuda")).all().item())
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1])
