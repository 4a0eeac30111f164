"""The random programs of the GPU tests, on the simulated device.

It shows on any machine that the programs are correct, and that each lifetime
rule is needed by one of them. What is not simulated, they show on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import CC

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "gpu" / "random"
RULES = re.findall(r"R\((\w+), \"", (ROOT / "csrc" / "core" / "base" / "rules.h").read_text())
#: Rules that need what these programs do not have: a second device, the body of a
#: conditional node, sleep and fences.
NOT_HERE = {
    "MARK_FROM_ANY_DEVICE",
    "BODY_KEEPS_APART",
    "SLEEP_NEEDS_COMPLETION",
    "SLEEP_KEEPS_GRAPHS",
    "UNMAP_AFTER_COPY",
    "WAKE_BEFORE_USE",
    "ASLEEP_SERVES_NOTHING",
    "FENCED_SERVES_ONCE",
    "FENCE_NEEDS_COMPLETION",
    "FENCE_ADDRESSES_ONCE",
}
pytestmark = pytest.mark.skipif(not CC, reason="needs a C compiler")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [sys.executable, str(HERE / "build.py"), "sim", str(tmp_path_factory.mktemp("sim"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip())


def run(programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(programs), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


def test_the_programs_are_correct(programs: Path) -> None:
    done = run(programs, "--programs", "5000")
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_marks_something_is_wrong(programs: Path) -> None:
    done = run(programs, "--unmarked", "--programs", "300")
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in NOT_HERE])
def test_without_a_rule_something_is_wrong(programs: Path, rule: str) -> None:
    done = run(programs, "--without", rule, "--programs", "20000", "--seconds", "600")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "found: " in done.stdout


def test_what_it_cannot_run_it_says(programs: Path) -> None:
    done = run(programs, "--without", "NO_SUCH_RULE")
    assert done.returncode == 2
    assert "NO_SUCH_RULE" in done.stderr
