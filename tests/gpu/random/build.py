#!/usr/bin/env python3
"""Builds the random programs, with the core and the switches of its rules in them.

    python tests/gpu/random/build.py sim FOLDER            # for the simulated device
    python tests/gpu/random/build.py cuda FOLDER [ARCH]    # for a GPU: needs nvcc

Prints the program's path. ARCH is nvcc's -arch, by default this machine's GPU.
CC and NVCC name other compilers.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wformat=2", "-Wshadow", "-Werror"]
FLAGS += ["-pthread", "-DESPER_RULE_SWITCHES", "-DESPER_LOCK_ORDER", "-c"]


def find_nvcc() -> str:
    """NVCC, the one on the PATH, or the toolkit's; exits where there is none."""
    named = os.environ.get("NVCC") or shutil.which("nvcc")
    for folder in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"):
        if not named and (Path(folder) / "bin" / "nvcc").is_file():
            named = str(Path(folder) / "bin" / "nvcc")
    if not named:
        raise SystemExit("nvcc was not found: set NVCC or CUDA_HOME")
    return named


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def build(machine: str, folder: Path, arch: str) -> Path:
    """Compiles everything into `folder` and links it: the program's path."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    sources = sorted((CSRC / "core").glob("*/*.c")) + [HERE / "programs.c"]
    program = folder / "programs"
    link = [*compiler, "-pthread"]
    commands: list[list[str]] = []
    objects: list[str] = []
    if machine == "sim":
        sources += [*sorted((CSRC / "device" / "sim").glob("*.c")), HERE / "machine_sim.c"]
    else:
        nvcc = find_nvcc()
        # The driver, and what it is made of.
        sources += [*sorted((CSRC / "device").glob("*.c")), CSRC / "esper_alloc.c"]
        sources += sorted((CSRC / "device" / "cuda").glob("*.c"))
        objects.append(str(folder / "machine_cuda.o"))
        flags = ["-O2", "-std=c++17", f"-arch={arch}", "-Xcompiler", "-Wall,-Wextra,-pthread"]
        commands.append([nvcc, *flags, "-c", str(HERE / "machine_cuda.cu"), "-o", objects[0]])
        link = [nvcc, f"-arch={arch}", "-Xcompiler", "-pthread"]
    for source in sources:
        name = str(source.relative_to(CSRC.parent)).replace("/", "_")  # there are namesakes
        objects.append(str(folder / f"{name}.o"))
        commands.append([*compiler, *FLAGS, str(source), "-o", objects[-1]])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    run([*link, *objects, "-o", str(program), "-ldl"])
    return program


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("sim", "cuda"):
        raise SystemExit(__doc__)
    print(build(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["native"])[0]))
