"""The benchmarks as far as they need no GPU: their definitions, the runner, verdicts and files."""

import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import ROOT, python

BENCHMARKS = ROOT / "benchmarks"
MODULES = tuple(path.stem for path in BENCHMARKS.glob("*.py"))
ABOUT = {"gpu": "a GPU", "driver": "1", "torch": "2"}
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch):
    """The modules import each other by their bare names, as when run.py is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in (*MODULES, "workers"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def load(name: str) -> Any:
    return importlib.import_module(name)


def results(tmp_path: Path) -> Any:
    made = load("common").Results("topic", tmp_path / "topic.json")
    made.describe(ABOUT)
    return made


def part_of(topic: str, name: str) -> Any:
    return next(part for part in load("topics").TOPICS[topic].parts if part.name == name)


def rows(
    topic: str, name: str, rounds: list[Any], segments: str | None = None, **settings: Any
) -> dict[Any, Any]:
    """The rows that a part makes of these rounds, by name and peer."""
    common, part = load("common"), part_of(topic, name)
    made = common.Results("topic")
    made.run = {"id": "now"}
    rounds = part.derive(rounds)
    settings = {**load("topics").TOPICS[topic].settings, **settings}
    options = common.Options(False, segments, settings)
    for row in part.rows(rounds, options) if callable(part.rows) else part.rows:
        made.add(row, rounds)
    return {(row["name"], row["peer_name"]): row for row in made.rows}


# --- the definitions -----------------------------------------------------------


class Figures(dict[str, Any]):
    """Has every figure."""

    def __missing__(self, key: str) -> float:
        return 1.0

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, 1.0)


def figures_of(part: Any, recorded: list[dict[str, Any]]) -> Any:
    """What a case of a part may report, as far as other figures than one are needed."""
    names = [row["name"] for row in recorded]
    found = {str(number): [[["bug", 1]] * (number < 30), []] for number in range(30 + 36)}
    job = {key: 1.0 for key in (
        "step_ms", "peak_allocated_mib", "peak_reserved_mib", "tokens_s",
    )}  # fmt: skip
    times = [f"{when}_{of}_us" for when in ("whole", "warm") for of in ("slow", "median", "sum")]
    jobs = {name.partition(": ")[0] for name in names}
    engine = {"losses": [1.0], "by_rank": {}, "steps": 9, "held_back_s": 1.0,
              "held_back_least_s": 1.0}  # fmt: skip
    return {
        "jobs.measure": {**job, "outputs": ["a"], "machine": ABOUT},
        "stacks.measure": {**job, "outputs": ["a"], "failed": 0, "findings": 0, "machine": ABOUT},
        "engines.measure": {
            f"{name} {key}": value
            for name in load("topics").ENGINE_NAMES
            for key, value in {**job, **engine}.items()
        },
        "audits.programs": {"audit": found, "sanitizer": found},
        "calls.malloc_times": {f"{job}: {time}": 1.0 for job in jobs | {"job"} for time in times},
    }.get(part.measure, Figures(by_layer=[1.0]))


#: Rows whose question is answered, and which nothing measures any more: docs/benchmarks.md says
#: which commit did. Some of earlier names are replaced when their topic is measured again.
ANSWERED = {
    "auditor": ("host memory after 1,000,000 operators",),
    "churn": ("^reserved / live, ",),
    "cifar_envs": ("16 environments on two GPUs",),
    "jobs": ("replayed peak reserved", "changes of reserved memory"),
    "pair": (r"allocate\(\) and drop",),
    "pipeline": ("simulated device",),
}  # fmt: skip


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda one: one.stem
)
def test_every_recorded_row_can_be_measured_again(path: Path) -> None:
    """Or the topic is one whose script is gone. Rows that documents show have their peers."""
    common, topics, shown = load("common"), load("topics").TOPICS, load("shown")
    if path.stem not in topics:
        assert path.stem in (ROOT / "docs" / "benchmarks.md").read_text()
        assert not any(row.topic == path.stem for table in shown.TABLES for row in table.rows)
        return
    recorded, _ = common.read(path)
    names, pairs = set(), set()
    for part in topics[path.stem].parts:
        rounds = [{case.name: figures_of(part, recorded) for case in part.cases}] * 3
        for segments, ranks in ((None, 1), (None, 2), ("classic", 2), ("mapped", 4)):
            found = rows(path.stem, part.name, rounds, segments, ranks=ranks)
            names |= {name for name, _ in found}
            pairs |= found.keys()
    answered = ANSWERED.get(path.stem, ())
    gone = [row["name"] for row in recorded if row["name"] not in names]
    assert [name for name in gone if not any(re.search(one, name) for one in answered)] == []
    wanted = [(row.name, row.peer) for table in shown.TABLES for row in table.rows
              if row.topic == path.stem and row.peer]  # fmt: skip
    wanted += [(one, peer) for topic, one, peer, *_ in shown.FEW if topic == path.stem]
    assert [one for one in wanted if one not in pairs] == []


def test_planted_jobs_are_counted_and_compared_with_their_prediction() -> None:
    fine = {"missed": 0, "failed": 0, "peak_mib": 99.0, "predicted_mib": 100.0, "off_percent": 1.01,
            "explain_s": 0.5}  # fmt: skip
    jobs = load("planted").JOBS
    assert tuple(jobs) == load("topics").PLANTED
    found = rows(
        "explain", "planted", [{**dict.fromkeys(jobs, fine), "leak": {"missed": 1, "failed": 1}}]
    )
    assert found["jobs of which another cause is named first", "jobs"]["ours"] == 1
    assert found["jobs that do not run with the advice", "jobs"]["met"] is False
    assert found["cache: peak reserved with the advice", "predicted by explain"]["ratio"] == 0.99
    assert found["cache: distance of the peak from the prediction", "goal"]["met"] is False
    assert ("leak: distance of the peak from the prediction", "goal") not in found


def test_parts_have_functions_that_take_what_they_are_told() -> None:
    inspect, topics = importlib.import_module("inspect"), load("topics")
    for name, topic in topics.TOPICS.items():
        assert len({part.name for part in topic.parts}) == len(topic.parts)
        for part in topic.parts:
            module, _, function = part.measure.partition(".")
            known = inspect.signature(getattr(load(module), function)).parameters
            told = {"limit"} if part.conduct else set()
            settings = topic.settings.keys() & known.keys()
            for case in part.cases:
                given = {"allocator", *case.how, *settings}
                assert given <= known.keys(), (name, part.name)
                needed = {key for key, one in known.items() if one.default is one.empty}
                assert needed <= given | told, (name, part.name)
            assert topic.settings.keys() <= known.keys()


def test_cases_differ_in_what_the_worker_is_told() -> None:
    command = load("run").Command("pipeline", load("common").Options(segments="mapped"), None, None)
    part = command.topic.parts[0]
    asked = {}
    for case in part.cases:
        [_, _, flag, told], variables = command.command_of(part, case)
        assert flag == "--worker" and json.loads(told)["measure"] == "streams.pipeline"
        asked[case.name] = (json.loads(told)["how"], variables.get("ESPER_ALLOC_ALLOWANCE"),
                            variables.get("ESPER_ALLOC_SEGMENTS"))  # fmt: skip
    marked = {"marks": "record_use", "layers": "small"}
    assert asked["esper_alloc, record_use"] == (marked, None, "mapped")
    assert asked["esper_alloc, record_use, allowance 64MiB"] == (marked, "64MiB", "mapped")
    assert asked["native, record_stream"] == ({**marked, "marks": "record_stream"}, None, None)


# --- the runner ------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(BENCHMARKS / "run.py", *arguments, env={"PATH": "/usr/bin:/bin"})


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return int(load("run").main())


def measured_by(monkeypatch: pytest.MonkeyPatch, measure: Any) -> Any:
    """The runner with a GPU, and this in place of workers that take turns."""
    run = load("run")
    monkeypatch.setattr(run.workers, "gpu_missing", lambda: None)
    monkeypatch.setattr(run.Command, "measure", measure)
    return run


def test_ranks_that_share_a_gpu_need_a_file_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESPER_ONE_GPU", "1")
    with pytest.raises(SystemExit):
        main(monkeypatch, "engines")
    assert "ranks that share a GPU give no times to keep: name --out" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--small", "--segments=classic", "--set=gib=1.5"])
def test_rows_of_other_settings_need_a_file_of_their_own(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(monkeypatch, "sleep", other)
    assert "need a file of their own: name --out" in capsys.readouterr().err
    out = tmp_path / "sleep.json"

    def measure(self: Any, part: Any, cases: Any, *_: Any) -> Any:
        return [{case.name: Figures(machine=ABOUT) for case in cases}]

    measured_by(monkeypatch, measure)
    main(monkeypatch, "sleep", "--part", "bandwidth", other, "--out", str(out))
    [told] = json.loads(out.read_text())["runs"]
    name, _, value = other.removeprefix("--set=").lstrip("-").partition("=")
    assert str(told["settings"][name]) == (value or "True")


def test_a_case_that_gives_nothing_is_named_and_one_left_out_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, missing = tmp_path / "pair.json", ["cudaMallocAsync"]

    def measure(self: Any, part: Any, cases: Any, *_: Any) -> Any:
        figures = {row.key: 1.0 for row in part.rows}
        names = [case.name for case in cases if case.name not in missing]
        return [{name: {"machine": ABOUT, **figures} for name in names}]

    run = measured_by(monkeypatch, measure)
    monkeypatch.setattr(load("loops"), "load", lambda: None)
    assert main(monkeypatch, "pair", "--case=esper_alloc", "--case=native", "--out", str(out)) == 1
    capsys.readouterr()
    assert [row["peer_name"] for row in json.loads(out.read_text())["rows"]] == ["native"] * 4
    assert main(monkeypatch, "pair", "--out", str(out)) == 1
    said = capsys.readouterr().out
    assert said.count("no row") == said.count("esper_alloc and cudaMallocAsync gave no value") == 4
    assert "pair: cudaMallocAsync did not go through" in said
    missing += ["esper_alloc"]
    assert main(monkeypatch, "pair", "--out", str(tmp_path / "none.json")) == 1
    assert "nothing was measured under esper_alloc" in capsys.readouterr().out
    missing.clear()
    spared = ("--case=native, record_stream", "--case=esper_alloc, automatic uses")
    main(monkeypatch, "overlap", "--part=small", *spared, "--out", str(tmp_path / "two.json"))
    assert "automatic uses: step time: 1 ms, native, record_stream 1" in capsys.readouterr().out
    out = tmp_path / "sleep.json"
    monkeypatch.setattr(run, "installed", lambda package: False)
    assert main(monkeypatch, "sleep", "--part", "bandwidth", "--out", str(out)) == 1
    why = "the package torch_memory_saver is not installed"
    assert f"torch_memory_saver: not measured, {why}" in capsys.readouterr().out
    [run_of] = json.loads(out.read_text())["runs"]
    cases = ("torch_memory_saver", "torch_memory_saver, by default")
    assert run_of["left_out"] == dict.fromkeys(cases, why)
    assert main(monkeypatch, "colocated", "--part", "step", "--out", str(out)) == 1
    assert "step: left out, the package vllm" in capsys.readouterr().out


@pytest.mark.parametrize("fallen, code", [(None, 0), ("native", 1), ("esper_alloc", 1)])
def test_a_case_that_falls_out_is_named(
    fallen: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Any, part: Any, cases: Any, *_: Any) -> Any:
        def figures(case: Any) -> dict[str, Any]:
            value = 0.1 if case.name == "esper_alloc" else 1.0
            return {"machine": ABOUT, **{row.key: value for row in part.rows}}

        whole = {case.name: figures(case) for case in cases}
        return [whole] + 2 * [{name: each for name, each in whole.items() if name != fallen}]

    measured_by(monkeypatch, measure)
    monkeypatch.setattr(load("loops"), "load", lambda: None)
    assert main(monkeypatch, "pair", "--out", str(tmp_path / "pair.json")) == code


#: In place of run.py --worker: fails, or reports where it is told to.
FRESH = """
import json, os, sys
sys.path.insert(0, os.environ["BENCHMARKS"])
from common import workers
how = json.loads(sys.argv[2])["how"]
if how.get("fails"):
    sys.exit("it went wrong")
workers.report({"pid": os.getpid(), "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")})
"""


def test_fresh_processes_alternate_and_who_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common, run = load("common"), load("run")
    monkeypatch.setenv("BENCHMARKS", str(BENCHMARKS))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "of somebody else")
    script = tmp_path / "worker.py"
    script.write_text(FRESH)
    monkeypatch.setattr(run, "__file__", str(script))
    cases = [
        common.Case("fails", "native", {"fails": 1}),
        *map(common.Case, *[("native", "native, expandable")] * 2),
    ]
    cases.append(common.Case("once", "native", once=True))
    part = common.Part("part", "none.none", cases, [], common.FRESH)
    command = run.Command("pair", common.Options(), None, None)
    told: list[int] = []
    found = command.measure(part, cases, 4, each=lambda rounds: told.append(sum(map(len, rounds))))
    both = ["native", "native, expandable"]
    assert [list(one) for one in found] == [[*both, "once"], both[::-1], both, both[::-1]]
    assert told == list(range(1, 10))
    assert len({figures["pid"] for one in found for figures in one.values()}) == 9
    assert {one["native"]["conf"] for one in found} == {None}
    assert {one["native, expandable"]["conf"] for one in found} == {"expandable_segments:True"}
    said = capsys.readouterr().out
    assert said.count("fails: exit status 1") == 1 and "it went wrong" in said
    assert len(command.measure(part, cases, 4, seconds=0.0)) == 1
    assert "stopped after 1 of 4 rounds" in capsys.readouterr().out
    found = command.measure(replace(part, may_fail=True), cases, 2)
    assert [one["fails"]["failed"] for one in found] == [1, 1]
    assert found[0]["fails"]["why"] == "exit status 1: it went wrong"


# --- statistics and verdicts ---------------------------------------------------


def row(**more: Any) -> dict[str, Any]:
    return {"ours": 1.0, "peer": 1.0, "ratio": 1.0, "goal": 1.0, **more}


@pytest.mark.parametrize(
    ("given", "met"),
    [
        (row(goal=None), None),
        (row(ratio=1.02, goal=1.05), True),
        (row(ratio=1.06, goal=1.05), False),
        (row(ratio=30.0, goal=30.0, judged="at_least"), True),
        (row(ratio=29.9, goal=30.0, judged="at_least"), False),
        (row(ratio=None, judged="at_least"), False),
        (row(judged="no_worse"), False),  # one round shows nothing
        (row(judged="no_worse", interval=[0.98, 1.04]), True),
        (row(judged="no_worse", interval=[1.001, 1.04]), False),
        (row(judged="no_worse", interval=[0.8, 1.2]), False),  # too wide to tell
        (row(judged="no_more", mean_ratio=0.9), False),
        (row(judged="no_more", mean_ratio=1.0, interval=[0.99, 1.02]), True),
        (row(judged="no_more", mean_ratio=1.001, interval=[0.99, 1.012]), False),
        (row(judged="no_more", mean_ratio=0.98, interval=[0.93, 1.03]), False),
        (row(ours=1030.0, peer=1001.0, goal=30.0, judged="difference"), True),
        (row(ours=1032.0, peer=1001.0, goal=30.0, judged="difference"), False),
        (row(ours=0, peer=0, ratio=None, goal=0.0, judged="ours"), True),
        (row(ours=1, peer=0, ratio=None, goal=0.0, judged="ours"), False),
    ],
)
def test_verdicts(given: dict[str, Any], met: bool | None) -> None:
    assert load("common").verdict(given) is met


def test_the_interval_is_students() -> None:
    low, high = load("common").interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


def test_cases_are_compared_round_by_round_and_values_as_they_are(tmp_path: Path) -> None:
    made, row = results(tmp_path), load("common").Row
    rounds = [{"a": {"x": 1.0, "y": 4.0}, "b": {"x": 2.0}}, {"a": {"x": 3.0}}, {"b": {"x": 9.0}},
              {"a": {"x": 5.0}, "b": {"x": 2.0}}]  # fmt: skip
    made.add(row("paired", "", "x", "a", "b", more={"extra": 7}), rounds)
    made.add(row("two figures", "", "x", "a", "a", peer_key="y", peer_name="y"), rounds)
    made.add(row("a constant", "", "x", "a", 0.0, 4.0, "ours", peer_name="nothing"), rounds)
    made.add(row("lists", "", "", [1, 2, 6], [4], peer_name="others"), rounds)
    paired, figures, constant, lists = made.rows
    assert (paired["ours"], paired["peer"], paired["rounds"], paired["extra"]) == (3.0, 2.0, 2, 7)
    assert paired["mean_ratio"] == 1.5 and paired["ours_range"] == [1.0, 5.0]
    assert (figures["ours"], figures["peer"], figures["peer_name"]) == (1.0, 4.0, "y")
    assert [constant[key] for key in ("ours", "rounds", "ratio", "met")] == [3.0, 3, None, True]
    assert (lists["ours"], lists["peer"]) == (2, 4) and "mean_ratio" not in lists
    assert made.complete
    made.add(row("missing", "", "none", "a", "b"), rounds)
    assert made.complete and len(made.rows) == 4
    made.add(row("missing, and judged", "", "none", "a", "b", 1.0), rounds)
    assert not made.complete and len(made.rows) == 4


# --- result files --------------------------------------------------------------


def add(made: Any, name: str, ours: float) -> None:
    made.add(load("common").Row(name, "ms", "", ours, 2.0, peer_name="native"), [])


def test_a_later_run_replaces_its_rows_alone(tmp_path: Path) -> None:
    first = results(tmp_path)
    add(first, "a", 1.0)
    add(first, "b", 1.0)
    first.save()
    second = results(tmp_path)
    second.run["id"] = "second"
    add(second, "b", 3.0)
    second.save()
    found = json.loads((tmp_path / "topic.json").read_text())
    assert {one["name"]: (one["ours"], one["run"]) for one in found["rows"]} == {
        "a": (1.0, first.run["id"]),
        "b": (3.0, "second"),
    }
    assert len(found["runs"]) == 2


def result_file(path: Path, run: str, *names: str, **more: Any) -> Path:
    runs = [{"id": run, "commit": "abc", "time": run, **ABOUT, **more}]
    rows = [{"name": name, "peer_name": "native", "ours": 1, "run": run} for name in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": runs, "rows": rows}))
    return path


def test_results_of_another_machine_are_taken(tmp_path: Path) -> None:
    into, made = tmp_path / "results", tmp_path / "made"
    result_file(into / "pair.json", "1", "a", "b")
    result_file(made / "lane-0" / "pair.json", "3", "b")
    result_file(made / "lane-1" / "pair.json", "2", "b", "c")  # measured before the other
    result_file(made / "churn.json", "2", "d")
    (made / "summary.json").write_text("{}")
    (made / "broken.json").write_text("{")
    assert load("take").take([made], into) == ["churn", "pair"]
    assert sorted(path.name for path in into.iterdir()) == ["churn.json", "pair.json"]
    found = json.loads((into / "pair.json").read_text())
    assert {row["name"]: row["run"] for row in found["rows"]} == {"a": "1", "b": "3", "c": "2"}
    assert {run["id"] for run in found["runs"]} == {"1", "2", "3"}
    result_file(made / "lane-0" / "pair.json", "4", "a", "b", "c")
    load("take").take([made / "lane-0"], into)
    assert [run["id"] for run in json.loads((into / "pair.json").read_text())["runs"]] == ["4"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"commit": "abc+changes"}, r"measured at abc\+changes, which nobody else has"),
        ({"commit": "unknown"}, "measured at unknown"),
        ({"settings": {"small": True}}, "measured with --small"),
        (None, "no result file: .*gone.json"),
    ],
)
def test_what_nobody_can_repeat_is_not_taken(
    tmp_path: Path, more: dict[str, str] | None, why: str
) -> None:
    into, good = tmp_path / "results", result_file(tmp_path / "made" / "pair.json", "1", "a")
    other = tmp_path / "gone.json"
    if more is not None:
        other = result_file(tmp_path / "other" / "churn.json", "2", "b", **more)
    with pytest.raises(SystemExit, match=why):
        load("take").take([good, other], into)
    other = result_file(tmp_path / "churn2.json", "2", "b")
    with pytest.raises(SystemExit, match=r"no topic 'churn2'; name it TOPIC\.json"):
        load("take").take([good, other], into)
    assert not into.exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="nothing was found"):
        load("take").take([tmp_path / "empty"], into)


# --- jobs ----------------------------------------------------------------------


def rows_of(made: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["peer_name"]): row for row in made.rows}


def worker(allocated: float, reserved: float, step: float, outputs: str = "abc") -> dict[str, Any]:
    return {
        "peak_allocated_mib": allocated, "peak_reserved_mib": reserved, "step_ms": step,
        "first_step_ms": 2 * step, "outputs": list(outputs),
    }  # fmt: skip


def add_job(
    made: Any, job: str, rounds: Any, by_place: bool = False, segments: str | None = None
) -> None:
    jobs, options = load("jobs_rows"), load("common").Options(segments=segments)
    best = jobs.with_best(rounds)
    for row in jobs.job_rows(job, by_place, best, options):
        made.add(row, best)


def job_rounds() -> list[dict[str, dict[str, Any]]]:
    """Two, in which the step times differ, and in the second what cudaMallocAsync computes."""
    return [
        {
            "esper_alloc": worker(2000, 2030, ours),
            "native": worker(2000, 3000, native),
            "native, expandable": worker(1990, 2100, expandable),
            "cudaMallocAsync": worker(1995, 2500, 12.0, outputs),
        }
        for ours, native, expandable, outputs in (
            (10.0, 11.0, 10.2, "abc"), (10.1, 10.1, 10.0, "abd"),
        )
    ]  # fmt: skip


def test_rows_of_a_job(tmp_path: Path) -> None:
    jobs, made = load("jobs_rows"), results(tmp_path)
    add_job(made, "gpt2", job_rounds())
    rows = rows_of(made)
    peak = rows["gpt2: peak reserved", jobs.LEAST]
    assert (peak["ours"], peak["peer"], peak["goal"]) == (2030, 1990, 1 + 256 / 1990)
    assert peak["met"] and peak["peer_is"] == "native, expandable"
    step = rows["gpt2: step time", jobs.FASTEST]
    assert step["peer_is"] == "native, expandable" and step["goal"] == 1.0
    assert step["judged"] == "no_more" and step["met"] is False  # two rounds show too little
    assert step["mean_ratio"] == pytest.approx((10.0 / 10.2 + 10.1 / 10.0) / 2)
    assert step["interval"][0] < step["mean_ratio"] < step["interval"][1]
    outputs = rows["gpt2: outputs that differ from native's", "the other peers"]
    assert (outputs["ours"], outputs["met"], outputs["peer_range"]) == (0, True, [0, 1])
    assert ("gpt2: peak reserved", "cudaMallocAsync") in rows
    assert made.complete


def test_where_peers_do_not_agree_nothing_is_asked_of_ours(tmp_path: Path) -> None:
    """Only of jobs that may depend on where tensors lie. One of the peers differs once."""

    def judged(rounds: list[dict[str, dict[str, Any]]], by_place: bool) -> tuple[Any, Any]:
        made = results(tmp_path)
        add_job(made, "job", rounds, by_place)
        [row] = [row for row in made.rows if "outputs that differ" in row["name"]]
        return row["goal"], row["met"]

    assert judged(job_rounds(), False) == (0.0, True)
    assert judged(job_rounds(), True) == (None, None)
    assert judged(job_rounds()[:1], True) == (0.0, True)  # they agree in the first pass
    without = [{key: one[key] for key in ("esper_alloc", "native")} for one in job_rounds()]
    assert judged(without, True) == (None, None)  # nobody says whether they would
    differing = job_rounds()[:1]
    differing[0]["esper_alloc"]["outputs"] = list("abx")
    assert judged(differing, True) == judged(differing, False) == (0.0, False)


@pytest.mark.parametrize(
    ("live", "reserved", "met"),
    [(10000, 10400, True), (10000, 10401, False), (1000, 1256, True), (1000, 1257, False)],
)
def test_a_job_may_reserve_a_share_or_an_amount_more(
    tmp_path: Path, live: float, reserved: float, met: bool
) -> None:
    jobs, made = load("jobs_rows"), results(tmp_path)
    one = {"esper_alloc": worker(live, reserved, 1.0), "native": worker(live, 2 * live, 1.0)}
    add_job(made, "job", [one])
    assert rows_of(made)["job: peak reserved", jobs.LEAST]["met"] is met


def test_native_run_again_is_nobodys_peer(tmp_path: Path) -> None:
    jobs, made = load("jobs_rows"), results(tmp_path)
    one = {"esper_alloc": worker(60, 62, 1.0), "native": worker(60, 70, 2.0)}
    one[jobs.AGAIN] = {**worker(50, 70, 1.5), "outputs": ["another"]}
    add_job(made, "job", [one])
    rows = rows_of(made)
    assert rows["job: peak reserved", jobs.LEAST]["peer"] == 60
    assert rows["job: step time", jobs.FASTEST]["peer"] == 2.0
    [row] = [row for (name, _), row in rows.items() if name.endswith(jobs.AGAIN)]
    spread = rows[
        "job: step time over the whole job, within native's own spread", "native's slower run"
    ]
    assert (spread["ours"], spread["peer"], spread["met"]) == (1.5, 3.0, True)
    assert (row["ours"], row["peer"], row["peer_name"], row["goal"]) == (1.5, 2.0, "native", None)


def test_the_whole_job_has_the_first_pass(tmp_path: Path) -> None:
    jobs, made = load("jobs_rows"), results(tmp_path)
    rounds = [
        {"esper_alloc": worker(60, 62, ours), "native": worker(60, 70, 2.0)} for ours in (1.0, 2.0)
    ]
    rounds[0]["esper_alloc"]["first_step_ms"] = 9.0
    rounds[0]["native"]["first_step_ms"] = 3.0
    add_job(made, "job", rounds)
    row = rows_of(made)["job: step time over the whole job", jobs.FASTEST]
    assert (row["ours"], row["peer"]) == (4.0, pytest.approx(7 / 3)) and row["met"] is False
    del rounds[1]["esper_alloc"]
    cut = results(tmp_path)
    add_job(cut, "job", rounds)
    assert not any("whole job" in row["name"] for row in cut.rows)


def test_the_first_pass_is_not_timed_and_peaks_are_of_all_passes() -> None:
    jobs = load("jobs_rows")

    def passed(step: float, peak: float, **more: Any) -> dict[str, Any]:
        return {
            "step_ms": step, "outputs": [str(step)],
            "peak_allocated_mib": peak, "peak_reserved_mib": peak + 1, **more,
        }  # fmt: skip

    once = {"machine": {"gpu": "a"}}
    measured = [
        {"native": passed(9.0, 10, **once), "esper_alloc": passed(8.0, 10, **once)},
        {"native": passed(3.0, 10), "esper_alloc": passed(2.0, 11)},
        {"native": passed(4.0, 12), "esper_alloc": passed(2.5, 11)},
        {"native": passed(5.0, 13)},  # ours failed
    ]
    rounds = jobs.passes(measured)
    assert [one["native"]["step_ms"] for one in rounds] == [3.0, 4.0, 5.0]
    assert [one["native"]["peak_reserved_mib"] for one in rounds] == [14, 14, 14]
    assert [one.get("esper_alloc", {}).get("step_ms") for one in rounds] == [2.0, 2.5, None]
    assert rounds[0]["esper_alloc"].items() >= {"first_step_ms": 8.0, **once}.items()
    assert "first_step_ms" not in rounds[1]["native"] and "machine" not in rounds[1]["native"]
    assert rounds[1]["native"]["outputs"] == ["4.0"]


@pytest.mark.parametrize(
    ("wanted", "expandable", "fine"),
    [
        ("", [False], True), ("mapped", [True, False], True), ("mapped", [False], False),
        ("classic", [True], False), ("classic", [False], True),
    ],
)  # fmt: skip
def test_segments_of_another_kind_than_asked_for_are_an_error(
    monkeypatch: pytest.MonkeyPatch, wanted: str, expandable: list[bool], fine: bool
) -> None:
    monkeypatch.setenv("ESPER_ALLOC_SEGMENTS", wanted)
    found = [{"is_expandable": one} for one in expandable]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
    refused = pytest.raises(RuntimeError, match=f"ESPER_ALLOC_SEGMENTS={wanted}")
    with nullcontext() if fine else refused:
        load("jobs").check_segments("esper_alloc")
    load("jobs").check_segments("native")


# --- turns ---------------------------------------------------------------------

TURNS = """
import argparse, os, sys, time
from turns import ready, take_turns

options = argparse.ArgumentParser()
options.add_argument("--fail-at", type=int, default=-1)
options.add_argument("--hang-at", type=int, default=-1)
options.add_argument("--cores", type=int)
options.add_argument("--together", action="store_true")
options = options.parse_args()

def measure():
    yield {}
    for number in range(100):
        if number == options.fail_at:
            print("half a line", end="")
            raise SystemExit("it went wrong")
        if number == options.hang_at:
            time.sleep(60)
        there = time.monotonic()
        if options.together:
            ready()
        begin = time.monotonic()
        time.sleep(0.02)
        print("something else")
        yield {"number": number, "pid": os.getpid(), "there": there, "from": begin, "to": time.monotonic(),
               "segments": os.environ.get("ESPER_ALLOC_SEGMENTS"),
               "cores": sorted(os.sched_getaffinity(0))}

take_turns(measure(), options.cores)
"""


def started(script: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, str(script), *arguments], dict(os.environ)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    path = tmp_path / "worker.py"
    path.write_text(TURNS)
    return path


def test_workers_take_turns_back_and_forth(script: Path) -> None:
    turns = load("turns")
    commands = {name: started(script) for name in "abc"}
    commands["a"][1]["ESPER_ALLOC_SEGMENTS"] = "mapped"
    rounds = turns.turns(commands, 3)
    assert [{name: one["number"] for name, one in found.items()} for found in rounds] == [
        {"a": n, "b": n, "c": n} for n in range(3)
    ]
    for name, segments in {"a": "mapped", "b": None, "c": None}.items():
        assert len({found[name]["pid"] for found in rounds}) == 1  # it stays
        assert {found[name]["segments"] for found in rounds} == {segments}
    spans = sorted((one["from"], one["to"], name) for each in rounds for name, one in each.items())
    assert [name for _, _, name in spans] == list("abccbaabc")
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:]))
    for found in rounds[0].values():
        with pytest.raises(ProcessLookupError):
            os.kill(found["pid"], 0)


def test_workers_set_up_together_and_are_timed_alone(script: Path) -> None:
    commands = {name: started(script, "--together") for name in "ab"}
    commands["fails"] = started(script, "--together", "--fail-at", "0")
    rounds = load("turns").turns(commands, 2, may_fail=True, together=True)
    for found, order in zip(rounds, ("ab", "ba"), strict=True):
        assert found.pop("fails")["failed"] == 1
        first, second = (found[name] for name in order)
        assert second["there"] < first["from"] < first["to"] <= second["from"]


LEAVES = """
import sys, time
from common import workers

workers.report({"begin": time.monotonic()})
time.sleep(0.3)  # gives much memory back
with open(sys.argv[1], "a") as file:
    print(time.monotonic(), file=file)
"""


def test_a_fresh_worker_is_gone_before_the_next_begins(script: Path) -> None:
    script.write_text(LEAVES)
    left = script.with_suffix(".txt")
    commands = {name: started(script, str(left)) for name in "ab"}
    first, second = load("turns").turns(commands, 2, fresh=True)
    begun = [found["begin"] for found in (first["a"], first["b"], second["b"], second["a"])]
    ended = [float(line) for line in left.read_text().split()]
    assert len(ended) == 4 and all(before < after for before, after in zip(ended, begun[1:]))


def test_where_workers_may_fail_another_one_goes_on(script: Path) -> None:
    commands = {"fails": started(script, "--fail-at", "1"), "never": started(script, "--unknown")}
    first, second, third = load("turns").turns(commands, 3, may_fail=True)
    assert [first["fails"]["number"], third["fails"]["number"]] == [0, 0]
    assert second["fails"]["failed"] == 1 and "it went wrong" in second["fails"]["why"]
    assert first["fails"]["pid"] != third["fails"]["pid"]
    for found in (first, second):
        assert found["never"]["failed"] == 1 and "--unknown" in found["never"]["why"]


@pytest.mark.slow
def test_a_worker_that_fails_or_hangs_is_left_out(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = load("turns")
    how = {"fails": ["--fail-at", "1"], "hangs": ["--hang-at", "0"], "works": []}
    commands = {name: started(script, *one) for name, one in how.items()}
    rounds = turns.turns(commands, 3, timeout=20)
    assert [sorted(found) for found in rounds] == [["fails", "works"], ["works"], ["works"]]
    printed = capsys.readouterr().out
    assert "fails: exit status 1" in printed and "it went wrong" in printed
    assert "half a line" in printed and "hangs: no result within 20 s" in printed


IMPORTED: list[str] = []


def measure_imported() -> dict[str, int]:
    return {"pid": os.getpid(), "imported": len(IMPORTED)}


def test_each_measurement_has_a_process_of_its_own() -> None:
    turns = load("turns")
    children = turns.in_children("native", measure_imported, lambda: IMPORTED.append("torch"))
    nothing, first, second = next(children), next(children), next(children)
    assert nothing == {} and len({os.getpid(), first["pid"], second["pid"]}) == 3
    assert first["imported"] == second["imported"] == 1
    with pytest.raises(turns.WorkerFailed, match="a child ended with 3"):
        turns.in_a_child(lambda: os._exit(3))


def test_rates_of_sleep_leave_out_the_first_cycle() -> None:
    found = {"sleep": [100.0, 2.0, 2.0], "out": [50.0, 1.0, 1.0]}
    rates = load("sleep").rates(found, live=float(4 << 30), copied=float(3 << 30))
    assert rates == {"sleep_gib_s": 2.0, "out_gib_s": 3.0}


# --- engines -------------------------------------------------------------------


def ran(losses: list[float], **figures: float) -> dict[str, Any]:
    usual = {"tokens_s": 1000.0, "peak_reserved_mib": 1000.0, "peak_allocated_mib": 800.0}
    return {"losses": losses, **usual, **figures}


def engine_rows(engine: str, **cases: dict[str, Any]) -> dict[str, Any]:
    topics = load("topics")
    names = {
        "native": topics.NATIVE, "ours": topics.OURS, "again": topics.AGAIN, "bare": topics.BARE,
        "registered": topics.REGISTERED, "native_registered": topics.NATIVE_REGISTERED,
        "automatic": topics.UNMARKED,
    }  # fmt: skip
    cases = {
        names[case]: {f"{engine} {key}": value for key, value in one.items()}
        for case, one in cases.items()
    }
    return {name: row for (name, _), row in rows("engines", engine, [cases]).items()}


LOSSES = "losses, largest relative difference from native's"


@pytest.mark.parametrize(
    ("ours", "again", "met"),
    [
        ([2.0, 1.0], [2.0, 1.0], True),
        ([2.0, 1.0 + 1e-9], [2.0, 1.0], False),  # where native repeats, ours must
        ([2.0, 1.02], [2.0, 1.01], True),
        ([2.0, 0.97], [2.0, 1.01], False),
    ],
)
def test_losses_of_engines_are_judged_by_natives_own_spread(
    ours: list[float], again: list[float], met: bool
) -> None:
    found = engine_rows("ddp", native=ran([2.0, 1.0]), ours=ran(ours), again=ran(again))
    assert found[f"ddp: {LOSSES}"]["met"] is met


@pytest.mark.parametrize(
    ("ours", "live", "met"),
    [
        (950.0, 800.0, True),
        (960.0, 800.0, False),
        (1000.0, 985.0, True),  # native has no slack
        (1010.0, 985.0, False),
    ],
)
def test_engines_may_reserve_what_is_live(ours: float, live: float, met: bool) -> None:
    native = ran([1.0], peak_allocated_mib=live)
    found = engine_rows("ddp", native=native, ours=ran([1.0], peak_reserved_mib=ours), again=native)
    assert found["ddp: peak reserved"]["met"] is met


def test_rows_of_engines() -> None:
    slow = ran([1.0], tokens_s=980.0)
    both = {"native": ran([1.0]), "ours": ran([1.0], peak_reserved_mib=900.0), "again": ran([1.0])}
    found = engine_rows("fsdp2", **both, bare=slow)
    assert found["fsdp2: tokens"]["met"] is True
    bare = "fsdp2, automatic uses, nothing kept: "
    assert found[bare + LOSSES]["met"] is True
    assert not found[bare + "tokens"]["met"] and found[bare + "peak reserved"]["met"]
    registered = {"registered": slow, "native_registered": ran([1.0], tokens_s=990.0)}
    found = engine_rows("tensor_parallel", **both, **registered)
    row = found["tensor_parallel, registered: tokens"]
    assert row["peer_name"] == "native, registered" and row["ratio"] == pytest.approx(980 / 990)
    assert row["met"] is False


# --- times of malloc -----------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "answer"),
    [(1, 0.999, 1), (2, 0.5, 1), (1000, 0.999, 999), (1001, 0.999, 1000), (3, 0.5, 2)],
)
def test_percentiles(count: int, share: float, answer: int) -> None:
    values = list(range(count, 0, -1))
    assert load("common").percentile(values, share) == answer


# --- little memory, graphs, the corpus -------------------------------------------


@pytest.mark.parametrize("first_fails", [False, True])
def test_pipelines_run_within_the_least_that_was_reserved(
    first_fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    topics, part = load("topics"), part_of("least", "least")
    asked: list[dict[str, Any]] = []

    def measure(part: Any, cases: Any, rounds: int, *how: Any) -> list[dict[str, Any]]:
        asked.append({case.name: case.how.get("limit") for case in cases})
        return [{case.name: {"failed": int(first_fails), "reserved": 100 << 20} for case in cases}]

    command = SimpleNamespace(measure=measure)
    found = topics.within_least(command, part, part.cases, 5, 60.0, None)
    assert asked[0] == {"native, recipe": None}
    if first_fails:
        assert found == [] and "did not go through without a limit" in capsys.readouterr().out
    else:
        assert asked[1] == {case.name: 105 << 20 for case in part.cases} and len(asked[1]) == 3


def test_large_layers_have_as_many_mib_as_their_rows_say() -> None:
    for size, mib in (("small", 32), ("large", 512)):
        layers, width, _ = load("streams").SHAPES[size][False]
        assert width * width * 2 == mib << 20
        assert layers * mib <= 16 << 10  # record_stream holds the layers of six steps
    assert load("topics").LARGE == "layers of 512 MiB"


def engines_on_the_cpu(tmp_path: Path, *how: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "engines.json"
    done = command(*"engines --set device=cpu --set steps=3 --out".split(), str(out), *how)
    assert out.exists(), done.stdout + done.stderr
    return {row["name"]: row for row in json.loads(out.read_text())["rows"]}, done.stdout


@pytest.mark.slow
def test_an_engine_trains_on_the_cpu(tmp_path: Path) -> None:
    """Alone, with the cases of its own; the next test has the others."""
    found, said = engines_on_the_cpu(tmp_path, "--part", "fsdp2")
    assert found[f"fsdp2: {LOSSES}"]["ours"] == 0.0
    assert found[f"fsdp2, automatic uses, nothing kept: {LOSSES}"]["ours"] == 0.0
    assert "did not go through" not in said


@pytest.mark.slow
def test_all_engines_train_on_the_cpu(tmp_path: Path) -> None:
    """Context parallelism without its ring, which PyTorch has for CUDA alone."""
    cases = ("native", "esper_alloc", "native, run again")
    how = ("--part", "together", "--set", "ranks=4", *(f"--case={case}" for case in cases))
    found, said = engines_on_the_cpu(tmp_path, *how)
    for engine in load("topics").ENGINE_NAMES:
        assert found[f"{engine} on 4 GPUs, together: {LOSSES}"]["ours"] == 0.0, said
    assert "failed" not in said


@pytest.mark.slow
def test_engines_get_random_lengths_until_time_is_over(tmp_path: Path) -> None:
    engines = "engines=fsdp2_tp,pipeline_interleaved,expert_parallel"
    how = ("--set", engines, "--set", "soak=6", "--set", "ranks=4", "--set", "activations=offload")
    found, _ = engines_on_the_cpu(tmp_path, "--part", "soak", *how)
    assert len(found) == 3 * 4
    for engine in engines.removeprefix("engines=").split(","):
        title = f"{engine} on 4 GPUs, offload: soak, "
        assert found[title + "losses that are not finite"]["met"] is True
        assert found[title + "steps of random lengths"]["ours"] > 3


@pytest.mark.slow
def test_an_engine_that_fails_leaves_the_others_their_turn(tmp_path: Path) -> None:
    engines = ("--set", "engines=ddp,fsdp2_offload", "--set", "activations=nowhere")
    how = ("--part", "soak", "--set", "soak=1", "--case", "esper_alloc", *engines)
    found, said = engines_on_the_cpu(tmp_path, *how)
    assert {name.partition(",")[0] for name in found} == {"fsdp2_offload"}
    assert "ddp failed" in said and "not 'nowhere'" in said


def test_engines_on_more_gpus_are_rows_of_their_own() -> None:
    """And may reserve as much as native. What held a rank back is told by rank."""
    topics, common = load("topics"), load("common")
    settings = {**topics.ENGINES.settings, "ranks": 4, "activations": "checkpoint"}
    assert set(topics.ENGINE_NAMES) == set(load("engine_steps").MAKERS)
    by_rank = {"held_back_s": [0.5, 0.0, 0.0, 0.0]}
    ours = ran([1.0], held_back_s=0.5, held_back_least_s=0.0, by_rank=by_rank)
    rounds = [{
        case: {f"ddp {key}": value for key, value in one.items()}
        for case, one in ((topics.NATIVE, ran([1.0])), (topics.OURS, ours))
    }]  # fmt: skip
    part, made = part_of("engines", "ddp"), common.Results("engines")
    for row in part.rows(part.derive(rounds), common.Options(settings=settings)):
        made.add(row, part.derive(rounds))
    found = {row["name"].removeprefix("ddp on 4 GPUs, checkpoint: "): row for row in made.rows}
    assert found["peak reserved"]["met"] is True and found["peak reserved"]["goal"] == 1.0
    assert found["held back"]["ours"] == 0.5 and found["held back"]["by_rank"] == [by_rank]
