"""Marks from Python on a real device: delayed readers check what they read."""

from __future__ import annotations

import importlib.util

import pytest
from scenario import run_program

TRIES = 20

# Marked memory serves again, as there is no other: the host waits for its reader
# before, which is what these scenarios put to the test.
WAITED_FOR = [
    "view",
    "other_thread",
    "capture_in_other_thread",
    "global_capture_in_other_thread",
]


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


def test_unmarked_memory_is_overwritten() -> None:
    """The control: a scenario does corrupt where nothing protects. In classic segments: pages of
    mapped ones may move away under the reader."""
    found = run_program(
        "marks", "view_unmarked", str(TRIES), env={"ESPER_ALLOC_SEGMENTS": "classic"}
    )
    assert found["tries"] == TRIES
    # A fresh stream can share a hardware queue with the owner's, which then waits.
    assert found["wrong"] >= 0.8 * TRIES
