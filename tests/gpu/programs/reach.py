"""A mark of one tensor, and a delayed backward pass that reads its memory through another.

Usage: reach.py MARK TRIES

The memory belongs to one stream, and is read on another. Autograd keeps it there through something
else than the marked tensor: each of HOLDERS below. Then all is dropped, backward is enqueued
behind a delay, and the memory is wanted. MARK: grad, where the holders are counted; or exact, in
no_grad, which is what a count that misses one holder comes to.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from device import OURS, other_streams, report, say, sleep, use_allocator, warm_up, wrong_elements

ELEMENTS = 4 << 20  # 16 MiB of float32
PART = ELEMENTS // 4
DELAY_MS = 10.0

#: Takes a list with the only reference to x, and w; returns what is to be marked, and the product of
#: x, or of its first part, and w.
Holder = Callable[[list[torch.Tensor], torch.Tensor], tuple[Any, torch.Tensor]]


def itself(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    view = x.pop().view(2, -1)
    return view, view * w.view(2, -1)


def base(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return x[0].view(2, -1), x.pop() * w


def other_view(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    kept = x[0].view(2, -1)
    return x.pop().view(4, -1), kept * w.view(2, -1)


def one_of_all_views(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    views = list(x.pop().split(PART))
    return views, views[0] * w


def one_of_all_views_with_the_base(
    x: list[torch.Tensor], w: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    views = [x[0], *x[0].split(PART)]
    x.clear()
    return views, views[1] * w


def base_of_all_views(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return list(x[0].split(PART)), x.pop() * w


def detached(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return x[0], x.pop().detach() * w


class Keeps(torch.autograd.Function):
    """x * w, with x in an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad * ctx.x


def context(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return x[0].view(2, -1), Keeps.apply(x.pop(), w)


def inference(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """x is an inference tensor, which autograd itself refuses to save."""
    return x[0], Keeps.apply(x.pop(), w)


def checkpoint(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    view = x[0].view(2, -1)
    run = torch.utils.checkpoint.checkpoint
    return view, run(torch.mul, x.pop(), w, use_reentrant=False, preserve_rng_state=False)


def hooks(x: list[torch.Tensor], w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    view = x[0].view(2, -1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]):
        return view, x.pop() * w


HOLDERS: dict[str, Holder] = {
    holder.__name__: holder
    for holder in (
        itself,
        base,
        other_view,
        one_of_all_views,
        one_of_all_views_with_the_base,
        base_of_all_views,
        detached,
        context,
        inference,
        checkpoint,
        hooks,
    )
}
#: Their w is as long as what they read, or backward would want memory of x's size by itself.
OF_A_PART = ("one_of_all_views", "one_of_all_views_with_the_base")


def forward(
    holder: Holder, value: int, w: torch.Tensor, side: torch.cuda.Stream, exact: bool
) -> tuple[int, torch.Tensor]:
    """The address of the memory, and a sum over it that backward can begin at."""
    import esper_alloc

    with torch.inference_mode(holder is inference):
        x = [torch.full((ELEMENTS,), float(value), device="cuda")]
    address = x[0].data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        marked, product = holder(x, w)
        total = product.sum()
        del product
    with torch.no_grad() if exact else contextlib.nullcontext():
        esper_alloc.record_use(marked, side)
    return address, total


def attempt(
    holder: Holder, value: int, w: torch.Tensor, side: torch.cuda.Stream, exact: bool
) -> tuple[bool, bool]:
    """One try: was the gradient wrong, was the memory handed out while backward was to come?"""
    w.grad = None
    torch.cuda.empty_cache()  # what the attempt before has dropped would fit as well
    address, total = forward(holder, value, w, side, exact)
    torch.cuda.synchronize()  # the forward pass and its mark are over
    with torch.cuda.stream(side):
        sleep(side, DELAY_MS)
        total.backward()  # enqueues the read behind the delay, then drops the memory
    del total
    pressure = []
    for _ in range(4):
        other = torch.empty(ELEMENTS, device="cuda")
        other.fill_(-1.0)
        pressure.append(other)
        if other.data_ptr() == address:
            break
    reused = pressure[-1].data_ptr() == address
    assert w.grad is not None
    return wrong_elements(w.grad[:PART], float(value)) > 0, reused


def main(mark: str, tries: int) -> None:
    use_allocator(OURS)
    warm_up()
    exact = {"grad": False, "exact": True}[mark]
    (owner,) = other_streams(1)
    found = {}
    with torch.cuda.stream(owner):
        (side,) = other_streams(1, beside=owner)
        for name, holder in HOLDERS.items():
            say(name)
            length = PART if name in OF_A_PART else ELEMENTS
            w = torch.ones(length, device="cuda", requires_grad=True)
            torch.cuda.synchronize()
            for value in (1, 2):  # everything warm, its outcome not counted
                attempt(holder, value, w, side, exact)
            outcomes = [attempt(holder, value, w, side, exact) for value in range(3, tries + 3)]
            found[name] = {
                "wrong": sum(wrong for wrong, _ in outcomes),
                "reused": sum(reused for _, reused in outcomes),
            }
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
