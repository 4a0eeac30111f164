"""Another process that takes device memory, as a neighbour on the same GPU does.

    python benchmarks/neighbour.py

Reads commands from stdin, one a line, and answers each with one line:

  leave BYTES    takes memory until at most BYTES of the device are free, or gives
                 some back until about BYTES are; answers how much it holds
  end            gives all back and ends, as does the end of the input

Talks to the CUDA driver alone, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

PIECE = 1 << 30  # bytes of the largest allocation
SMALLEST = 2 << 20


class DriverError(RuntimeError):
    """The CUDA driver refused a call; the message names it."""


class Device:
    """The first GPU, through the driver."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise DriverError("there is no CUDA driver (libcuda.so.1) on this machine") from None
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise DriverError(f"{name} answered {status}")

    def free(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def take(self, size: int) -> int | None:
        """An address; None: there is not so much."""
        address = ctypes.c_uint64()
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        except DriverError:
            return None
        return address.value

    def give(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))


class Neighbour:
    """What is held, and taking more or less of it. `device` as Device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.held: list[tuple[int, int]] = []

    def leave(self, wanted: int) -> int:
        """Takes or gives until about `wanted` bytes are free; the bytes held."""
        piece = PIECE
        while self.held and self.device.free() + SMALLEST <= wanted:
            address, _ = self.held.pop()
            self.device.give(address)
        while piece >= SMALLEST:
            if self.device.free() - wanted < piece:
                piece //= 2
                continue
            address = self.device.take(piece)
            if address is None:
                piece //= 2
                continue
            self.held.append((address, piece))
        return sum(size for _, size in self.held)


class Client:
    """Starts a neighbour and talks to it; use it in a with statement."""

    def __enter__(self) -> Client:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        return self

    def leave(self, size: int) -> int:
        """The neighbour leaves `size` bytes of the device free; the bytes it holds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(f"leave {size}", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().split()
        if not answer or answer[0] != "holds":
            raise DriverError(f"the neighbour failed: {' '.join(answer) or 'it ended'}")
        return int(answer[1])

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    try:
        neighbour = Neighbour(Device())
        for line in sys.stdin:
            words = line.split()
            if words[:1] == ["leave"] and len(words) == 2 and words[1].isdigit():
                print("holds", neighbour.leave(int(words[1])), flush=True)
            elif words == ["end"]:
                break
            else:
                print("unknown command:", line.strip(), flush=True)
    except DriverError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(__doc__)
        raise SystemExit(0 if sys.argv[1] in ("-h", "--help") else 2)
    raise SystemExit(main())
