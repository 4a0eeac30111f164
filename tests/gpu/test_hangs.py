"""Programs that a gate would hang: work that waits for what is not yet enqueued.

Each runs in a process of its own, with a limit; the control shows that a gate
does hang them. ESPER_REQUIRE_GPUS=2 makes a second GPU that is missing a failure.
"""

from __future__ import annotations

import pytest
from scenario import run_program

TRIES = 20
MARKS = ["gate_false", "record_stream", "trait"]
UNTIL_FREE = ["gate_false_until_free", "trait_until_free"]
CONTROLS = ["gate", "gate_until_free"]


def need_traits(mark: str) -> None:
    import esper_alloc

    if mark.startswith("trait") and not hasattr(esper_alloc, "set_stream_traits"):
        pytest.skip("esper_alloc has no set_stream_traits()")


@pytest.mark.parametrize("mark", MARKS + UNTIL_FREE)
@pytest.mark.parametrize("scenario", ["value", "ring_on_one"])
def test_rendezvous_on_one_device_completes(scenario: str, mark: str) -> None:
    need_traits(mark)
    found = run_program("hangs", scenario, mark, str(TRIES))
    assert found["hung"] == 0
    assert found["wrong"] == 0


@pytest.mark.parametrize("mark", CONTROLS)
@pytest.mark.parametrize("scenario", ["value", "ring_on_one"])
def test_a_gate_would_hang_it(scenario: str, mark: str) -> None:
    """The control: a plain mark is the caller's word that this is not so."""
    found = run_program("hangs", scenario, mark, "2")
    assert found["reused"] == found["hung"] == 2
    assert found["wrong"] == 0


@pytest.mark.parametrize("mark", MARKS + UNTIL_FREE + ["gate"])
def test_a_wait_between_the_mark_and_the_free_completes(mark: str) -> None:
    """An exact mark ends before it. One until the free must say that it may not be gated on."""
    need_traits(mark)
    found = run_program("hangs", "value_later", mark, str(TRIES))
    assert found["hung"] == 0
    assert found["wrong"] == 0


def test_a_gate_until_the_free_would_hang_it() -> None:
    """The control."""
    found = run_program("hangs", "value_later", "gate_until_free", "2")
    assert found["reused"] == found["hung"] == 2
    assert found["wrong"] == 0


@pytest.mark.two_gpus
@pytest.mark.parametrize("mark", MARKS + UNTIL_FREE)
def test_a_ring_of_flags_over_two_devices_completes(mark: str) -> None:
    need_traits(mark)
    found = run_program("hangs", "ring", mark, str(TRIES))
    assert found["hung"] == 0
    assert found["wrong"] == 0


@pytest.mark.two_gpus
@pytest.mark.parametrize("mark", CONTROLS)
def test_a_gate_would_hang_the_ring(mark: str) -> None:
    found = run_program("hangs", "ring", mark, "2")
    assert found["reused"] == found["hung"] == 2
    assert found["wrong"] == 0


@pytest.mark.two_gpus
@pytest.mark.parametrize("mark", MARKS + UNTIL_FREE)
def test_a_ring_over_nccl_completes(mark: str) -> None:
    need_traits(mark)
    found = run_program("nccl_ring", mark, "10")
    assert found["hung"] == 0
    assert found["wrong"] == 0
    assert found["reused"], "the memory asked for next is not the block just sent"
