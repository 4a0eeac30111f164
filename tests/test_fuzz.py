"""Builds and runs the fuzzers for so many inputs, the same each time. ``make -C
tests/fuzz fuzz`` looks for longer, and at others each time."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from compilers import CC, named

HERE = Path(__file__).resolve().parent / "fuzz"
COMPILERS = {
    "libfuzzer": (named("CLANG", "clang"), "fuzzer,address,undefined"),
    "standalone": (CC, "address,undefined"),
}
RUNS = {"libfuzzer": 30_000, "standalone": 100_000}

#: Against what hangs; it takes seconds.
LIMIT = 3600

pytestmark = pytest.mark.skipif(
    not HERE.is_dir() or shutil.which("make") is None,
    reason="fuzzing needs a source checkout and make",
)


@cache
def can_build(engine: str) -> bool:
    compiler, sanitizers = COMPILERS[engine]
    if not compiler:
        return False
    source = "int LLVMFuzzerTestOneInput(void) { return 0; }"
    if engine == "standalone":
        source = "int main(void) { return 0; }"
    built = subprocess.run(
        [*compiler, f"-fsanitize={sanitizers}", "-x", "c", "-", "-o", os.devnull],
        input=source,
        text=True,
        capture_output=True,
    )
    return built.returncode == 0


def fuzz(engine: str, *settings: str) -> subprocess.CompletedProcess[str]:
    compiler, sanitizers = COMPILERS[engine]
    if not can_build(engine):
        # Any compiler builds the one; clang is not everywhere.
        demanded = engine == "standalone" and os.environ.get("CI") == "true"
        give_up = pytest.fail if demanded else pytest.skip
        give_up(f"{shlex.join(compiler) or engine} cannot build with {sanitizers}")
    return subprocess.run(
        ["make", "-s", "run", f"ENGINE={engine}", "SEED=1", f"PYTHON={sys.executable}", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT,
        cwd=HERE,
    )


@pytest.mark.parametrize("engine", COMPILERS)
def test_the_check_of_a_pickle_holds_for_any_bytes(engine: str) -> None:
    done = fuzz(engine, f"RUNS={RUNS[engine]}")
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"Done {RUNS[engine]} runs" in done.stdout


@pytest.mark.parametrize("engine", COMPILERS)
def test_the_fuzzer_notices_what_is_nested_too_deep(engine: str) -> None:
    """Built with a lower limit for what may be admitted than the check has."""
    done = fuzz(engine, "RUNS=1000", "VARIANT=-low", "EXTRA_FLAGS=-DDEPTH_ALLOWED=5")
    assert done.returncode != 0
    assert "not so: what is admitted is nested within the limit" in done.stdout
