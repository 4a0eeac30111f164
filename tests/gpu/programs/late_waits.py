"""Memory that a stream reads without a mark, while its own stream waits for that after the free.

    late_waits.py ALLOCATOR TRIES

PyTorch's own allocator gives the memory to no other stream, so a wait is in time if it comes before
the memory's stream touches new memory. The reader is held up meanwhile, and other streams allocate as
much, and more. Reports how often the reader saw other data.
"""

from __future__ import annotations

import sys

import torch
from device import held_up, other_streams, report, say, use_allocator, warm_up

MIB = 1 << 20
SIZES = (1, 12, 40, 96)  # MiB


def main(allocator: str, tries: int) -> None:
    use_allocator(allocator)
    warm_up()
    home, reader, other = other_streams(3)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    comparison = torch.empty(max(SIZES) * MIB, dtype=torch.bool, device="cuda")
    one = torch.full((MIB,), 1, dtype=torch.int8, device="cuda")  # loads the kernels
    torch.ne(one, 1, out=comparison[:MIB])
    wrong.add_(comparison[:MIB].count_nonzero())
    corrupted = 0
    for number in range(tries):
        if number % 10 == 0:
            say(f"try {number}, {corrupted} corrupted so far")
        size = SIZES[number % len(SIZES)] * MIB
        wrong.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(home):
            x = torch.full((size,), 1, dtype=torch.int8, device="cuda")
        reader.wait_stream(home)
        with held_up(reader):
            with torch.cuda.stream(reader):
                torch.ne(x, 1, out=comparison[:size])
                wrong.add_(comparison[:size].count_nonzero())
            del x
            home.synchronize()  # whose own work says nothing of the reader's
            with torch.cuda.stream(other):
                taken = [torch.full((size,), 2, dtype=torch.int8, device="cuda") for _ in range(2)]
                taken.append(torch.full((3 * size,), 2, dtype=torch.int8, device="cuda"))
            other.synchronize()
            home.wait_stream(reader)
            with torch.cuda.stream(home):
                torch.full((size,), 3, dtype=torch.int8, device="cuda")
        torch.cuda.synchronize()
        corrupted += int(wrong) > 0
        del taken
    report(tries=tries, corrupted=corrupted)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
