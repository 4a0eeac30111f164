"""The README's figures are those of the result files, and result files are complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_readme_shows_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "readme.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_each_row_names_its_run(path: Path) -> None:
    results = json.loads(path.read_text())
    runs = {run["id"]: run for run in results["runs"]}
    for run in runs.values():
        assert {"gpu", "driver", "torch", "commit", "time"} <= run.keys()
        assert run["commit"] not in ("", "HEAD")
    assert results["rows"]
    for row in results["rows"]:
        assert {"name", "unit", "ours", "peer", "peer_name", "ratio", "goal", "run"} <= row.keys()
        assert row["run"] in runs
        if row["peer"]:
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"], rel=1e-6)
