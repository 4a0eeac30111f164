"""Marks in grad mode on a GPU: exact where only the caller can reach the memory, and never where
somebody else might read it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helper import ROOT, run_python
from scenario import run_program

TRIES = 10
CASES = ROOT / "tests" / "uses" / "reach"
#: Of programs/reach.py.
HOLDERS = (
    "itself",
    "base",
    "other_view",
    "one_of_all_views",
    "one_of_all_views_with_the_base",
    "base_of_all_views",
    "detached",
    "context",
    "checkpoint",
    "hooks",
)
#: Pending memory serves at once, whatever the default is.
GATE = {"ESPER_ALLOC_REUSE": "gate"}


@pytest.mark.parametrize("how", HOLDERS)
def test_a_count_that_misses_a_holder_makes_gradients_wrong(how: str) -> None:
    found = run_program("reach", how, "exact", str(TRIES), env=GATE)
    assert found["tries"] == TRIES
    assert found["wrong"] == TRIES


@pytest.mark.parametrize("how", HOLDERS)
def test_what_backward_reads_is_marked_until_the_free(how: str) -> None:
    found = run_program("reach", how, "grad", str(TRIES), env=GATE)
    assert found["tries"] == TRIES
    assert found["wrong"] == 0
    assert found["reused"] == TRIES  # behind backward: the allocating stream waited


@pytest.mark.parametrize("program, kind", [("alone", "record_use"), ("reached", "until_free")])
def test_marks_are_exact_where_only_the_caller_can_reach(program: str, kind: str) -> None:
    path = Path(CASES, f"{program}.py")
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(CASES)!r})\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    found: dict[str, Any] = json.loads(run_python(code).strip().splitlines()[-1])
    assert found
    assert {name: answer for name, answer in found.items() if answer[0] != [kind]} == {}
