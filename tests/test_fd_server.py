"""Files that one process offers and another takes: ``csrc/device/fd_server.c``.

Builds ``tests/device/test_fd_server.c``, plain and sanitized, and runs its scenarios, each in a
process of its own.
"""

import os
import subprocess
from pathlib import Path

import pytest
from compilers import CC

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SCENARIOS = (
    (
        "guess refused kept last_descriptor users silent crowd signals full_table fork orphan exit network"  # as main() has them
    ).split()
)

pytestmark = pytest.mark.skipif(not CC, reason="needs a C compiler")


@pytest.fixture(scope="session", params=["plain", "sanitized"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("fd_server") / f"test_fd_server_{request.param}"
    sources = [
        ROOT / "tests" / "device" / "test_fd_server.c",
        ROOT / "csrc" / "device" / "fd_server.c",
    ]
    flags = FLAGS + (SANITIZE if request.param == "sanitized" else [])
    command = [*CC, *flags, *map(str, sources), "-o", str(output), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(program: Path, scenario: str) -> None:
    done = subprocess.run(
        [str(program), scenario],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},  # a forked child leaves things be
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr or f"ended with {done.returncode}"


def test_each_scenario_is_run(program: Path) -> None:
    source = (ROOT / "tests" / "device" / "test_fd_server.c").read_text()
    assert source.count("SCENARIO(") == len(SCENARIOS)


def test_other_macros_give_the_same(tmp_path: Path) -> None:
    """As it is compiled elsewhere: GNU C, and without a macro on the command line."""
    for standard in ("-std=c11", "-std=gnu11"):
        command = [*CC, standard, "-Wall", "-Wextra", "-Werror", "-c"]
        source = ROOT / "csrc" / "device" / "fd_server.c"
        command += [str(source), "-o", str(tmp_path / "fd_server.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
