"""CUDA graphs on esper_alloc: right numbers on replay, memory that serves again inside."""

import pytest
from scenario import run_program


def test_a_graphs_memory_goes_with_it() -> None:
    found = run_program("graphs", "reset_frees")
    assert found["wrong"] == 0
    assert found["held"] >= 64 << 20
    assert found["kept"] == 0


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
