"""A mark at the end of the forward pass must also keep what the backward pass reads."""

from __future__ import annotations

import pytest
from scenario import OURS, run_program

TRIES = 30


def test_without_a_mark_gradients_are_wrong() -> None:
    found = run_program("backward", OURS, "none", str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == TRIES


@pytest.mark.parametrize("protection", ["using", "record_use", "record_stream"])
def test_marked_gradients_are_right(protection: str) -> None:
    found = run_program("backward", OURS, protection, str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
