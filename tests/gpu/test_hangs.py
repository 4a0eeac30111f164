"""Programs whose work waits for what is not yet enqueued. The host may be held back by such work,
but not for long.

Each runs in a process of its own, with a limit. ESPER_REQUIRE_GPUS=2 makes a second GPU that is
missing a failure.
"""

from typing import Any

import pytest
from scenario import little_was_lost, run_program

TRIES = "20"
LONG = "60"  # seconds: a stream that was waited for in vain is left alone for most of them
MARKS = ["record_use", "record_use_until_free", "record_stream"]


def assert_all_ended(found: dict[str, Any]) -> None:
    assert found["hung"] == found["wrong"] == 0
    assert found["held_back_in_vain"], "the host was not held back: nothing was tested"


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("scenario", ["spin", "ring_on_one"])
def test_waits_on_one_device_complete(scenario: str, mark: str) -> None:
    found = run_program("hangs", scenario, mark, TRIES)
    assert_all_ended(found)


@pytest.mark.parametrize("scenario", ["spin", "ring_on_one"])
def test_little_time_is_lost_in_the_long_run(scenario: str) -> None:
    found = run_program("hangs", scenario, "record_use", TRIES, LONG)
    assert_all_ended(found)
    assert little_was_lost(found), found


@pytest.mark.two_gpus
@pytest.mark.parametrize("mark", MARKS)
def test_a_ring_of_flags_over_two_devices_completes(mark: str) -> None:
    found = run_program("hangs", "ring", mark, TRIES)
    assert_all_ended(found)
