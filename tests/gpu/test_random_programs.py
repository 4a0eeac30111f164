"""Ten thousand random programs on the GPU, and what they find without a rule.

The driver program (random/) is compiled here, the core with it: with nvcc, for
this machine's GPU. tests/test_random_on_sim.py runs the same on any machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "random"
ROOT = HERE.parents[2]
PROGRAMS = 10_000
RULES = re.findall(r"R\((\w+), \"", (ROOT / "csrc" / "core" / "base" / "rules.h").read_text())

#: Rules whose absence a GPU need not show, and why.
NOT_SHOWN = {
    "RELEASE_NEEDS_COMPLETION": "cuMemFree itself waits for the device, or refuses during a "
    "capture: what is given back too early cannot be handed out early",
    "MARK_FROM_ANY_DEVICE": "the programs run on one device",
    "BODY_KEEPS_APART": "the programs capture no conditional nodes",
    "SLEEP_NEEDS_COMPLETION": "the programs put no memory to sleep",
    "SLEEP_KEEPS_GRAPHS": "the programs put no memory to sleep",
    "UNMAP_AFTER_COPY": "the programs put no memory to sleep",
    "WAKE_BEFORE_USE": "the programs put no memory to sleep",
    "ASLEEP_SERVES_NOTHING": "the programs put no memory to sleep",
    "FENCED_SERVES_ONCE": "the programs have no fences",
    "FENCE_NEEDS_COMPLETION": "the programs have no fences",
    "FENCE_ADDRESSES_ONCE": "the programs have no fences",
}
#: Without these the driver is given handles that are not alive, and may crash.
MAY_CRASH = {"EVENTS_IMMUTABLE", "MORTAL_HANDLES"}


def needs_nvcc() -> None:
    folders = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    if shutil.which("nvcc") or any((Path(folder) / "bin" / "nvcc").is_file() for folder in folders):
        return
    if os.environ.get("ESPER_REQUIRE_GPU", "") not in ("", "0"):
        pytest.fail("ESPER_REQUIRE_GPU is set, but nvcc is not there", pytrace=False)
    pytest.skip("needs nvcc")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled driver program."""
    needs_nvcc()
    import torch

    major, minor = torch.cuda.get_device_capability()
    folder = tmp_path_factory.mktemp("random")
    command = [sys.executable, str(HERE / "build.py"), "cuda", str(folder), f"sm_{major}{minor}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Path(done.stdout.strip())


def run(programs: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    # Streams share hardware queues when there are more of them than queues.
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    environment["CUDA_MODULE_LOADING"] = "EAGER"
    environment.pop("CUDA_LAUNCH_BLOCKING", None)
    command = [str(programs), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    print(f"{' '.join(arguments)}: {done.stdout.strip()} {done.stderr.strip()[-500:]}")
    return done


def test_nothing_is_wrong_in_ten_thousand(programs: Path) -> None:
    done = run(programs, "--seed", "1", "--programs", str(PROGRAMS), timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = r"in (\d+) programs.* (\d+) blocks .* (\d+) refused, (\d+) reads"
    found = re.search(figures, done.stdout)
    assert found is not None, done.stdout
    ran, blocks, refused, reads = map(int, found.groups())
    assert ran == PROGRAMS
    assert blocks > 20 * PROGRAMS and reads > 20 * PROGRAMS
    assert refused < 0.1 * blocks


def test_without_marks_something_is(programs: Path) -> None:
    done = run(programs, "--unmarked", "--programs", "300", timeout=1200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "words are wrong" in done.stdout


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_something_is(programs: Path, rule: str) -> None:
    """The run stops at the first thing that is wrong, in a second or two on a GPU of one's own."""
    if rule in NOT_SHOWN:
        pytest.skip(NOT_SHOWN[rule])
    arguments = ("--without", rule, "--programs", "1000000", "--seconds", "60")
    try:
        done = run(programs, *arguments, timeout=100)
    except subprocess.TimeoutExpired:
        return  # it hangs: that is wrong, too
    if rule in MAY_CRASH and done.returncode < 0:
        return
    assert done.returncode == 1, done.stdout + done.stderr
    assert "found: " in done.stdout
