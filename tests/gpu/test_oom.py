"""The card is full: native's wording, and life goes on. Other shortages: conformance/shortage.py."""

import re
from typing import Any

import pytest
from scenario import NATIVE, OURS, run_program

SIZE = r"\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB)"


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return run_program("oom", OURS)


def wording(message: str) -> str:
    """A message without its figures, and the advice at its end."""
    message = re.sub(r"Process \d+ has", "Process N has", message)
    message = re.sub(r"(reserved by PyTorch but unallocated\.).*", r"\1", message, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(SIZE, "SIZE", message)).strip()


def test_filling_the_card(ours: dict[str, Any]) -> None:
    native = run_program("oom", NATIVE)
    assert wording(ours["full"]) == wording(native["full"])
    assert "Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of " in ours["full"]
    # It holds as much under either; a context may cost a little more or less.
    assert ours["pieces"] >= native["pieces"] - 1 >= 0
    assert ours["works_when_full"]
    assert ours["intact"]


def test_the_process_goes_on(ours: dict[str, Any]) -> None:
    assert ours["fitting_request"]
    assert ours["allocated_as_before"]
    assert ours.get("joined_request", True)
    assert ours["intact_after_joining"]
    assert ours["most_of_the_card"]
    assert ours["kept"]
