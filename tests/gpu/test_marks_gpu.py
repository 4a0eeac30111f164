"""Marks beside captures on a real device: delayed readers check what they read. The control, without
a mark, is in test_b8pt01.py."""

import importlib.util

import pytest
from scenario import run_program

TRIES = 20

# Marked memory serves again, as there is no other: the host waits for its reader
# before, which is what these scenarios put to the test.
WAITED_FOR = ["capture_in_other_thread", "global_capture_in_other_thread"]


@pytest.mark.parametrize("name", WAITED_FOR)
def test_memory_that_is_waited_for_is_never_overwritten_early(name: str) -> None:
    found = run_program("marks", name, str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
    assert found["reused"] >= 0.9 * TRIES, "the memory never served again: nothing was tested"
    assert found["leaked"] == 0


def test_a_capture_that_nobody_announced() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    found = run_program("marks", "cupy_captures", str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
    assert found["reused"] == 0, "memory that a graph still touches was handed out"
