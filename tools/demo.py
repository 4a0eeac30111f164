"""`make demo`: shows a mark at work, replays the recorded jobs in examples/traces, and trains.

Without a GPU the mark works on the simulated device, and training is of a tiny model on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRACES = sorted((ROOT / "examples" / "traces").glob("*.pickle*"))
PICTURE = ROOT / "build" / "demo.png"
#: As one writes it in the clone; not resolved, or it would leave its environment.
PYTHON = (
    os.path.relpath(sys.executable, ROOT)
    if ROOT in Path(sys.executable).parents
    else sys.executable
)
#: Of the simulated device, as a GPU has it. Where memory is short, marks are waited for at once.
CAPACITY_MB = "81920"


def run(*arguments: str, **environment: str) -> None:
    where = "  # on a simulated device, which `make demo` sets up" if environment else ""
    print(f"\n$ PYTHONPATH=. {PYTHON} {' '.join(arguments)}{where}", flush=True)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment})
    if done.returncode != 0:
        raise SystemExit(f"demo: that ended with exit code {done.returncode}")


def conclude(text: str) -> None:
    """Says after a part what it showed."""
    print(text, flush=True)


def show_a_mark(gpu: bool, picture: Path = PICTURE) -> None:
    command = ["tools/mark_at_work.py"]
    if importlib.util.find_spec("matplotlib"):
        picture.parent.mkdir(exist_ok=True)
        command.append(os.path.relpath(picture, ROOT))
    if gpu:
        run(*command)
        return
    sys.path.insert(0, str(ROOT / "tests" / "shim"))
    import pytest

    simulation = importlib.import_module("build")

    with tempfile.TemporaryDirectory() as folder:
        try:
            library = simulation.build(Path(folder))
        except pytest.skip.Exception as error:
            print(f"\nNo mark is shown: the simulated device cannot be built: {error}.")
            return
        run(*command, **simulation.environment(library), SIM_CAPACITY_MB=CAPACITY_MB)


def main() -> None:
    from esper_alloc import _core

    if not TRACES:
        raise SystemExit("demo: examples/traces holds no recorded job")
    gpu = _core.driver_report()["available"]
    show_a_mark(gpu)
    run("-m", "esper_alloc", "replay", *(str(path.relative_to(ROOT)) for path in TRACES))
    conclude(
        '"recorded" is PyTorch\'s allocator in the job, "replayed" is esper_alloc with the same\n'
        'requests: compare the peaks reserved. "native\'s blocks" is what PyTorch counted itself.'
    )
    run("examples/train_gpt2.py")
    conclude(
        "The loss falls: the script trains on esper_alloc."
        if gpu
        else "Without a GPU it trained on the CPU, where no CUDA allocator is needed. This shows\n"
        "only that the script runs there, too."
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
