"""A fence on a GPU: stray accesses fault and are named, correct programs work.

fence.py read | write | copied | beside | unordered | overrun
fence.py correct
"""

import random
import sys
from collections.abc import Callable

import torch
from device import OURS, held_up, report, use_allocator

SIZE = 1 << 20

KERNEL = """
extern "C" __global__ void stray(float *at, int offset) { at[offset] = 1.0f; }
"""


class Borrowed:
    """Memory that nothing keeps, as another library may hand it over."""

    def __init__(self, x: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape), "typestr": "<f4", "data": (x.data_ptr(), False), "version": 3,
        }  # fmt: skip


def borrow(x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(Borrowed(x), device="cuda")


def wait_and_let_the_allocator_look() -> None:
    """What was freed is unmapped: nothing that it waits for is left."""
    torch.cuda.current_stream().synchronize()
    x = torch.empty(128, device="cuda")
    del x


def freed() -> torch.Tensor:
    """Borrowed memory whose tensor is gone."""
    x = torch.ones(SIZE, device="cuda")
    y = borrow(x)
    del x
    wait_and_let_the_allocator_look()
    return y


def read() -> None:
    freed().sum()


def write() -> None:
    freed().fill_(2.0)


def copied() -> None:
    """The driver looks at a copy's addresses at the call."""
    y = freed()
    torch.empty(SIZE, device="cuda").copy_(y)


def beside() -> None:
    """A kernel that is no operator."""
    stray = torch.cuda._compile_kernel(KERNEL, "stray")
    stray((1, 1, 1), (1, 1, 1), (freed(), 0))


def overrun() -> None:
    stray = torch.cuda._compile_kernel(KERNEL, "stray")
    x = torch.ones(SIZE, device="cuda")
    stray((1, 1, 1), (1, 1, 1), (x, SIZE))


def unordered() -> None:
    """A side stream reads late, unmarked, what the main stream frees. That could still wait, but
    touches new memory first."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x, y, z = (torch.ones(SIZE, device="cuda") for _ in range(3))
    torch.add(x, 1, out=z)  # loads the kernel
    side.wait_stream(main)
    main.synchronize()
    with held_up(side), torch.cuda.stream(side):
        y.copy_(x)
        del x
        with torch.cuda.stream(main):
            wait_and_let_the_allocator_look()
            torch.add(z, 1)
    torch.cuda.synchronize()


def faults(program: Callable[[], None]) -> None:
    import esper_alloc

    try:
        with esper_alloc.audit(fence=True) as found:
            program()
    except esper_alloc.AuditError as error:
        fault = error.fault
        assert fault is not None, error
        report(
            fault=fault.error,
            suspects=[
                [finding.kind, finding.place.frames[0].function] for finding, _ in fault.suspects
            ],
            freed=[one.freed.frames[0].function for one in fault.freed],
            text=fault.text(),
        )
    else:
        report(fault=None, kinds=[finding.kind for finding in found.findings])


def correct() -> None:
    """Many allocations with patterns, on two streams, and frees of all of them."""
    import esper_alloc

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    random.seed(1)
    live: dict[int, tuple[torch.Tensor, float]] = {}
    seen: set[int] = set()
    wrong = torch.zeros((), device="cuda")
    with esper_alloc.audit(fence=True) as found:
        for step in range(2000):
            k = random.randrange(50)
            if k in live:
                x, value = live.pop(k)
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    wrong += (x != value).sum()
                esper_alloc.record_use(x, side)
                del x
            else:
                size = random.choice([10, 1000, SIZE, 5 * SIZE])
                x = torch.full((size,), float(step % 1000), device="cuda")
                live[k] = x, float(step % 1000)
                seen.add(x.data_ptr())
        main.wait_stream(side)
        live.clear()
    report(fault=found.fault, wrong=float(wrong), findings=len(found.findings),
           addresses=len(seen), allocated=step, text=found.text())  # fmt: skip


if __name__ == "__main__":
    use_allocator(OURS)
    name = sys.argv[1]
    if name == "correct":
        correct()
    else:
        faults({"read": read, "write": write, "copied": copied, "beside": beside,
                "overrun": overrun, "unordered": unordered}[name])  # fmt: skip
