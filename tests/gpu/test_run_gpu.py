"""`python -m esper_alloc run` on a GPU: an unmodified program, the module form of
it, and the processes that it starts all get their memory from esper_alloc."""

import json
import os
from pathlib import Path

import pytest
from helper import FOREIGN, ROOT
from processes import output_of

# Knows nothing of esper_alloc. It trains a little, in a child too.
PROGRAM = """
import json
import sys

import torch


def train():
    torch.manual_seed(0)
    x = torch.randn(512, 256, device="cuda")
    w = torch.randn(256, 256, device="cuda", requires_grad=True)
    first = last = None
    for _ in range(20):
        loss = (x @ w - x).square().mean()
        loss.backward()
        with torch.no_grad():
            w -= 20 * w.grad
            w.grad = None
        last = loss.item()
        first = first or last
    return {
        "learned": last < 0.5 * first,
        "loaded": "esper_alloc" in sys.modules and sys.modules["esper_alloc"].is_enabled(),
        "counted": torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0,
    }


def child(queue):
    queue.put(train())


if __name__ == "__main__":
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = {"parent": train(), "child": queue.get(timeout=600), "arguments": sys.argv[1:]}
    process.join()
    print(json.dumps(found))
"""

FINE = {"learned": True, "loaded": True, "counted": True}


def run(*command: str, cwd: Path) -> dict[str, object]:
    environment = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    if any((ROOT / "esper_alloc").glob("_core*.so")):  # built in place; else installed
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(ROOT), environment.get("PYTHONPATH", "")) if part
        )
    said = output_of(*command, cwd=cwd, env=environment)
    found = json.loads(said.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "unmodified.py"
    path.write_text(PROGRAM)
    return path


def test_a_script_and_its_child(program: Path) -> None:
    command = ("-m", "esper_alloc", "run", program.name, "--steps", "3")
    found = run(*command, cwd=program.parent)
    assert found == {"parent": FINE, "child": FINE, "arguments": ["--steps", "3"]}


def test_without_it_the_program_is_on_native(program: Path) -> None:
    found = run(program.name, cwd=program.parent)
    native = {**FINE, "loaded": False}
    assert found == {"parent": native, "child": native, "arguments": []}
