"""Runs the C tests of the core, each as a case of its own, plain and under the sanitizers, the
random programs, the fault loop and the walk over the rule switches. ``make -C tests/core`` does the
same without Python.

``ESPER_CORE_OPERATIONS`` scales the random programs: their number of operations in the plain build
(default 10 million; a tenth under AddressSanitizer, a fortieth under ThreadSanitizer). With
``--quick`` it is a twentieth of that, and the fault loop visits every 16th call; under
AddressSanitizer, where it takes ten times as long, every 8th. For races, which one thread cannot
have, only programs with several threads run.
"""

import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from compilers import CC, CXX
from processes import succeeded

HERE = Path(__file__).resolve().parent / "core"
CSRC = HERE.parent.parent / "csrc"
OPERATIONS = int(os.environ.get("ESPER_CORE_OPERATIONS", 10_000_000))
QUICK_STEP = "16"
SANITIZED_STEP = "8"
COUNTED = "test_instructions"  # it counts those of the core as it ships, without checks of locks

EPISODES = HERE.parent / "episodes"
PROGRAMS = sorted(p.stem for p in HERE.glob("*/test_*.c")) + ["fault_loop", "episodes"]
#: They bound instructions and fragmentation, and find no errors.
SLOW = {"test_instructions", "test_drift"}

pytestmark = pytest.mark.skipif(
    not HERE.is_dir() or shutil.which("make") is None or not CC,
    reason="the C tests need a source checkout, make and a C compiler",
)


def run(*command: object, **environment: str) -> str:
    """The output of a command that must succeed. `environment` is added to what there is."""
    return succeeded(*command, env={**os.environ, **environment}, cwd=HERE).stdout


@cache
def sanitizer_works(variant: str) -> bool:
    """Whether the compiler has the sanitizer's run-time library."""
    flag = {"asan": "-fsanitize=address,undefined", "tsan": "-fsanitize=thread"}.get(variant)
    if flag is None:
        return True
    probe = HERE / "build" / f"probe-{variant}"
    probe.parent.mkdir(exist_ok=True)
    built = subprocess.run(
        [*CC, flag, "-x", "c", "-", "-o", str(probe)],
        input="int main(void) { return 0; }",
        text=True,
        capture_output=True,
    )
    return built.returncode == 0 and subprocess.run([str(probe)]).returncode == 0


@cache
def build(variant: str) -> Path:
    """Builds every program of a variant; where they are."""
    if not sanitizer_works(variant):
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"{shlex.join(CC)} cannot build and run programs for {variant}")
    run("make", "-s", "-j2", f"VARIANT={variant}", "build")
    return HERE / "build" / variant


TEST = re.compile(r"(?:TEST|SCENE|SCENE_WITH|WALK)\((\w+)")


def names(program: str) -> list[str]:
    """The tests of a program, read from its source so that collecting builds nothing."""
    own = EPISODES.glob("rule_*.c") if program == "episodes" else HERE.glob(f"*/{program}.c")
    lines = [line for source in own for line in source.read_text().splitlines()]
    return [found[1] for line in lines if (found := TEST.match(line))]


def case(program: str, name: str) -> Any:
    marks = pytest.mark.slow if program in SLOW else ()
    return pytest.param(program, name, id=f"{program}-{name}", marks=marks)


@pytest.mark.parametrize("program, name", [case(p, name) for p in PROGRAMS for name in names(p)])
def test_plain(program: str, name: str, pytestconfig: pytest.Config) -> None:
    shorter = {"ESPER_FAULT_STEP": QUICK_STEP} if pytestconfig.getoption("quick") else {}
    variant = "counted" if program == COUNTED else "plain"
    assert name in run(build(variant) / program, name, **shorter)


def has_threads(program: str) -> bool:
    """As the Makefile asks. Episodes have a rule for threads, and are built for every variant."""
    sources = (path.read_text() for path in HERE.glob(f"*/{program}.c"))
    words = r"pthread|another_thread|exchange\.h"
    return program == "episodes" or any(re.search(words, source) for source in sources)


SANITIZED = [("asan", program) for program in PROGRAMS if program not in SLOW]
SANITIZED += [("tsan", program) for program in PROGRAMS if has_threads(program)]


@pytest.mark.slow
@pytest.mark.parametrize("variant, program", SANITIZED)
def test_sanitized(variant: str, program: str) -> None:
    output = run(build(variant) / program, ESPER_FAULT_STEP=SANITIZED_STEP)
    assert all(name in output for name in names(program))


def test_each_rule_is_caught_by_an_episode_of_its_number(capsys: Any) -> None:
    output = run(build("rules") / "walk_rules")
    rules = [line for line in output.splitlines() if line.startswith("rule ")]
    assert rules and all("caught by" in line for line in rules)
    with capsys.disabled():
        print("\n" + "\n".join(rules))


def test_random_programs_catch_a_malloc_that_lets_a_stream_wait() -> None:
    command = [build("rules") / "random_programs", "--without", "NEVER_WAITS"]
    done = subprocess.run(
        [*command, "--seed", "1000", "--operations", "200000"], capture_output=True, text=True
    )
    assert done.returncode != 0 and "again: random_programs" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "variant, threads",
    [
        *(("plain", threads) for threads in (1, 4)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("asan", 1), ("asan", 4), ("tsan", 4))
        ),
    ],
)
def test_random_programs(variant: str, threads: int, pytestconfig: pytest.Config) -> None:
    operations = OPERATIONS // {"plain": 1, "asan": 10, "tsan": 40}[variant]
    if pytestconfig.getoption("quick"):
        operations //= 20
    said = run(build(variant) / "random_programs", "--operations", operations, "--threads", threads)
    assert "the oracle is content" in said


def test_random_reads() -> None:
    """The random programs of the GPU tests: they are correct, and need their marks."""
    program = build("plain") / "random_reads"
    assert "nothing is wrong" in run(program, "--programs", 5000)
    unmarked = subprocess.run([program, "--unmarked", "--programs", "300"], capture_output=True)
    assert unmarked.returncode == 1 and b"found: " in unmarked.stdout


@pytest.mark.parametrize(
    "header",
    "esper_alloc esper_report esper_sleep device/device device/sim/sim python/capi".split(),
)
@pytest.mark.parametrize("language, standard", [("c", "c11"), ("c++", "c++11"), ("c++", "c++20")])
def test_header_compiles_alone(header: str, language: str, standard: str) -> None:
    source = f'#include "{CSRC / header}.h"\nint main() {{ return 0; }}\n'
    compiler = CC if language == "c" else CXX
    if not compiler:
        pytest.skip(f"needs a compiler of {language}")
    command = [*compiler, "-x", language, f"-std={standard}"]
    command += "-pedantic -Wall -Wextra -Werror -fsyntax-only -".split()
    succeeded(*command, input=source)


@pytest.mark.parametrize(
    ("header", "ours"), [("esper_alloc.h", {'"esper_report.h"'}), ("esper_report.h", set())]
)
def test_a_public_header_includes_neither_cuda_nor_torch(header: str, ours: set[str]) -> None:
    text = (CSRC / header).read_text()
    includes = {line.split()[1] for line in text.splitlines() if line.startswith("#include")}
    assert includes == {"<stddef.h>", "<stdint.h>", *ours}


def test_every_file_of_the_core_has_a_test_of_its_name() -> None:
    sources = {path.relative_to(CSRC / "core") for path in CSRC.glob("core/*/*.c")}
    sources |= {path.relative_to(CSRC) for path in CSRC.glob("sleep/*.c")}
    tested = {
        path.parent.relative_to(HERE) / f"{path.stem.removeprefix('test_')}.c"
        for path in HERE.glob("*/test_*.c")
    }
    assert not sorted(map(str, sources - tested))
    programs = [path.name for path in HERE.glob("*/test_*.c")]
    assert len({*programs}) == len(programs), "those of two folders would have the same name"
