"""Fused validation on streams. What goes wrong without a mark is in test_b8pt01.py."""

import pytest
from scenario import NATIVE, OURS, once, run_program

TRIES = 30
ALLOCATORS = [OURS, NATIVE]


@once
def race(allocator: str) -> dict[str, dict[str, int]]:
    """All the races under an allocator, in one process."""
    return run_program("fused_validation", allocator, "race", str(TRIES))


@pytest.mark.parametrize("source", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("how", ["ours", "current"])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_fused_validation_batch_never_does(allocator: str, how: str, source: str) -> None:
    found = race(allocator)[f"{how}, {source}"]
    assert found["tries"] == TRIES
    assert found["corrupted"] == 0
    if (allocator, source) == (OURS, "device"):
        # The memory served again, so the order was put to the test.
        assert found["reused"] >= 0.9 * TRIES


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_results_can_be_taken_to_the_current_stream(allocator: str) -> None:
    assert run_program("fused_validation", allocator, "take") == {"wrong": 0}


@pytest.mark.two_gpus
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_an_environment_may_be_on_the_other_device(allocator: str) -> None:
    assert run_program("fused_validation", allocator, "far") == {"wrong": 0, "current": 0}
