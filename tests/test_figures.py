"""The figures that documents show are those of the result files, and result files are complete."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from processes import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/readme.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("readme")
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    return module


def test_documents_show_the_results(readme: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert readme.main() == 0, capsys.readouterr().out


def test_stale_figures_are_named(
    readme: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Somebody measured the pipeline again, and the README has not been written since."""
    for path in RESULTS:
        (tmp_path / path.name).write_text(path.read_text())
    shutil.copy(ROOT / "benchmarks" / "results" / readme.PICTURE, tmp_path)
    results = json.loads((tmp_path / "pipeline.json").read_text())
    for row in results["rows"]:
        if row["name"] == "peak active over base" and row["peer_name"] == "native, record_stream":
            before = rf"{row['ours']:,.0f} MiB .* {row['ours'] / row['peer']:.2f} \|$"
            after = rf"1,024 MiB .* {1024 / row['peer']:.2f} \|$"
            row.update(ours=1024.0, ours_by_layer=[1024.0] * 8, peer_by_layer=[9000.0] * 8)
    (tmp_path / "pipeline.json").write_text(json.dumps(results))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.main() == 1
    said = capsys.readouterr().out
    label = readme.FEW[0][3]
    row = rf"\| \[{re.escape(label)}\]\S+ \| "
    assert re.search(rf"^-{row}{before}", said, re.M)
    assert re.search(rf"^\+{row}{after}", said, re.M)
    assert "pipeline.svg: shows other figures than: 8 layers" in said
    assert "--- docs/results-streams.md" in said


def test_ratios_are_those_of_the_figures_beside_them() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| ([\d.,]+) \S+ \| [^|]+ \| ([\d.,]+) \S+ \| ([\d.]+) \|$",
        (ROOT / "README.md").read_text(), re.M,
    )  # fmt: skip
    assert len(rows) == 8
    for ours, peer, ratio in rows:
        exact = float(ours.replace(",", "")) / float(peer.replace(",", ""))
        assert float(ratio) == pytest.approx(exact, abs=0.006 if exact < 10 else 0.06)


def test_a_ratio_to_nothing_is_not_shown(readme: ModuleType) -> None:
    """As where neither side had a run that failed."""
    assert readme.ratio({"ours": 0.0, "peer": 0.0}) == ""
    assert readme.ratio({"ours": 0.0, "peer": 1.0}) == "0.00"


def test_what_the_readme_shows_may_not_be_missing(
    readme: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"pipeline.json has no row .* measure it"):
        readme.main()


def test_the_picture_is_the_same_for_the_same_figures(readme: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "again.svg"):
        readme.draw(readme.layers(), tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert readme.caption(readme.layers()) in drawn


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


def test_the_mean_of_the_rounds_is_shown_where_the_goal_is_about_it(readme: ModuleType) -> None:
    row = {"ours": 2.0, "peer": 4.0, "goal": 1.0, "judged": "no_more", "unit": "ms", "met": False}
    rounds = {"mean_ratio": 0.998, "interval": [0.96, 1.036]}
    assert readme.verdict({**row, **rounds}) == " (0.998, 0.960 to 1.036; missed)"
    assert readme.verdict({**row, **rounds, "judged": "ratio"}) == " (0.50; missed: at most 1)"
    assert readme.verdict({**row, **rounds, "met": True}) == " (0.998, 0.960 to 1.036)"
    assert readme.verdict({**row, "peer": 0.0, "met": True}) == ""


def test_a_table_shows_what_was_measured(
    readme: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure of another run stands with ours; a row that was never measured is left out."""
    from shown import Column, Row, Table

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    about = {"gpu": "a GPU", "driver": "1", "torch": "2"}
    runs = [{"id": one, "time": one, "commit": f"c{one}", **about} for one in ("1", "2")]
    rows = [
        {
            "name": name, "peer_name": peer, "unit": "ms", "ours": ours, "peer": 4.0,
            "ratio": ours / 4.0, "goal": None, "run": run,
        }
        for name, peer, ours, run in (
            ("job: step", "one", 2.0, "1"), ("job: step", "other", 3.0, "2"),
            ("job: size", "one", 8.0, "1"),
        )
    ]  # fmt: skip
    (tmp_path / "jobs.json").write_text(json.dumps({"runs": runs, "rows": rows}))
    columns = (Column("one", ("one",)), Column("other", ("other",)))
    shown = (
        Row("jobs", "job: step", "a job", also=("job: size",)),
        Row("jobs", "none: step", "none"),
    )
    lines, found = readme.table(Table("jobs", "Jobs", "Steps.", shown, columns))
    assert lines[-2] == ("| a job | 2 ms; 8 ms | 4 (0.50); 4 (2.00) | 3 / 4 (0.75) | c1, c2 |")
    assert lines[2] == "`jobs.py`. Steps." and len(lines) == 8
    assert {topic for topic, _ in found} == {"jobs"}
