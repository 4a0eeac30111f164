"""The auditor on a GPU: every bug of tests/audit/corpus at its line and nothing else.
Correct programs: test_audit_clean.py. (The benchmark `auditor` says what an audit costs, and
what torch.cuda._sanitizer finds of these bugs.)"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helper import run_python
from scenario import NATIVE, OURS, once

AUDIT = Path(__file__).resolve().parents[1] / "audit"
sys.path.insert(0, str(AUDIT))

import programs  # noqa: E402

NAMES = programs.names(on_gpu=True)


@once
def results(allocator: str) -> dict[str, Any]:
    env = {"ESPER_ALLOC": "1"} if allocator == OURS else {}
    code = (
        "import runpy, sys, esper_alloc\n"
        "sys.argv = ['programs.py']\n"
        f"runpy.run_path({str(AUDIT / 'programs.py')!r}, run_name='__main__')\n"
    )
    said = json.loads(run_python(code, env=env).strip().splitlines()[-1])
    return {name: found for name, (_, found) in said.items()}


@pytest.mark.parametrize("allocator", [OURS, NATIVE])
@pytest.mark.parametrize("name", NAMES)
def test_a_bug_is_found_where_it_is(name: str, allocator: str) -> None:
    assert results(allocator)[name] == programs.expected(name, allocator)
