"""The lifetime rules on a real device: delayed readers check what they read."""

from __future__ import annotations

import importlib.util

import pytest
from scenario import run_program

TRIES = 20

# Marked memory serves again, as there is no other: the host waits for its reader
# before, which is what these scenarios put to the test.
WAITED_FOR = [
    "event",
    "view",
    "nested_scopes",
    "split",
    "several_readers",
    "third_stream",
    "destroyed_stream",
    "other_thread",
    "capture_in_other_thread",
    "global_capture_in_other_thread",
]
# Here the memory need not serve again.
HELD = [
    "record_stream",
    "empty_cache",
    "short_of_memory",
    "waits_for_the_owner",
    "waits_for_the_owner_short_of_memory",
    "destroyed_stream_record_stream",
]
CAPTURED = ["mark_on_capturing_stream", "cupy_captures"]


@pytest.mark.parametrize("name", WAITED_FOR)
def test_memory_that_is_waited_for_is_never_overwritten_early(name: str) -> None:
    found = run_program("rules", name, str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
    assert found["reused"] >= 0.9 * TRIES, "the memory never served again: nothing was tested"
    assert found["leaked"] == 0


@pytest.mark.parametrize("name", HELD)
def test_held_memory_is_never_overwritten_early(name: str) -> None:
    found = run_program("rules", name, str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
    assert found["hung"] == 0
    assert found["leaked"] == 0


@pytest.mark.parametrize("name", CAPTURED)
def test_captures_that_nobody_announced(name: str) -> None:
    if name == "cupy_captures" and importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    found = run_program("rules", name, str(TRIES))
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
    assert found["reused"] == 0, "memory that a graph still touches was handed out"


@pytest.mark.parametrize("name", ["split_unmarked", "destroyed_stream_unmarked"])
def test_unmarked_memory_is_overwritten(name: str) -> None:
    """The control: these scenarios do corrupt where nothing protects. In classic segments:
    pages of mapped ones may move away under the reader."""
    found = run_program("rules", name, str(TRIES), env={"ESPER_ALLOC_SEGMENTS": "classic"})
    assert found["tries"] == TRIES
    # A fresh stream can share a hardware queue with the owner's, which then waits.
    assert found["wrong"] >= 0.8 * TRIES
