"""Automatic uses: programs that mark nothing go wrong without them, and never with them."""

from collections.abc import Callable
from typing import Any

import pytest
from scenario import once, run_program

TRIES = 100
#: What is dropped on the host's word alone, so that each try goes wrong without a mark.
PATTERNS = ("resized", "handed_over", "stash", "triton", "touched")
ACROSS = ("across",)
every_pattern = pytest.mark.parametrize(
    "pattern", [*PATTERNS, *(pytest.param(one, marks=pytest.mark.two_gpus) for one in ACROSS)]
)
#: So that control runs read other data, and not addresses without pages.
CLASSIC = {"ESPER_ALLOC_SEGMENTS": "classic"}


@once
def found(uses: str, segments: str, patterns: tuple[str, ...]) -> dict[str, dict[str, int]]:
    env = {"ESPER_ALLOC_SEGMENTS": segments}
    return run_program("automatic", uses, str(TRIES), *patterns, env=env)


@pytest.fixture
def of(chosen: Callable[[str], set[Any]]) -> Callable[[str, str, str], dict[str, int]]:
    """of(pattern, uses, segments): one process tries all patterns that are asked for."""
    together = tuple(one for one in PATTERNS if one in chosen("pattern"))
    return lambda pattern, *how: found(*how, ACROSS if pattern in ACROSS else together)[pattern]


@every_pattern
def test_without_a_mark_every_try_goes_wrong(
    pattern: str, of: Callable[[str, str, str], dict[str, int]]
) -> None:
    """On classic segments: else control runs would meet addresses without pages."""
    answer = of(pattern, "marked", "classic")
    assert answer["corrupted"] == TRIES, answer


@pytest.mark.parametrize("segments", ["classic", "mapped"])
@every_pattern
def test_with_automatic_uses_none_does(
    pattern: str, segments: str, of: Callable[[str, str, str], dict[str, int]]
) -> None:
    answer = of(pattern, "automatic", segments)
    assert answer["tries"] == TRIES
    assert answer["corrupted"] == 0, answer


PROGRAMS = 200


@pytest.mark.parametrize("segments", ["classic", "mapped"])
@pytest.mark.parametrize("limit_mib", [0, 256], ids=["roomy", "short of memory"])
def test_random_programs_without_a_mark_find_what_was_written(
    limit_mib: int, segments: str
) -> None:
    """Of 10,000 with other seeds: tools/gpu --part programs-automatic and -mapped."""
    env = {"ESPER_ALLOC_SEGMENTS": segments}
    options = ("--programs", str(PROGRAMS), "--limit", str(limit_mib))
    answer = run_program("random_streams", *options, env=env)
    assert answer["programs"] == PROGRAMS and answer["checks"] > PROGRAMS
    assert answer["failed"] == 0, answer["first"]


def test_without_automatic_uses_most_do_not() -> None:
    options = ("--uses", "marked", "--programs", "60")
    answer = run_program("random_streams", *options, env=CLASSIC)
    assert answer["failed"] > 30
