"""The episodes of the lifetime rules, and ten thousand random programs, on the GPU.

They are compiled here, the core with them: with nvcc, for this machine's GPU. tests/test_core.py
runs the same on the simulated device.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = 10_000
WALK = "every_rule_is_caught_by_an_episode_of_its_number"
RULES = re.findall(r"R\((\w+), \"", (ROOT / "csrc" / "core" / "base" / "rules.h").read_text())

#: Rules whose absence a GPU need not show, and why.
NOT_SHOWN = {
    "RELEASE_NEEDS_COMPLETION": "cuMemFree itself waits for the device, or refuses during a "
    "capture: what is given back too early cannot be handed out early",
    "MARK_FROM_ANY_DEVICE": "needs a second device",
    "BODY_KEEPS_APART": "needs the body of a conditional node",
    "ENDED_OWES_NOTHING": "needs a driver that gives a handle to another stream at once",
    "UNMAP_AFTER_COPY": "the copy may be over before the pages are unmapped",
    "WAKE_BEFORE_USE": "the copy may be over before the first read",
}


def needs_nvcc() -> None:
    folders = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    if shutil.which("nvcc") or any((Path(folder) / "bin" / "nvcc").is_file() for folder in folders):
        return
    if os.environ.get("ESPER_REQUIRE_GPU", "") not in ("", "0"):
        pytest.fail("ESPER_REQUIRE_GPU is set, but nvcc is not there", pytrace=False)
    pytest.skip("needs nvcc")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled programs."""
    needs_nvcc()
    import torch

    major, minor = torch.cuda.get_device_capability()
    folder = tmp_path_factory.mktemp("episodes")
    build = ROOT / "tests" / "episodes" / "build.py"
    command = [sys.executable, str(build), str(folder), f"sm_{major}{minor}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Streams share hardware queues when there are more of them than queues.
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    environment["CUDA_MODULE_LOADING"] = "EAGER"
    environment.pop("CUDA_LAUNCH_BLOCKING", None)
    command = [str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2400)
    print(f"{' '.join(arguments)}: {done.stdout.strip()} {done.stderr.strip()[-500:]}")
    return done


def test_episodes(programs: Path) -> None:
    names = run(programs / "walk_rules", "--list").stdout.split()
    done = run(programs / "walk_rules", *(name for name in names if name != WALK))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_is_caught_by_an_episode_of_its_number(programs: Path) -> None:
    done = run(programs / "walk_rules", WALK)
    found = re.findall(r"^rule \w+, (\w+): (caught|NOT CAUGHT)", done.stdout, re.M)
    assert [rule for rule, _ in found] == RULES, done.stdout + done.stderr
    assert {rule for rule, outcome in found if outcome != "caught"} <= NOT_SHOWN.keys()


def test_nothing_is_wrong_in_ten_thousand(programs: Path) -> None:
    done = run(programs / "random_reads", "--seed", "1", "--programs", str(PROGRAMS))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = r"in (\d+) programs.* (\d+) blocks .* (\d+) refused, (\d+) reads"
    found = re.search(figures, done.stdout)
    assert found is not None, done.stdout
    ran, blocks, refused, reads = map(int, found.groups())
    assert ran == PROGRAMS
    assert blocks > 20 * PROGRAMS and reads > 20 * PROGRAMS
    assert refused < 0.1 * blocks


def test_without_marks_something_is(programs: Path) -> None:
    done = run(programs / "random_reads", "--unmarked", "--programs", "300")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "words are wrong" in done.stdout
