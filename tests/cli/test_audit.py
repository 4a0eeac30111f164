"""``python -m esper_alloc audit``: the program runs as it would, and its exit code says what was
found. On the simulated device, with PyTorch's own allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "shim"))

torch = pytest.importorskip("torch")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch with CUDA, and no GPU", allow_module_level=True)

import build  # noqa: E402

RACE = """
import sys
import torch
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.empty(1 << 16, device="cuda").zero_()
with torch.cuda.stream(side):
    y = x.clone()
torch.cuda.synchronize()
"""
CORRECT = RACE.replace("with torch", "side.wait_stream(main)\nwith torch")


def audit(
    library: Path, folder: Path, program: str, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(program)
    env = {**os.environ, **build.environment(library)}
    script = () if "-m" in options else ("job.py",)
    return subprocess.run(
        [sys.executable, "-m", "esper_alloc", "audit", *options, *script, *arguments],
        env=env, cwd=folder, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip


def test_what_is_found_is_printed_and_the_exit_code_is_1(library: Path, tmp_path: Path) -> None:
    done = audit(library, tmp_path, RACE + "print('end')\n")
    assert done.returncode == 1
    assert done.stdout == "end\n"
    assert "1 finding" in done.stderr and "job.py:7 in <module>" in done.stderr


def test_a_correct_program_ends_as_always(library: Path, tmp_path: Path) -> None:
    done = audit(library, tmp_path, CORRECT + "print(sys.argv, __name__, sys.path[0])\n", "a", "-b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"['job.py', 'a', '-b'] __main__ {tmp_path}\n"


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('bye')", 1, "bye"),
        ("sys.exit()", 1, ""),
        ("raise KeyError('mine')", 1, 'job.py", line'),
    ],
)
def test_the_programs_end_is_kept(
    library: Path, tmp_path: Path, end: str, code: int, said: str
) -> None:
    done = audit(library, tmp_path, RACE + end)
    assert done.returncode == code
    assert said in done.stderr and "1 finding" in done.stderr
    assert "runpy" not in done.stderr


def test_a_correct_program_keeps_its_exit_code(library: Path, tmp_path: Path) -> None:
    assert audit(library, tmp_path, CORRECT + "sys.exit(7)").returncode == 7


def test_json_to_a_file(library: Path, tmp_path: Path) -> None:
    done = audit(library, tmp_path, RACE, options=("--json", "--output", "found.json"))
    assert (done.returncode, done.stderr) == (1, "")
    [finding] = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert finding["kind"] == "read-early"
    assert finding["place"]["frames"][0]["line"] == 7


def test_a_module(library: Path, tmp_path: Path) -> None:
    done = audit(library, tmp_path, RACE + "print(sys.argv[1:])\n", options=("-m", "job", "a"))
    assert done.returncode == 1 and done.stdout == "['a']\n"
    assert "1 finding" in done.stderr


def test_raise_ends_the_program(library: Path, tmp_path: Path) -> None:
    done = audit(library, tmp_path, RACE + "print('end')\n", options=("--mode", "raise"))
    assert done.returncode == 1 and done.stdout == ""
    assert "AuditError" in done.stderr


@pytest.mark.parametrize("options", [("--output", "none/found.json"), ("--mode", "loud")])
def test_wrong_usage(library: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = audit(library, tmp_path, "print('ran')", options=options)
    assert done.returncode == 2 and done.stdout == ""
    assert options[0] in done.stderr or "found.json" in done.stderr


def test_a_file_that_is_not_there(library: Path, tmp_path: Path) -> None:
    env = {**os.environ, **build.environment(library)}
    command = [sys.executable, "-m", "esper_alloc", "audit", "none.py"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 2
    assert done.stderr == "esper_alloc audit: there is no file none.py\n"
