"""What mapping pages in one thread does to the launches of another.

Could a thread of its own map pages ahead, so that no malloc waits for the driver? Only if
that does not hold up the thread that launches kernels. One thread launches an empty kernel
again and again (cuLaunchKernel, by itself), and each launch is timed; the host waits for
the GPU now and then, untimed.

  quiet    nothing else happens
  beside   another thread makes pages, maps and opens them meanwhile (cuMemCreate,
           cuMemMap, cuMemSetAccess) and gives them back; launches are counted only
           while it makes them

Median and 99.9th percentile of a launch, and what a page takes beside launches and alone.
The launching thread keeps Python's lock during a launch and gives it away between launches,
so the lock is in no figure of a launch; a page's time has up to a few launches in it. There
are no goals. It takes at most 60 s.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from common import MIB, Results, machine, nothing_measurable, parser
from malloc_times import percentile
from pages import Driver

SIZES = (2, 32)  # MiB
PAGES = 32  # that are there at once
LAUNCHES = 20_000
DRAIN = 200  # launches between two waits for the GPU: its queue never fills

#: A kernel that does nothing.
PTX = b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n"


class Launcher:
    """Launches the kernel on a stream of the current context. RuntimeError names what failed."""

    def __init__(self, stream: int) -> None:
        self._keeps, self._gives = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._stream = ctypes.c_void_p(stream)
        self._check("cuModuleLoadData", self._gives.cuModuleLoadData(ctypes.byref(module), PTX))
        found = self._gives.cuModuleGetFunction(ctypes.byref(self._kernel), module, b"nothing")
        self._check("cuModuleGetFunction", found)

    @staticmethod
    def _check(name: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{name} failed with CUresult {code}")

    def launch(self) -> None:
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        code = self._keeps.cuLaunchKernel(
            self._kernel, one, one, one, one, one, one, none, self._stream, None, None
        )
        self._check("cuLaunchKernel", code)

    def wait(self) -> None:
        self._check("cuStreamSynchronize", self._gives.cuStreamSynchronize(self._stream))


class Mapper:
    """Makes pages and gives them back, round after round; in a thread of its own where it is
    entered."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver, self.size = driver, size
        self.busy = False  # it makes pages right now
        self.times: list[float] = []  # us a page, of each round
        self.error: BaseException | None = None
        self._end = threading.Event()
        self._base = driver.reserve(size * PAGES)

    def round(self) -> None:
        driver, size, made = self.driver, self.size, []
        self.busy = True
        begin = time.perf_counter()
        for number in range(PAGES):
            made.append(driver.make(size))
            driver.map(self._base + number * size, size, made[-1])
            driver.open(self._base + number * size, size)
        self.times.append((time.perf_counter() - begin) * 1e6 / PAGES)
        self.busy = False
        for number, page in enumerate(made):
            driver.unmap(self._base + number * size, size)
            driver.release(page)

    def close(self) -> None:
        self.driver.unreserve(self._base, self.size * PAGES)

    def _work(self) -> None:
        try:
            self.driver.enter()
            while not self._end.is_set():
                self.round()
        except BaseException as error:
            self.error = error
        finally:
            self.busy = False

    def __enter__(self) -> Mapper:
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.close()
        if self.error:
            raise self.error


def launches(launcher: Launcher, counts: Callable[[], bool], seconds: float) -> list[int]:
    """ns of each launch before and after which `counts`, until there are LAUNCHES of them or
    the seconds are over."""
    found: list[int] = []
    end, number = time.monotonic() + seconds, 0
    while len(found) < LAUNCHES and time.monotonic() < end:
        before = counts()
        begin = time.perf_counter_ns()
        launcher.launch()
        took = time.perf_counter_ns() - begin
        if before and counts():
            found.append(took)
        number += 1
        if number % DRAIN == 0:
            launcher.wait()
        time.sleep(0)  # gives Python's lock away
    launcher.wait()
    return found


def measure(driver: Driver, launcher: Launcher, seconds: float) -> dict[str, float]:
    """us: of a launch, quiet and beside pages of each size, and of such a page."""
    found: dict[str, float] = {}

    def add(name: str, times: Sequence[int]) -> None:
        if not times:
            raise RuntimeError(f"no launch was timed {name} within {seconds:.1f} s")
        found[f"{name}, median"] = statistics.median(times) / 1e3
        found[f"{name}, 99.9th percentile"] = percentile(times, 0.999) / 1e3

    add("quiet", launches(launcher, lambda: True, seconds))
    for size in SIZES:
        alone = Mapper(driver, size * MIB)
        for _ in range(3):
            alone.round()
        alone.close()
        with Mapper(driver, size * MIB) as mapper:
            add(f"beside pages of {size} MiB", launches(launcher, lambda: mapper.busy, seconds))
        found[f"a page of {size} MiB, alone"] = statistics.median(alone.times)
        found[f"a page of {size} MiB, beside launches"] = statistics.median(mapper.times)
    return found


def add_rows(results: Results, rounds: Sequence[dict[str, float]]) -> None:
    def column(key: str) -> list[float]:
        return [one[key] for one in rounds]

    for size in SIZES:
        beside = f"beside pages of {size} MiB"
        for what in ("median", "99.9th percentile"):
            results.row(
                f"a launch {beside}, {what}", "us",
                column(f"{beside}, {what}"), column(f"quiet, {what}"), "a quiet process",
            )  # fmt: skip
        page = f"a page of {size} MiB"
        results.row(
            f"{page}, beside launches", "us",
            column(f"{page}, beside launches"), column(f"{page}, alone"), "alone",
        )  # fmt: skip


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5, seconds=40.0)
    options = arguments.parse_args()
    if nothing_measurable():
        return 1
    import torch

    torch.zeros(1, device="cuda")  # a context, as in every program
    stream = torch.cuda.Stream()
    driver, launcher = Driver(torch.cuda.current_device()), Launcher(stream.cuda_stream)
    begin = time.monotonic()
    each = options.seconds / options.rounds / (len(SIZES) + 1)
    launches(launcher, lambda: True, each)  # the first ones take longer
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        if rounds and time.monotonic() - begin > options.seconds:
            break
        rounds.append(measure(driver, launcher, each))
    results = Results("mapping_threads", options.out)
    results.describe(machine())
    add_rows(results, rounds)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
