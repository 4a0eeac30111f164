"""What the driver takes for pages of memory, by their size: why pages are as large as they are.

A page is memory that is made (cuMemCreate), mapped to an address (cuMemMap) and opened to
the device (cuMemSetAccess), each for itself. Beside it:

  cuMemAlloc     one block of the same size, which is what cudaMalloc calls
  moving         a page is mapped and opened at another address, and unmapped where it was
  again          pages are opened that were open before: the driver clears a new one first
                 where its memory has just been given back
  at once        all pages of a range are opened by one call, again
  four threads   open a quarter of the pages each, again

Nothing runs on the GPU. There are no goals: docs/measurements.md, "Pages", draws
the conclusions.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from common import MIB, Results, machine, nothing_measurable, parser

SIZES = (2, 8, 32, 128)  # MiB
PAGES = 32  # of each size
THREADS = 4
REPETITIONS = 7

DEVICE, PINNED, READ_WRITE = 1, 1, 3  # CU_MEM_LOCATION_TYPE_, _ALLOCATION_TYPE_, _ACCESS_FLAGS_


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The calls of libcuda that are timed. RuntimeError names the one that failed."""

    def __init__(self, device: int = 0) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._properties = Properties(PINNED, 0, Location(DEVICE, device))
        self._access = Access(Location(DEVICE, device), READ_WRITE)

    def _call(self, name: str, *arguments: Any) -> None:
        """Addresses and handles, sizes and flags are 64 bits each."""
        code = getattr(self._cuda, name)(*(
            ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments
        ))  # fmt: skip
        if code:
            raise RuntimeError(f"{name} failed with CUresult {code}")

    def enter(self) -> None:
        """Gives the calling thread the context of the one that made this."""
        self._call("cuCtxSetCurrent", self._context)

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def make(self, size: int) -> int:
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        return handle.value

    def release(self, page: int) -> None:
        self._call("cuMemRelease", page)

    def map(self, address: int, size: int, page: int) -> None:
        self._call("cuMemMap", address, size, 0, page, 0)

    def open(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, ctypes.byref(self._access), 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def alloc(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)


def us_each(call: Callable[..., Any], *lists: Sequence[Any]) -> float:
    """Microseconds of a call, called with the first of each list, the second and so on."""
    begin = time.perf_counter()
    for arguments in zip(*lists):
        call(*arguments)
    return (time.perf_counter() - begin) * 1e6 / len(lists[0])


def measure_size(driver: Driver, size: int, count: int = PAGES) -> dict[str, float]:
    """Microseconds for one of `count` pages of `size` bytes."""
    found: dict[str, float] = {}
    blocks: list[int] = []
    found["alloc"] = us_each(lambda _: blocks.append(driver.alloc(size)), range(count))
    found["free"] = us_each(driver.free, blocks)
    sizes, pages = [size] * count, []
    ranges = [driver.reserve(size * count) for _ in range(2)]
    here, there = ([base + size * number for number in range(count)] for base in ranges)
    found["make"] = us_each(lambda _: pages.append(driver.make(size)), range(count))
    found["map"] = us_each(driver.map, here, sizes, pages)
    found["open"] = us_each(driver.open, here, sizes)

    def move(new: int, page: int, old: int) -> None:
        driver.map(new, size, page)
        driver.open(new, size)
        driver.unmap(old, size)

    found["move"] = us_each(move, there, pages, here)
    found["unmap"] = us_each(driver.unmap, there, sizes)
    us_each(driver.map, here, sizes, pages)
    found["open again"] = us_each(driver.open, here, sizes)
    us_each(driver.unmap, here, sizes)
    us_each(driver.map, here, sizes, pages)
    found["open at once"] = us_each(driver.open, here[:1], [size * count]) / count
    us_each(driver.unmap, here, sizes)
    us_each(driver.map, here, sizes, pages)
    found["open by threads"] = open_by_threads(driver, here, size)
    us_each(driver.unmap, here, sizes)
    found["release"] = us_each(driver.release, pages)
    for base in ranges:
        driver.unreserve(base, size * count)
    return found


def open_by_threads(driver: Driver, addresses: Sequence[int], size: int) -> float:
    """Microseconds a page, of which each thread opens its share."""
    shares = [addresses[number::THREADS] for number in range(THREADS)]
    ready = Barrier(THREADS + 1)

    def work(share: Sequence[int]) -> None:
        driver.enter()
        ready.wait()
        us_each(driver.open, share, [size] * len(share))

    with ThreadPoolExecutor(THREADS) as pool:
        working = [pool.submit(work, share) for share in shares]
        ready.wait()
        begin = time.perf_counter()
        for one in working:
            one.result()
        return (time.perf_counter() - begin) * 1e6 / len(addresses)


def add_rows(results: Results, size: str, found: Sequence[dict[str, float]]) -> None:
    """The rows of pages of one size."""

    def us(*calls: str) -> list[float]:
        return [sum(one[call] for call in calls) for one in found]

    new = us("make", "map", "open")
    rows = [
        (f"a new page of {size}", new, us("alloc"), "cuMemAlloc"),
        (f"giving back a page of {size}", us("unmap", "release"), us("free"), "cuMemFree"),
        (f"moving a page of {size}", us("move"), new, "a new page"),
        (f"opening a page of {size} again", us("open again"), us("open"), "a new one"),
        (
            f"opening pages of {size} again, at once",
            us("open at once"),
            us("open again"),
            "one by one",
        ),
        (
            f"opening pages of {size} again, four threads",
            us("open by threads"),
            us("open again"),
            "one thread",
        ),
    ]
    for call in ("make", "map", "open", "unmap"):
        rows.append((f"to {call} a page of {size}", us(call), new, "a new page"))
    for name, ours, peer, peer_name in rows:
        results.row(name, "us", ours, peer, peer_name)


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=REPETITIONS)
    options = arguments.parse_args()
    if nothing_measurable():
        return 1
    import torch

    torch.zeros(1, device="cuda")  # a context, as in every program
    torch.cuda.synchronize()
    driver, begin = Driver(torch.cuda.current_device()), time.monotonic()
    measure_size(driver, SIZES[0] * MIB)  # the first call of each takes longer
    rounds: list[dict[int, dict[str, float]]] = []
    for _ in range(options.rounds):
        if rounds and time.monotonic() - begin > options.seconds:
            break
        rounds.append({size: measure_size(driver, size * MIB) for size in SIZES})
    results = Results("pages", options.out)
    results.describe(machine())
    for size in SIZES:
        add_rows(results, f"{size} MiB", [one[size] for one in rounds])
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
