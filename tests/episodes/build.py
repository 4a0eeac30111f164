#!/usr/bin/env python3
"""Builds the episodes and the random programs for a GPU; tests/core/Makefile, for the simulator.

    python tests/episodes/build.py FOLDER [ARCH]

FOLDER gets the programs `random_reads` and `walk_rules`, which has the episodes. ARCH is nvcc's
-arch, by default this machine's GPU. CC and NVCC name other compilers.
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
CSRC = TESTS.parent / "csrc"
INCLUDE = ["-I", str(CSRC), "-I", str(TESTS / "core")]
FLAGS = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wformat=2", "-Wshadow", "-Werror"]
FLAGS += ["-pthread", "-DESPER_RULE_SWITCHES", "-DESPER_LOCK_ORDER", *INCLUDE, "-c"]
#: What check.c replaces.
WRAPPED = ("malloc", "calloc", "realloc", "mmap", "aligned_alloc")


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


def build(folder: Path, arch: str) -> None:
    """Compiles everything into `folder` and links the two programs."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = find_nvcc()
    compiler = shlex.split(os.environ.get("CC", "cc"))
    rules = [*sorted(HERE.glob("rule_*.c")), HERE / "episode.c", HERE / "walk_rules.c"]
    rules.append(TESTS / "core" / "check.c")
    shared = [*sorted((CSRC / "core").glob("*/*.c")), HERE / "program.c"]
    shared += [one for name in ("sleep", "black_box") for one in sorted((CSRC / name).glob("*.c"))]
    # The driver, and what it is made of.
    shared += [*sorted((CSRC / "device").glob("*.c")), CSRC / "esper_alloc.c"]
    shared += [*sorted((CSRC / "device" / "cuda").glob("*.c")), HERE / "machine_cuda.cu"]
    commands: list[list[str]] = []

    def compiled(source: Path) -> str:
        name = str(source.relative_to(TESTS.parent)).replace("/", "_")  # there are namesakes
        command = [*compiler, *FLAGS]
        if source.suffix == ".cu":
            command = [nvcc, "-O2", "-std=c++17", f"-arch={arch}", *INCLUDE, "-c"]
            command += ["-Xcompiler", "-Wall,-Wextra,-pthread"]
        commands.append([*command, str(source), "-o", str(folder / f"{name}.o")])
        return commands[-1][-1]

    objects = [compiled(source) for source in shared]
    programs = {
        "random_reads": [compiled(HERE / "random_reads.c")],
        "walk_rules": [*map(compiled, rules), *(f"-Xlinker=--wrap={one}" for one in WRAPPED)],
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    for name, own in programs.items():
        link = [nvcc, f"-arch={arch}", "-Xcompiler", "-pthread", *own, *objects]
        run([*link, "-o", str(folder / name), "-ldl"])


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    build(Path(sys.argv[1]), (sys.argv[2:] or ["native"])[0])
