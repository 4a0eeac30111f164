"""Another process that takes device memory, as a neighbour on the same GPU does.

It talks to the CUDA driver alone, so that it starts at once. For each line `leave BYTES` it takes
memory until at most so many bytes of the device are free, or gives some back until about so many
are, and answers `holds BYTES`.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    """What is held of a Device."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.held: list[tuple[int, int]] = []

    def leave(self, wanted: int) -> int:
        """Takes or gives until about `wanted` bytes are free; the bytes held."""
        piece = PIECE
        while self.held and self.device.free() + SMALLEST <= wanted:
            self.device.give(self.held.pop()[0])
        while piece >= SMALLEST:
            enough = self.device.free() - wanted < piece
            address = None if enough else self.device.take(piece)
            if address is None:
                piece //= 2
            else:
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
        self._process.kill()  # which gives its memory back
        self._process.communicate()


if __name__ == "__main__":
    try:
        neighbour = Neighbour(Device())
        for line in sys.stdin:
            print("holds", neighbour.leave(int(line.removeprefix("leave "))), flush=True)
    except DriverError as error:
        sys.exit(print(error, flush=True) or 1)
