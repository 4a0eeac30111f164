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
    "inference",
    "checkpoint",
    "hooks",
)
#: Pending memory serves at once, whatever the default is.
GATE = {"ESPER_ALLOC_REUSE": "gate"}


@pytest.fixture(scope="module", params=["exact", "grad"])
def marked(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """How the tensors were marked, and what came of it for each holder."""
    return request.param, run_program("reach", request.param, str(TRIES), env=GATE)


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_backward_reads_must_be_marked_until_the_free(
    marked: tuple[str, dict[str, Any]], holder: str
) -> None:
    how, found = marked
    assert set(found) == set(HOLDERS)
    assert found[holder]["reused"] == TRIES  # in grad mode behind backward, for which it is gated
    # A count that missed a holder would mark exactly, and make every gradient wrong.
    assert found[holder]["wrong"] == (TRIES if how == "exact" else 0)


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


def test_statistics_count_exact_marks_and_those_until_the_free() -> None:
    code = """
import json
import torch, esper_alloc

esper_alloc.enable()
side, kept = torch.cuda.Stream(), []

def marked(held):
    before = esper_alloc.memory_stats()
    x = torch.empty(1 << 20, device="cuda")
    if held:
        kept.append(x)
    esper_alloc.record_use(x, side)
    after = esper_alloc.memory_stats()
    return [after[key] - before[key] for key in ("marks_exact", "marks_until_free")]

print(json.dumps([marked(held=False), marked(held=True)]))
"""
    assert json.loads(run_python(code).strip().splitlines()[-1]) == [[1, 0], [0, 1]]
