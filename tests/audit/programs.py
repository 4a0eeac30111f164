"""Runs the programs of corpus/ under the auditor, or under torch.cuda._sanitizer.

    python programs.py [--sanitizer] [PROGRAM...]

Prints JSON: for each program the bugs that it names, and what was found, each a sorted list of
[kind, line]. On the simulated device all that can run there. benchmarks/audits.py reads it as well.
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
#: Programs whose names begin so need a GPU: with CUDA graphs, or with PyTorch's events as marks.
ON_GPU = ("graphs/", "marked/event")


def names(on_gpu: bool) -> list[str]:
    found = sorted(str(path.relative_to(CORPUS))[:-3] for path in CORPUS.glob("*/*.py"))
    return [name for name in found if on_gpu or not name.startswith(ON_GPU)]


def expected(name: str, allocator: str = "esper_alloc") -> list[list[Any]]:
    """The bugs that a program names for this allocator, as [kind, line]; empty: there is none.

    PyTorch's own record_stream, which stands for record_use there, lasts until the free. So of
    marks only what is said to be a bug `on native` is one there.
    """
    lines = (CORPUS / f"{name}.py").read_text().splitlines()
    only = r" on native" if allocator == "native" and name.startswith("marked/") else ""
    said = [(re.search(rf"# BUG{only}: (\S+)", line), n) for n, line in enumerate(lines, 1)]
    return sorted(([match[1], number] for match, number in said if match), key=str)


def audited(name: str) -> list[list[Any]]:
    """What the auditor finds in a program, as [kind, line]."""
    import torch

    import esper_alloc

    file = str(CORPUS / f"{name}.py")
    with esper_alloc.audit() as report:
        try:
            kept = runpy.run_path(file, run_name="__main__")
        except Exception as error:
            return [["error", f"{type(error).__name__}: {error}"[:300]]]
    assert report.complete
    kept.clear()
    gc.collect()
    torch.cuda.synchronize()
    found = []
    for finding in report.findings:
        frames = finding.place.frames
        line = frames[0].line if frames and frames[0].file == file else str(finding.place)
        found.append([finding.kind, line])
    return sorted(found, key=str)


def sanitized(name: str) -> list[list[Any]]:
    """What torch.cuda._sanitizer finds, in a process of its own: it ends the program."""
    file = str(CORPUS / f"{name}.py")
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=1200
    )
    lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', done.stderr)
    if "data race" not in done.stderr:
        return [] if done.returncode == 0 else [["error", done.stderr[-200:]]]
    return [["race", int(lines[0]) if lines else 0]]


def main() -> None:
    arguments = [one for one in sys.argv[1:] if not one.startswith("-")]
    if "ESPER_SIMULATED" in os.environ:
        sys.path.insert(0, str(HERE.parent / "shim"))
        import simulated  # noqa: F401
    import torch

    torch.cuda.init()
    chosen = arguments or names("ESPER_SIMULATED" not in os.environ)
    if "--sanitizer" in sys.argv:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = list(pool.map(sanitized, chosen))
    else:
        found = [audited(name) for name in chosen]
    print(json.dumps({name: [expected(name), one] for name, one in zip(chosen, found)}))


if __name__ == "__main__":
    main()
