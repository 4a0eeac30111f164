"""Memory that sleeps and wakes on a GPU: what it gives back, graphs, training, and two processes
on one device."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scenario import run_program

MIB = 2**20


def test_the_device_has_the_context_left() -> None:
    found = run_program("sleep", "device_memory")
    assert found["sum"] == 8 * 256 * MIB
    assert found["given_back"] >= 2048 * MIB
    # What the driver needs for itself comes off: streams, and tables of pages.
    assert found["full"] - found["asleep"] >= (2048 - 64) * MIB
    assert found["asleep"] - found["context"] <= 64 * MIB


def test_graphs_replay_bit_for_bit_after_a_hundred_cycles() -> None:
    found = run_program("sleep", "graphs", env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert found["wrong"] == 0
    assert "wake() first" in found["refused"]


def test_training_that_sleeps_has_the_same_losses() -> None:
    found = run_program("sleep", "training", env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert len(set(found["plain"])) > 6
    assert found["sleeping"] == found["plain"]


@pytest.mark.two_gpus
def test_two_devices_sleep_and_are_peers_again() -> None:
    found = run_program("sleep", "two_devices")
    assert found["wrong"] == 0
    assert min(found["given_back"]) >= found["least"]


def test_tags_sleep_and_wake_in_two_threads() -> None:
    assert run_program("sleep", "two_threads")["wrong"] == 0


def test_two_processes_take_turns(tmp_path: Path) -> None:
    """Each has two thirds of what a third one leaves, while it is awake."""
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(run_program, "sleep", "turns", str(tmp_path), me, other)
            for me, other in (("a", "b"), ("b", "a"))
        ]
        for one in both:
            assert one.result() == {"wrong": 0, "out_of_memory": 0}
