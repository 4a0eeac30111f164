"""A stream that waits for a reader only after its memory was freed: in time under PyTorch's own
allocator, and so here, although other streams may get memory."""

from __future__ import annotations

import pytest
from scenario import NATIVE, OURS, run_program

TRIES = 60


@pytest.mark.parametrize("segments", ["classic", "mapped"])
def test_who_waits_after_the_free_is_in_time(segments: str) -> None:
    found = run_program("late_waits", OURS, str(TRIES), env={"ESPER_ALLOC_SEGMENTS": segments})
    assert found["tries"] == TRIES
    assert found["corrupted"] == 0


def test_the_program_is_correct_under_native() -> None:
    assert run_program("late_waits", NATIVE, str(TRIES))["corrupted"] == 0
