"""Builds the library that simulated.py preloads, and says what a process needs to use it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

sys.path.append(str(ROOT / "tests" / "gpu"))
import helper  # noqa: E402


def cuda_headers() -> Path | None:
    """The folder of cuda_runtime_api.h that goes with the installed torch."""
    places = [
        Path(os.environ[key], "include") for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ
    ]
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        places += [Path(folder), *Path(folder).glob("*")]
    places += [Path("/usr/local/cuda")]
    for place in places:
        for folder in (place, place / "include"):
            if (folder / "cuda_runtime_api.h").is_file():
                return folder
    return None


def build(folder: Path) -> Path:
    """Compiles simulated.c into `folder`; skips the test where that cannot be."""
    headers = cuda_headers()
    compiler = shutil.which("cc") or shutil.which("gcc")
    if headers is None or compiler is None:
        pytest.skip("no CUDA headers" if compiler else "no C compiler")
    library = folder / "libsimulated.so"
    sources = [HERE / "simulated.c", *sorted((ROOT / "csrc" / "device" / "sim").glob("*.c"))]
    subprocess.run(
        [compiler, "-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall"]
        + [
            "-Wl,-soname,libcuda.so.1",
            f"-I{headers}",
            "-o",
            str(library),
            *map(str, sources),
            "-pthread",
        ],
        check=True,
    )
    return library


def program(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As subprocess.run() of `python -c code`, in a process that has imported torch already, which
    takes most of the time of a short program."""
    return helper.in_nursery(code, env)


def answer(library: Path, code: str, **env: str) -> Any:
    """What a process on the simulated device prints last, as JSON."""
    done = program(code, {**os.environ, **environment(library), **env})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def environment(library: Path) -> dict[str, str]:
    """What a process that imports simulated.py must be given."""
    import esper_alloc

    root = str(Path(esper_alloc.__file__).resolve().parents[1])
    return {
        "LD_PRELOAD": str(library),
        "ESPER_SIMULATED": str(library),
        "PYTHONPATH": os.pathsep.join([root, str(HERE)]),
    }
