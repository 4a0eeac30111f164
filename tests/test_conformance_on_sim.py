"""The conformance suite of tests/gpu, as far as it needs no kernel: PyTorch's own
allocator and esper_alloc, both on the simulated device."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from on_sim import build

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "gpu" / "conformance"))

import driver  # noqa: E402
import ground  # noqa: E402
import mapped  # noqa: E402

Answers = dict[tuple[str, str], dict[str, Any]]

#: The others take most of the time, a process each for two allocators.
QUICK = ("pools", "figures", "snapshot", "history", "memory", "shortage")


def run(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """The script of a group, beside a torch that is imported already."""
    return build.program(driver.script(arguments), dict(env))


@pytest.fixture(scope="module")
def answers(library: Path, pytestconfig: pytest.Config) -> Answers:
    groups = QUICK if pytestconfig.getoption("quick") else ground.GROUPS
    return driver.run_all(groups, build.environment(library), 1, run=run)


@pytest.fixture(scope="module")
def mapped_answers(library: Path) -> Answers:
    """Of esper_alloc on a device that maps pages."""
    env = {**build.environment(library), "SIM_MAPS_PAGES": "1"}
    return driver.run_all(ground.GROUPS, env, 1, ["esper_alloc"], run)


def rows() -> list[Any]:
    return [
        pytest.param(
            group,
            one.name,
            id=f"{group}-{one.name}",
            marks=() if group in QUICK else pytest.mark.slow,
        )
        for group, one in ground.every_scenario()
        if "gpu" not in one.needs
    ]


@pytest.mark.parametrize(("group", "name"), rows())
def test_the_answer_is_natives(answers: Answers, group: str, name: str) -> None:
    wrong = driver.judge(answers[group, "native"], answers[group, "esper_alloc"], name)
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), rows())
def test_the_answer_is_natives_with_mapped_segments_too(
    answers: Answers, mapped_answers: Answers, group: str, name: str
) -> None:
    wrong = mapped.judge(answers, mapped_answers, group, name)
    assert wrong is None, wrong


def test_the_lists_name_rows() -> None:
    assert {str(row.id) for row in rows()} >= mapped.OTHERWISE
    assert set(QUICK) <= {row.values[0] for row in rows()}
