"""Automatic uses: programs that mark nothing go wrong without them, and never with them."""

from __future__ import annotations

import pytest
from scenario import run_program

TRIES = 100
#: What is dropped on the host's word alone, so that each try goes wrong without a mark.
PATTERNS = (
    "reader", "resized", "handed_over", "in_place", "stash", "backward", "compiled", "triton",
    "graph", "touched", pytest.param("across", marks=pytest.mark.two_gpus),
)  # fmt: skip
#: So that control runs read other data, and not addresses without pages.
CLASSIC = {"ESPER_ALLOC_SEGMENTS": "classic"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_a_mark_every_try_goes_wrong(pattern: str) -> None:
    found = run_program("automatic", "marked", pattern, str(TRIES), env=CLASSIC)
    assert found["tries"] == TRIES
    assert found["corrupted"] == TRIES


@pytest.mark.parametrize("segments", ["classic", "mapped"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_automatic_uses_none_does(pattern: str, segments: str) -> None:
    env = {"ESPER_ALLOC_SEGMENTS": segments}
    found = run_program("automatic", "automatic", pattern, str(TRIES), env=env)
    assert found["tries"] == TRIES
    assert found["corrupted"] == 0


PROGRAMS = 200


@pytest.mark.parametrize("segments", ["classic", "mapped"])
def test_random_programs_without_a_mark_find_what_was_written(segments: str) -> None:
    env = {"ESPER_ALLOC_SEGMENTS": segments}
    found = run_program("random_streams", "automatic", "1", str(PROGRAMS), env=env)
    assert found["programs"] == PROGRAMS and found["checks"] > PROGRAMS
    assert found["failed"] == 0, found["first"]


def test_without_automatic_uses_most_do_not() -> None:
    found = run_program("random_streams", "marked", "1", "60", env=CLASSIC)
    assert found["failed"] > 30
