"""The README's figures are those of the result files, and result files are complete."""

from __future__ import annotations

import importlib.util
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


def test_of_several_names_the_newest_row_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert found and found.loader
    readme = importlib.util.module_from_spec(found)
    found.loader.exec_module(readme)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    for newest in ("own", "asked"):
        runs = [
            {"id": name, "time": f"2026-0{1 + (name == newest)}-01"} for name in ("own", "asked")
        ]
        rows = [{"name": one["id"], "peer_name": "native", "run": one["id"]} for one in runs]
        (tmp_path / "jobs.json").write_text(json.dumps({"runs": runs, "rows": rows}))
        assert readme.find("jobs", ("own", "asked"), "native")["name"] == newest
        assert readme.find("jobs", "own", "native")["name"] == "own"
        assert readme.find("jobs", ("own", "asked"), "nobody") is None


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
