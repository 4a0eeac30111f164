"""Compiles and calls the measuring loops of loops.cpp, for the torch that is installed.

The calls are made without Python's lock. They raise RuntimeError with what went wrong.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shlex
import statistics
import subprocess
import sysconfig
import tempfile
from ctypes import c_char_p, c_double, c_int, c_long, c_size_t, c_uint32, c_void_p
from hashlib import sha256
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
CSRC = SOURCE.parents[1] / "csrc"
HEADERS = [CSRC / "python" / "capi.h", *sorted(CSRC.glob("esper_*.h"))]
OPERATION = 24  # bytes of a packed one
#: What each loop takes; it gives a number, nan where it failed.
TAKES = {
    "pair_ns": (c_size_t, c_long),
    "mark_costs": (c_void_p, c_long, c_long, c_void_p),
    "pairs_rate": (c_int, c_size_t, c_int, c_long),
    "churn": (c_size_t, *[c_double] * 3, c_long, c_int, c_double, c_void_p),
    "times_ns": (c_char_p, c_size_t, c_size_t, c_size_t, c_void_p),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled loops; compiled on first use for this source, Python and torch."""
    import torch

    torch.cuda.is_available()  # loads the libraries that the loops link to
    sources = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    about = f"{torch.__version__} {sysconfig.get_config_var('SOABI')}"
    key = sha256(sources + about.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"esper_alloc-loops-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else; remove it")
    built = folder / f"loops-{key}.so"
    if not built.exists():
        compile_to(built)
    library = ctypes.CDLL(str(built))
    for name, takes in TAKES.items():
        function = getattr(library, f"loops_{name}")
        function.argtypes, function.restype = takes, c_double
    library.loops_error.restype = library.loops_capi_name.restype = c_char_p
    return library


def compile_to(built: Path) -> None:
    """Compiles the loops; the file appears whole or not at all."""
    import torch
    from torch.utils import cpp_extension

    compiler = shlex.split(os.environ.get("CXX") or "g++")
    # Newer torch needs C++20; older headers compile as C++20 too.
    command = [*compiler, "-O2", "-fPIC", "-shared", "-std=c++20", "-pthread"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for include in cpp_extension.include_paths(device_type="cuda"):
        command += ["-isystem", include]
    command += ["-I", sysconfig.get_paths()["include"], str(SOURCE)]
    for library in cpp_extension.library_paths(device_type="cuda"):
        command += [f"-L{library}", f"-Wl,-rpath,{library}"]
    # libcudart comes in through libc10_cuda: the very one that torch uses.
    scratch = built.with_name(f"{built.name}.{os.getpid()}")
    command += ["-o", str(scratch), "-lc10", "-lc10_cuda"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    scratch.replace(built)


def call(name: str, *arguments: object) -> float:
    """What the loop of this name gives."""
    library = load()
    found = float(getattr(library, f"loops_{name}")(*arguments))
    if math.isnan(found):
        raise RuntimeError(library.loops_error().decode())
    return found


def capi() -> int:
    """The address of esper_alloc's C interface."""
    import esper_alloc._core  # noqa: F401

    ctypes.pythonapi.PyCapsule_Import.restype = c_void_p
    return ctypes.pythonapi.PyCapsule_Import(c_char_p(load().loops_capi_name()), 0)


def mark_costs(rounds: int, count: int) -> dict[str, float]:
    """ns a call, each the median of rounds in which these took turns."""
    names = ("cuEventRecord", "esper_alloc_record_use", "esper_record_use")
    found = (c_double * (len(names) * rounds))()
    call("mark_costs", capi(), rounds, count, found)
    columns = (found[i :: len(names)] for i in range(len(names)))
    return {f"C, {name}": statistics.median(one) for name, one in zip(names, columns)}


def churn(live: int, *how: float, rounds: int, longest: float) -> list[float]:
    """ns of a replacement in each round. `how`: least, most, power and count, as loops.cpp
    explains."""
    ns = (c_double * rounds)()
    call("churn", live, *how, rounds, longest, ns)
    return list(ns)


def times_ns(packed: bytes, slots: int, streams: int) -> list[int]:
    """ns of each malloc of a recorded job."""
    count = len(packed) // OPERATION
    times = (c_uint32 * count)()
    call("times_ns", bytes(packed), count, slots, streams, times)
    codes = packed[::OPERATION]  # the first byte of each
    return [ns for code, ns in zip(codes, times) if code == 0]
