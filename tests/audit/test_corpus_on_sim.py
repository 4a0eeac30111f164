"""The programs of corpus/ under the auditor, on the simulated device: each bug is found at its line,
and nothing else is. (tests/gpu/test_audit_gpu.py runs all of them on a GPU.)"""

import importlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from on_sim import build
from processes import output_of

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "audit"))

import programs  # noqa: E402


@cache
def results(library: Path, allocator: str) -> Any:
    env = {**os.environ, **build.environment(library), "ESPER_SIMULATED_ALLOCATOR": allocator}
    said = json.loads(output_of(TESTS / "audit" / "programs.py", env=env).splitlines()[-1])
    return {name: found for name, (_, found) in said.items()}


@pytest.mark.parametrize(
    "allocator", ["esper_alloc", pytest.param("native", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", programs.names(on_gpu=False))
def test_a_bug_is_found_where_it_is(library: Path, name: str, allocator: str) -> None:
    assert bool(programs.expected(name)) == name.endswith("_wrong")
    assert results(library, allocator)[name] == programs.expected(name, allocator)


@pytest.mark.slow
def test_the_benchmark_reads_what_is_printed(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(TESTS.parent / "benchmarks"))
    audits, topics, common = map(importlib.import_module, ("audits", "topics", "common"))
    environment = {**build.environment(library), "ESPER_SIMULATED_ALLOCATOR": "native"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = audits.corpus("freed/view_right", "freed/view_wrong")
    results = common.Results("auditor", tmp_path / "auditor.json")
    results.run = {"id": "now"}
    silent = {name: [said, []] for name, (said, _) in found.items()}
    rounds = [{"corpus": {"audit": found, "sanitizer": silent}}]
    for row in topics.corpus_rows(rounds, common.Options()):
        results.add(row, rounds)
    assert {row["name"]: (row["ours"], row["peer"]) for row in results.rows} == {
        "bugs missed, of 1": (0, 1),
        "correct programs reported, of 1": (0, 0),
    }


def test_half_of_the_programs_have_a_bug() -> None:
    names = programs.names(on_gpu=True)
    wrong = [name for name in names if name.endswith("_wrong")]
    assert len(names) >= 40 and 2 * len(wrong) <= len(names)
    kinds = {programs.expected(name)[0][0] for name in wrong}
    assert kinds == {"freed-in-use", "marked-early", "read-early", "write-early", "stale-output"}
