"""Builds the library that simulated.py preloads, and says what a process needs to use it."""

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
    flags = "-std=gnu11 -O1 -g -shared -fPIC -fvisibility=hidden -Wall -Wl,-soname,libcuda.so.1"
    sources = [HERE / "simulated.c", *sorted((ROOT / "csrc" / "device" / "sim").glob("*.c"))]
    subprocess.run(
        [compiler, *flags.split(), f"-I{headers}", "-o", library, *sources, "-pthread"], check=True
    )
    return library


def program(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As subprocess.run() of `python -c code`, in a process that has imported torch already, which
    takes most of the time of a short program."""
    return helper.in_nursery(code, env)


def answer(library: Path, code: str, **env: str) -> Any:
    """What a process on the simulated device prints last, as JSON."""
    done = program(code, {**os.environ, **environment(library), **env})
    assert done.returncode == 0, (
        f"it ended with {done.returncode}, after printing {done.stdout[-500:]!r}\n{done.stderr[-4000:]}"
    )
    return json.loads(done.stdout.splitlines()[-1])


FORKS = """
import ctypes, os, signal, threading, time

one = torch.ones(4)  # here: the thread that forks may not have run an operator since


def fork_while_a_lock_is_held():
    "The exit status of the child, which runs an operator."
    holder = ctypes.CDLL(os.environ["HOLDER"])

    def fork():
        child = os.fork()
        if child == 0:
            signal.alarm(600)  # it has next to nothing to do
            torch.add(one, one)
            os._exit(0)
        return child

    def work():
        holder.hold_next_lock()
        torch.add(one, one)

    os.waitpid(fork(), 0)  # nobody holds the lock yet
    thread = threading.Thread(target=work)
    thread.start()
    while not holder.lock_is_held():
        time.sleep(0.01)
    child = fork()
    holder.release_lock()
    thread.join()
    return os.waitpid(child, 0)[1]

"""


def forked_while_a_lock_is_held(library: Path, folder: Path, head: str, code: str) -> Any:
    """As answer(), for code that calls fork_while_a_lock_is_held(). PyTorch takes a lock for a
    thread's first operator after a callback was added. At the fork another thread holds it, and
    the child has no such thread."""
    holder = folder / "libhold_lock.so"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", holder, HERE / "hold_lock.c", "-ldl", "-pthread"],
        check=True,
    )
    preloaded = {"LD_PRELOAD": f"{library} {holder}", "HOLDER": str(holder)}
    return answer(library, head + FORKS + code, **preloaded)


def environment(library: Path) -> dict[str, str]:
    """What a process that imports simulated.py must be given."""
    import esper_alloc

    root = str(Path(esper_alloc.__file__).resolve().parents[1])
    return {
        "LD_PRELOAD": str(library),
        "ESPER_SIMULATED": str(library),
        "PYTHONPATH": os.pathsep.join([root, str(HERE)]),
    }
