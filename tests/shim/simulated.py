"""PyTorch on esper_alloc on the simulated device: see simulated.c.

Import this first in a process that `environment()` was given to; it enables
esper_alloc and lets PyTorch initialise CUDA.
"""

import ctypes
import json
import os
from pathlib import Path
from typing import Any

library = ctypes.CDLL(os.environ["ESPER_SIMULATED"])


def swap_core() -> None:
    """The shim, not loaded yet, will find a core on the simulated device."""
    import esper_alloc._core as core

    name = b"esper_alloc._core.capi"
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    library.esper_on_sim.restype = ctypes.c_void_p
    library.esper_on_sim.argtypes = [ctypes.c_void_p]
    table = library.esper_on_sim(api.PyCapsule_GetPointer(core.capi, name))
    swap_core.name = name  # type: ignore[attr-defined]  # the capsule keeps the pointer only
    core.capi = api.PyCapsule_New(table, name, None)

    def counters(device: int) -> dict[str, int]:
        figures = (ctypes.c_uint64 * len(core.COUNTERS))()
        if library.core_counters(device, figures):
            raise ValueError(f"there is no device {device}")
        return dict(zip(core.COUNTERS, figures))

    def memory_info(device: int) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if library.core_memory_info(device, ctypes.byref(free), ctypes.byref(total)):
            raise RuntimeError("the driver is broken")
        return free.value, total.value

    core.counters, core.memory_info = counters, memory_info


swap_core()

import torch  # noqa: E402

if os.environ.get("ESPER_SIMULATED_ALLOCATOR", "esper_alloc") != "native":
    import esper_alloc

    esper_alloc.enable()
torch.cuda.init()
library.sim_work.argtypes = [ctypes.c_int, ctypes.c_void_p]


def say(*values: Any, **named: Any) -> None:
    """For the test that runs this process."""
    print(json.dumps(named or values))


def work(stream: torch.cuda.Stream) -> None:
    """Enqueues something that ends when time_passes()."""
    library.sim_work(stream.device_index, stream.cuda_stream)


library.sim_reach.argtypes = [ctypes.c_int, *2 * [ctypes.c_void_p], ctypes.c_size_t, ctypes.c_int]
library.sim_own.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
library.sim_disown.argtypes = [ctypes.c_void_p]


# For the oracle, which a process with SIM_HAS_ORACLE in its environment has.


def reach(stream: torch.cuda.Stream, address: int, size: int, writes: bool) -> None:
    """Enqueues work that reads or writes memory."""
    library.sim_reach(stream.device_index, stream.cuda_stream, address, size, writes)


def own(stream: torch.cuda.Stream, address: int, size: int) -> None:
    """Memory was allocated on the stream: it fails if earlier work may still reach it."""
    library.sim_own(address, size, stream.device_index, stream.cuda_stream)


def disown(address: int) -> None:
    """Memory is about to be freed."""
    library.sim_disown(address)


def failures() -> int:
    """What the oracle found."""
    return int(library.sim_failed())


def time_passes() -> None:
    library.sim_pass()


def break_driver() -> None:
    """From now on every call of esper_alloc's fails, as after a failed kernel."""
    library.sim_break()


def core_segments() -> list[tuple[int, int]]:
    """(address, bytes) of each segment of the core, on the first device."""
    addresses, sizes = (ctypes.c_size_t * 100)(), (ctypes.c_size_t * 100)()
    count = library.core_segments(addresses, sizes, 100)
    return list(zip(addresses[:count], sizes[:count]))


def core_live() -> int:
    """Bytes of the core that are live, on the first device."""
    library.core_live.restype = ctypes.c_longlong
    return int(library.core_live())


def core_is_valid() -> bool:
    return bool(library.core_is_valid())


def mappings() -> int:
    """Of pages, on the first device."""
    return library.sim_mappings()


def names() -> int:
    """Pages of the first device that another process could open."""
    return library.sim_names()


def opened_handles() -> int:
    return library.sim_opened_handles()


ROOT = Path(__file__).resolve().parents[2]
