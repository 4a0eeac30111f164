"""B8-PT-01: a tensor dropped while another stream has yet to read it.

Without a mark every try is corrupted, which also shows that the test can see
corruption at all; with a mark none is. Where launches block, the reader is
done before the drop, and nothing may fail.
"""

import pytest
from scenario import NATIVE, OURS, once, run_program

TRIES = 100
PROTECTIONS = ("none", "record_use", "using", "record_stream")


@once
def found(allocator: str, source: str, blocking: bool = False) -> dict[str, dict[str, int]]:
    """Of every protection, in one process."""
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    return run_program("b8pt01", allocator, source, str(TRIES), *PROTECTIONS, env=env)


@pytest.mark.parametrize("source", ["kernel", "copy"])
@pytest.mark.parametrize("allocator", [OURS, NATIVE])
def test_without_a_mark_every_try_is_corrupted(allocator: str, source: str) -> None:
    answer = found(allocator, source)["none"]
    assert answer["tries"] == TRIES
    assert answer["corrupted"] == TRIES


@pytest.mark.parametrize("source", ["kernel", "copy"])
@pytest.mark.parametrize("protection", ["record_use", "using", "record_stream"])
def test_with_a_mark_none_is(protection: str, source: str) -> None:
    answer = found(OURS, source)[protection]
    assert answer["tries"] == TRIES
    assert answer["corrupted"] == 0
    if protection != "record_stream":
        # The memory served again, so the order was put to the test.
        assert answer["reused"] >= 0.9 * TRIES


@pytest.mark.parametrize("source", ["kernel", "copy"])
@pytest.mark.parametrize("protection", ["record_use", "using"])
def test_under_another_allocator_marks_protect_too(protection: str, source: str) -> None:
    assert found(NATIVE, source)[protection]["corrupted"] == 0


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_blocking_launches_never_fail(protection: str) -> None:
    answer = found(OURS, "kernel", blocking=True)[protection]
    assert answer["tries"] == TRIES
    assert answer["corrupted"] == 0
