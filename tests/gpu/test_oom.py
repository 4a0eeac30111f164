"""Out of memory: right type, native's wording, and life goes on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scenario import NATIVE, OURS, run_program

SIZE = r"\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB)"


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return run_program("oom", OURS)


@pytest.fixture(scope="module")
def native() -> dict[str, Any]:
    return run_program("oom", NATIVE)


def wording(message: str) -> str:
    """A message without its figures, and the advice at its end."""
    message = re.sub(r"Process \d+ has", "Process N has", message)
    message = re.sub(r"(reserved by PyTorch but unallocated\.).*", r"\1", message, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(SIZE, "SIZE", message)).strip()


def test_800000000_gib(ours: dict[str, Any]) -> None:
    error = ours["huge"]
    assert error["out_of_memory"], error
    assert "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of" in error["message"]
    assert ours["works_after_huge"]


@pytest.mark.parametrize("request_name", ["exabyte", "more_exabytes"])
def test_over_an_exabyte(ours: dict[str, Any], request_name: str) -> None:
    error = ours[request_name]
    assert error["out_of_memory"], error
    assert "Tried to allocate more than 1EB memory" in error["message"]
    assert ours["works_after_exabyte"]


def test_filling_the_card(ours: dict[str, Any]) -> None:
    error = ours["full"]
    assert error["out_of_memory"], error
    assert re.search(
        rf"CUDA out of memory\. Tried to allocate 1024\.00 MiB\. GPU 0 has a total capacity of {SIZE} "
        rf"of which {SIZE} is free\.",
        error["message"],
    ), error
    assert ours["pieces"] > 0
    assert ours["works_when_full"]
    assert ours["intact"]


def test_the_process_goes_on(ours: dict[str, Any]) -> None:
    assert ours["fitting_request"]
    assert ours["allocated_as_before"]
    assert ours.get("joined_request", True)
    assert ours["intact_after_joining"]
    assert ours["most_of_the_card"]
    assert ours["kept"]


def test_the_memory_fraction(ours: dict[str, Any]) -> None:
    error = ours["fraction"]
    assert error["out_of_memory"], error
    assert re.search(rf"{SIZE} allowed; ", error["message"]), error
    assert ours["works_after_fraction"]


@pytest.mark.parametrize("name", ["huge", "exabyte", "more_exabytes", "full", "fraction"])
def test_type_and_wording_are_natives(
    ours: dict[str, Any], native: dict[str, Any], name: str
) -> None:
    assert ours[name]["type"] == native[name]["type"]
    assert wording(ours[name]["message"]) == wording(native[name]["message"])


def test_counts_are_natives(ours: dict[str, Any], native: dict[str, Any]) -> None:
    assert ours["ooms_counted"] == native["ooms_counted"]
    # The card holds as much under either; a context may cost a little more or less.
    assert ours["pieces"] >= native["pieces"] - 1
