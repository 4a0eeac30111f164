"""Files that one process offers and another takes: ``csrc/device/fd_server.c``.

Builds ``tests/device/test_fd_server.c``, plain and sanitized, and runs its scenarios, each in a
process of its own.
"""

import os
from pathlib import Path

import pytest
from compilers import CC
from processes import ROOT, succeeded

FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SCENARIOS = "guess refused kept last_descriptor users silent crowd signals full_table fork orphan exit network".split()

pytestmark = pytest.mark.skipif(not CC, reason="needs a C compiler")


@pytest.fixture(scope="session", params=["plain", "sanitized"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("fd_server") / f"test_fd_server_{request.param}"
    sources = [
        ROOT / "tests" / "device" / "test_fd_server.c",
        ROOT / "csrc" / "device" / "fd_server.c",
    ]
    flags = FLAGS + (SANITIZE if request.param == "sanitized" else [])
    succeeded(*CC, *flags, *sources, "-o", output, "-pthread")
    return output


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(program: Path, scenario: str) -> None:
    # A forked child leaves things be.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    succeeded(program, scenario, env=environment, timeout=600)


def test_each_scenario_is_run(program: Path) -> None:
    source = (ROOT / "tests" / "device" / "test_fd_server.c").read_text()
    assert source.count("SCENARIO(") == len(SCENARIOS)


def test_other_macros_give_the_same(tmp_path: Path) -> None:
    """As it is compiled elsewhere: GNU C, and without a macro on the command line."""
    for standard in ("-std=c11", "-std=gnu11"):
        flags = [standard, "-Wall", "-Wextra", "-Werror", "-c"]
        source = ROOT / "csrc" / "device" / "fd_server.c"
        succeeded(*CC, *flags, source, "-o", tmp_path / "fd_server.o")
