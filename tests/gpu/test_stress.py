"""Random programs over four streams: every read of every tensor is checked."""

from __future__ import annotations

import pytest
from scenario import run_program

PROGRAMS = 300


@pytest.mark.parametrize("allowance", ["0", "128MiB"])
@pytest.mark.parametrize("limit_mib", [0, 320], ids=["roomy", "short of memory"])
def test_marked_programs_read_what_was_written(limit_mib: int, allowance: str) -> None:
    env = {"ESPER_ALLOC_ALLOWANCE": allowance}
    found = run_program("stress", "marked", "1", str(PROGRAMS), str(limit_mib), env=env)
    assert found["programs"] == PROGRAMS
    assert found["reads"] > 10 * PROGRAMS
    assert found["wrong"] == 0
    assert found["out_of_memory"] < 0.1 * PROGRAMS
    assert found["leaked"] == 0
    assert found["pending"] == 0
    assert found["statistics_agree"]


def test_unmarked_programs_do_not() -> None:
    """The control: the same programs without marks do go wrong."""
    found = run_program("stress", "unmarked", "1", "30")
    assert found["wrong"] > 0
