"""Patterns in which memory is dropped while another stream still uses it, without a mark.

Usage: automatic.py USES TRIES PATTERN...

USES: marked (nothing is marked, so tries go wrong) or automatic. PATTERN: one of PATTERNS.
Each is what a program did that had to be mended after its results were wrong; what PyTorch itself
does is in random_streams.py. Reports for each
in how many tries the result was wrong, in how many the dropped memory served again at once, and in
how many the host waited for the stream that is held up.
"""

import ctypes
import sys
import threading
from collections.abc import Callable

import torch
from device import OURS, hold_up, other_streams, report, say, use_allocator, warm_up, wrong_elements

import esper_alloc

ELEMENTS = 4 << 20  # 16 MiB of int32
DRIVER = ctypes.CDLL("libcuda.so.1")
HELD_S = 5.0  # at most, if a call of the host waits for the stream that is held up
AGAIN_S = 0.2  # and this where one did: it will in the next try, too


class Attempts:
    """Everything the tries share, so that nothing but the input is allocated in one."""

    def __init__(self) -> None:
        self.main = torch.cuda.current_stream()
        (self.side,) = other_streams(1, beside=self.main)
        self.host = torch.empty(ELEMENTS, dtype=torch.int32).pin_memory()
        self.out = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda")
        self.far: torch.Tensor | None = None
        self.pressure: list[torch.Tensor] = []
        self.word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.timer: threading.Timer | None = None
        self.is_warm = False
        self.waited = 0
        torch.cuda.synchronize()

    def input(self, value: int) -> torch.Tensor:
        return torch.full((ELEMENTS,), value, dtype=torch.int32, device="cuda")

    def press(self, address: int, value: int) -> bool:
        """Asks for the dropped memory on the current stream, and overwrites it: was it had?"""
        for _ in range(4):
            other = self.input(-value)
            self.pressure.append(other)
            if other.data_ptr() == address:
                return True
        return False

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What `stream` is given from now on waits for release(), however slow the host is."""
        if not self.is_warm:
            # Whoever loads a kernel may wait for the stream. Inductor does so with the GIL, which
            # give_up() would need.
            return
        hold_up(stream, self.word)
        self.timer = threading.Timer(AGAIN_S if self.waited else HELD_S, self.give_up)
        self.timer.start()

    def give_up(self) -> None:
        self.waited += 1
        self.word[0] = 1

    def release(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()
            self.timer = None
        self.word[0] = 1

    def on_side(self, late: Callable[[], object]) -> None:
        """Enqueues `late` on the side stream, ordered after the main stream, and holds it up."""
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            self.hold(self.side)
            late()


def resized(a: Attempts, value: int) -> tuple[torch.Tensor, int, int]:
    """TorchRec: a storage is emptied while it is copied to the host."""
    x = a.input(value)
    address = x.data_ptr()
    a.on_side(lambda: a.host.copy_(x, non_blocking=True))
    x.untyped_storage().resize_(0)
    return a.host, value, address


def handed_over(a: Attempts, value: int) -> tuple[torch.Tensor, int, int]:
    """TensorRT-LLM: the consumer waits for the producer's event; the producer goes on."""
    with torch.cuda.stream(a.side):
        x = a.input(value)
        ready = torch.cuda.Event()
        ready.record()
    a.main.wait_event(ready)
    a.hold(a.main)
    a.out.copy_(x)
    return a.out, value, x.data_ptr()


def stash(a: Attempts, value: int) -> tuple[torch.Tensor, int, int]:
    """A pipeline keeps what the side stream reads for one step, and that takes two."""
    kept = [a.input(value)]
    address = kept[0].data_ptr()
    a.on_side(lambda: a.out.copy_(kept[0]))
    kept.pop()  # the next step begins; the side stream is still reading
    return a.out, value, address


def triton(a: Attempts, value: int) -> tuple[torch.Tensor, int, int]:
    """So does a Triton kernel that is launched by hand."""
    from double_kernel import double

    x = a.input(value)
    a.on_side(lambda: double[(ELEMENTS // 1024,)](x, a.out, BLOCK=1024))
    return a.out, 2 * value, x.data_ptr()


def touched(a: Attempts, value: int) -> tuple[torch.Tensor, int, int]:
    """The driver copies beside the operators, and touch() says so."""

    def late() -> None:
        status = DRIVER.cuMemcpyDtoDAsync_v2(
            ctypes.c_void_p(a.out.data_ptr()),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_size_t(4 * ELEMENTS),
            ctypes.c_void_p(a.side.cuda_stream),
        )
        assert status == 0, status

    x = a.input(value)
    a.on_side(late)
    if USES == "automatic":
        esper_alloc.touch(x, a.side)
    return a.out, value, x.data_ptr()


def across(a: Attempts, value: int) -> tuple[torch.Tensor, int, int]:
    """The other device's copy is made late, by a side stream of this one."""
    if a.far is None:
        a.far = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda:1")
    far, x = a.far, a.input(value)
    a.on_side(lambda: far.copy_(x, non_blocking=True))
    return far, value, x.data_ptr()


PATTERNS = {
    one.__name__: one
    for one in (
        resized, handed_over, stash, triton, touched, across,
    )
}  # fmt: skip


def attempt(a: Attempts, pattern: str, value: int) -> tuple[bool, bool]:
    """One try: was anything wrong, did the memory serve again at once?"""
    torch.cuda.empty_cache()  # memory is short: nothing else is there to be taken
    result, expected, address = PATTERNS[pattern](a, value)
    with torch.cuda.stream(a.side if pattern == "handed_over" else a.main):
        reused = a.press(address, value)  # handed_over: it is the producer's next tensor
        torch.cuda.current_stream().synchronize()
    a.release()
    wrong = wrong_elements(result, expected) > 0
    wrong |= any(wrong_elements(other, -value) > 0 for other in a.pressure)
    a.pressure.clear()
    return wrong, reused


USES = ""


def main(uses: str, tries: int, *patterns: str) -> None:
    global USES
    USES = uses
    use_allocator(OURS)
    esper_alloc.enable(uses=uses)  # type: ignore[arg-type]
    warm_up()
    (owner,) = other_streams(1)
    torch.cuda.set_stream(owner)  # autograd makes the default stream wait
    found = {}
    for pattern in patterns:
        say(pattern)
        a = Attempts()
        attempt(a, pattern, 1)  # it loads everything, and nothing is held up
        a.is_warm = True
        attempt(a, pattern, 2)
        say(f"{pattern}, warm")
        outcomes = [attempt(a, pattern, value) for value in range(3, tries + 3)]
        found[pattern] = {
            "tries": len(outcomes),
            "corrupted": sum(wrong for wrong, _ in outcomes),
            "reused_early": sum(reused for _, reused in outcomes),
            "waited": a.waited,
        }
        say(f"{pattern}: {found[pattern]}")
        del a
    report(**found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
