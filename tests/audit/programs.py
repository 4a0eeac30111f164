"""Runs the programs of corpus/ under the auditor, or under torch.cuda._sanitizer.

    python programs.py [--sanitizer] [--unmarked] [PROGRAM...]

A file of the corpus is a program with a bug and one like it that is correct: without the lines that
end in `# WRONG`, which are the first one's alone, and with those in `# RIGHT`. Files whose names end
in `_right` are correct programs alone.

Prints JSON: for each program the bugs that it names, and what was found, each a sorted list of
[kind, line]. On the simulated device all that can run there; with --unmarked those without marks,
which the sanitizer knows nothing of. benchmarks/audits.py reads it as well.
"""

import gc
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
#: Programs whose names begin so need a GPU: with CUDA graphs, kernels of ours, or PyTorch's events
#: as marks.
ON_GPU = ("graphs/", "freed/normalized", "marked/event")


def names(on_gpu: bool) -> list[str]:
    stems = sorted(str(path.relative_to(CORPUS))[:-3] for path in CORPUS.glob("*/*.py"))
    return [
        name
        for stem in stems
        for name in ([stem] if stem.endswith("_right") else [f"{stem}_right", f"{stem}_wrong"])
        if on_gpu or not name.startswith(ON_GPU)
    ]


def source(name: str) -> list[str]:
    """The lines of a program, those of the other one empty, so that each keeps its number."""
    pair = CORPUS / f"{re.sub('_(right|wrong)$', '', name)}.py"
    lines = (pair if pair.exists() else CORPUS / f"{name}.py").read_text().splitlines()
    others = "# RIGHT" if name.endswith("_wrong") else "# WRONG"
    return ["" if others in line else line for line in lines]


def expected(name: str, allocator: str = "esper_alloc") -> list[list[Any]]:
    """The bugs that a program names for this allocator, as [kind, line]; empty: there is none.

    PyTorch's own record_stream, which stands for record_use there, lasts until the free. So of
    marks only what is said to be a bug `on native` is one there.
    """
    if name.endswith("_right"):
        return []
    only = r" on native" if allocator == "native" and name.startswith("marked/") else ""
    said = [(re.search(rf"BUG{only}: (\S+)", line), n) for n, line in enumerate(source(name), 1)]
    return sorted(([match[1], number] for match, number in said if match), key=str)


def audited(file: str) -> list[list[Any]]:
    """What the auditor finds in a program, as [kind, line]."""
    import torch

    import esper_alloc

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


def sanitized(file: str) -> list[list[Any]]:
    """What torch.cuda._sanitizer finds, in a process of its own: it ends the program."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=1200
    )
    lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', done.stderr)
    if "data race" not in done.stderr:
        return [] if done.returncode == 0 else [["error", done.stderr[-200:]]]
    return [["race", int(lines[0]) if lines else 0]]


def written(chosen: list[str], folder: Path) -> Iterator[str]:
    """Writes the programs into the folder; their files."""
    for name in chosen:
        file = folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(source(name)))
        yield str(file)


def main() -> None:
    chosen = [one for one in sys.argv[1:] if not one.startswith("-")]
    if "ESPER_SIMULATED" in os.environ:
        sys.path.insert(0, str(HERE.parent / "shim"))
        import simulated  # noqa: F401
    import torch

    torch.cuda.init()
    sys.path.insert(0, str(HERE))  # captured.py, two_streams.py
    chosen = chosen or names("ESPER_SIMULATED" not in os.environ)
    if "--unmarked" in sys.argv:
        chosen = [name for name in chosen if not name.startswith("marked/")]
    with tempfile.TemporaryDirectory() as folder:
        files = list(written(chosen, Path(folder).resolve()))
        if "--sanitizer" in sys.argv:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                found = list(pool.map(sanitized, files))
        else:
            found = [audited(file) for file in files]
    print(json.dumps({name: [expected(name), one] for name, one in zip(chosen, found)}))


if __name__ == "__main__":
    main()
