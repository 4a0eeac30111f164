"""CUDA graphs on esper_alloc: right numbers on replay, memory that serves again inside."""

from __future__ import annotations

import pytest
from scenario import run_program

RIGHT = [
    "fork_join_late_side",
    "fork_join_late_main",
    "exception_inside",
    "graphed_callables",
]


@pytest.mark.parametrize("name", RIGHT)
def test_numbers_are_right(name: str) -> None:
    assert run_program("graphs", name)["wrong"] == 0


def test_a_use_inside_holds_until_the_join() -> None:
    found = run_program("graphs", "scope")
    assert found["wrong"] == 0
    assert not found["reused"]
    assert found["reused_after_join"], "the memory did not serve again: nothing was tested"


def test_unmarked_memory_is_overwritten() -> None:
    """The control: the scenario does corrupt where nothing protects."""
    found = run_program("graphs", "unmarked")
    assert found["reused"]
    assert found["wrong"] >= 6


def test_graphs_share_a_pool() -> None:
    found = run_program("graphs", "shared_pool")
    assert found["wrong"] == 0
    assert found["reused"]
    assert found["grown"] == 0


def test_a_graphs_memory_goes_with_it() -> None:
    found = run_program("graphs", "reset_frees")
    assert found["wrong"] == 0
    assert found["held"] >= 64 << 20
    assert found["kept"] == 0


def test_another_thread_allocates_during_captures() -> None:
    found = run_program("graphs", "other_thread")
    assert found["wrong"] == 0
    assert found["steps"] > 10


def test_a_conditional_nodes_body_keeps_to_itself() -> None:
    found = run_program("graphs", "conditional_body")
    assert found["wrong"] == 0
    assert found["reused"], "the body's own memory did not serve again in it"
    assert not found["taken"]


def test_a_graph_within_a_graph() -> None:
    found = run_program("graphs", "child_graph")
    assert found["wrong"] == 0
    assert not found["reused"]
    assert found["reused_after_join"], "the memory did not serve again: nothing was tested"


def test_two_captures_at_once_keep_apart() -> None:
    found = run_program("graphs", "two_captures")
    assert found["wrong"] == 0
    assert found["reused"]
    assert not found["taken"]


@pytest.mark.two_gpus
def test_a_capture_over_two_devices() -> None:
    found = run_program("graphs", "two_devices")
    assert found["wrong"] == 0
    assert not found["reused"]
    assert found["reused_after_join"], "the memory did not serve again: nothing was tested"


@pytest.mark.two_gpus
def test_unmarked_memory_is_overwritten_over_two_devices() -> None:
    """The control: the scenario does corrupt where nothing protects."""
    found = run_program("graphs", "two_devices_unmarked")
    assert found["reused"]
    assert found["wrong"] >= 6


def test_mem_pool() -> None:
    found = run_program("graphs", "mem_pool")
    assert found["wrong"] == 0
    assert found["reused"]
    assert found["kept"] == 0
