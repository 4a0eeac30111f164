"""Automatic uses: programs that mark nothing go wrong without them, and never with them."""

from __future__ import annotations

import pytest
from scenario import run_program

TRIES = 100
#: What is dropped on the host's word alone, so that each try goes wrong without a mark.
PATTERNS = (
    "reader", "resized", "handed_over", "in_place", "stash", "backward", "compiled", "triton",
    "graph", "touched",
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
@pytest.mark.parametrize("limit_mib", [0, 256], ids=["roomy", "short of memory"])
def test_random_programs_without_a_mark_find_what_was_written(
    limit_mib: int, segments: str
) -> None:
    """Of 10,000 with other seeds: tools/gpu --part automatic-programs."""
    env = {"ESPER_ALLOC_SEGMENTS": segments}
    options = ("--programs", str(PROGRAMS), "--limit", str(limit_mib))
    found = run_program("random_streams", *options, env=env)
    assert found["programs"] == PROGRAMS and found["checks"] > PROGRAMS
    assert found["failed"] == 0, found["first"]


def test_without_automatic_uses_most_do_not() -> None:
    options = ("--uses", "marked", "--programs", "60")
    found = run_program("random_streams", *options, env=CLASSIC)
    assert found["failed"] > 30
