"""Fills the card, and goes on. Usage: oom.py ALLOCATOR

Other shortages are in conformance/shortage.py.
"""

import sys
from typing import Any

import torch
from device import report, say, use_allocator

GIB = 1 << 30


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def works() -> bool:
    """Does a small computation still come out right?"""
    x = torch.arange(1000, device="cuda")
    return int((x * 2).sum().item()) == 999000


def fill() -> tuple[list[torch.Tensor], str]:
    """Takes the card a GiB at a time, each piece with its own pattern; and what is said in the end."""
    pieces: list[torch.Tensor] = []
    while True:
        try:
            piece = take(GIB)
        except torch.cuda.OutOfMemoryError as error:
            return pieces, str(error)
        piece.fill_(len(pieces) % 251)
        pieces.append(piece)
        assert len(pieces) < 4096, "the card never filled"


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
    free, _ = torch.cuda.mem_get_info()
    most = take(int(free * 0.9))
    most[-1] = 3
    found["most_of_the_card"] = int(most[-1].item()) == 3
    found["kept"] = bool((kept == torch.arange(1 << 20, device="cuda")).all().item())
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1])
