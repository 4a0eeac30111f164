"""The gather iterator on the GPU, under both allocators: what programs/gather.py checks."""

from __future__ import annotations

import re

import pytest
from scenario import NATIVE, OURS, PROGRAMS, run_program

CHECKS = re.findall(r"^@check\ndef (\w+)", (PROGRAMS / "gather.py").read_text(), re.M)


@pytest.fixture(scope="module", params=[OURS, NATIVE])
def outcome(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each check found: all of them run in one process, once for each allocator."""
    return run_program("gather", request.param, timeout=240)


@pytest.mark.parametrize("name", CHECKS)
def test_gather(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == ""
