"""A backward pass on a side stream is delayed past the drop of its saved input.

Usage: backward.py ALLOCATOR PROTECTION TRIES

x lives on one stream and is read on another by x * w, which saves x for the
gradient of w. The mark at the end of the forward pass does not cover the
backward pass, which reads x again, later; autograd drops x as soon as that
read is enqueued. PROTECTION: none, record_use, using, record_stream.
"""

from __future__ import annotations

import sys

import torch
from device import other_streams, report, sleep, use_allocator, warm_up, wrong_elements

ELEMENTS = 4 << 20  # 16 MiB of float32
DELAY_MS = 10.0


def forward(
    x: torch.Tensor, w: torch.Tensor, side: torch.cuda.Stream, protection: str
) -> torch.Tensor:
    """(x * w).sum() on `side`; x is saved for the backward pass."""
    if protection == "using":
        import esper_alloc

        with esper_alloc.using(x, stream=side):
            return (x * w).sum()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * w).sum()
    if protection == "record_use":
        import esper_alloc

        esper_alloc.record_use(x, side)
    elif protection == "record_stream":
        x.record_stream(side)
    elif protection != "none":
        raise ValueError(f"unknown protection {protection!r}")
    return y


def attempt(
    value: int, w: torch.Tensor, side: torch.cuda.Stream, protection: str
) -> tuple[bool, bool]:
    """One try: was the gradient wrong, was the memory handed out meanwhile?"""
    w.grad = None
    x = torch.full((ELEMENTS,), float(value), device="cuda")
    address = x.data_ptr()
    y = forward(x, w, side, protection)
    del x
    torch.cuda.synchronize()  # the forward pass and its mark are over
    with torch.cuda.stream(side):
        sleep(side, DELAY_MS)
        y.backward()  # enqueues the read behind the delay, then drops x
    del y
    pressure = []
    for _ in range(4):
        other = torch.empty(ELEMENTS, device="cuda")
        other.fill_(-1.0)
        pressure.append(other)
        if other.data_ptr() == address:
            break
    reused = pressure[-1].data_ptr() == address and not side.query()
    assert w.grad is not None
    return wrong_elements(w.grad, float(value)) > 0, reused


def main(allocator: str, protection: str, tries: int) -> None:
    use_allocator(allocator)
    warm_up()
    (owner,) = other_streams(1)
    with torch.cuda.stream(owner):
        (side,) = other_streams(1, beside=owner)
        w = torch.ones(ELEMENTS, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        for value in (1, 2):  # everything warm, its outcome not counted
            attempt(value, w, side, protection)
        outcomes = [attempt(value, w, side, protection) for value in range(3, tries + 3)]
    report(
        tries=len(outcomes),
        wrong=sum(wrong for wrong, _ in outcomes),
        reused_early=sum(reused for _, reused in outcomes),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
