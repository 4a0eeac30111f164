"""The same answers as PyTorch's own allocator, for everything that a program can see.

The scenarios are in conformance/, one function a row; conformance/ground.py says how
they run. Those of parts that are built elsewhere carry that part in their name here:
`pools-...` needs options of MemPools, `checkpoints-...` checkpoints of pools.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "conformance"))
import driver
import ground
import mapped
from helper import in_nursery, nursery_is_wanted

Answers = dict[tuple[str, str], dict[str, Any]]


def run(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    if nursery_is_wanted():
        return in_nursery(driver.script(arguments), env)
    return driver.run_fresh(arguments, env)


def label(group: str, scenario: ground.Scenario) -> str:
    parts = sorted(scenario.needs & {"pools", "checkpoints"})
    return "-".join([*parts, group, scenario.name])


def rows() -> list[Any]:
    return [
        pytest.param(
            group,
            scenario.name,
            id=label(group, scenario),
            marks=pytest.mark.two_gpus if "two_gpus" in scenario.needs else (),
        )
        for group, scenario in ground.every_scenario()
    ]


@pytest.fixture(scope="module")
def answers(chosen: Callable[[str], set[str]]) -> Answers:
    """Native's, and those of ours with the same kind of segments."""
    return driver.run_all(sorted(chosen("group")), {"ESPER_ALLOC_SEGMENTS": "classic"}, run=run)


@pytest.fixture(scope="module")
def mapped_answers(chosen: Callable[[str], set[str]]) -> Answers:
    """Of ours with its own choice of segments."""
    return driver.run_all(sorted(chosen("group")), allocators=["esper_alloc"], run=run)


@pytest.mark.parametrize(("group", "name"), rows())
def test_the_answer_is_natives(answers: Answers, group: str, name: str) -> None:
    wrong = driver.judge(answers[group, "native"], answers[group, "esper_alloc"], name)
    assert wrong is None, wrong


@pytest.mark.parametrize(("group", "name"), rows())
def test_the_answer_is_natives_with_mapped_segments_too(
    answers: Answers, mapped_answers: Answers, group: str, name: str
) -> None:
    wrong = mapped.judge(answers, mapped_answers, group, name)
    assert wrong is None, wrong
