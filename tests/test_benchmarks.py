"""The benchmarks' own code, as far as it needs no GPU: options, statistics, rows, files."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(
    path.name
    for path in BENCHMARKS.glob("*.py")
    if "__main__" in path.read_text() and path.name != "readme.py"
)
MODULES = (
    "allowances",
    "common",
    "turns",
    "train",
    "workloads",
    "jobs",
    "neighbour",
    "pipeline",
    "overlap",
    "prefetch",
    "recipes",
    "precision",
    "captures",
    "record_use_cost",
    "limits",
    "least",
    "startup",
    "replay_peaks",
    "growth",
    "malloc_times",
    "pair",
    "automatic_uses",
    "auditor",
    "threads",
    "churn",
    "pages",
    "mapping_threads",
    "sleep",
    "engines",
    "fence",
    "take",
)
ABOUT = {"gpu": "a GPU", "driver": "1", "torch": "2"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch):
    """The scripts import each other by their bare names, as when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def load(name: str) -> Any:
    return importlib.import_module(name)


def results(tmp_path: Path, **more: Any) -> Any:
    made = load("common").Results("topic", tmp_path / "topic.json")
    made.describe(ABOUT, **more)
    return made


def rows_of(made: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["peer_name"]): row for row in made.rows}


# --- peers ---------------------------------------------------------------------


def test_who_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    common = load("common")
    monkeypatch.setattr(common, "rmm_missing", lambda: "it is not there")
    assert common.peers_here() == (
        ["native", "native, expandable", "cudaMallocAsync"], {"RMM's pool": "it is not there"}
    )  # fmt: skip
    assert common.peers_here(["native"]) == (["native"], {})
    monkeypatch.setattr(common, "rmm_missing", lambda: None)
    assert common.peers_here() == (list(common.PEERS), {})
    rounds = [{"esper_alloc": {}}, {"esper_alloc": {}, "cudaMallocAsync": {}}]
    assert common.peers_of(rounds) == ["native", "cudaMallocAsync"]
    assert common.peers_of(rounds, ()) == ["cudaMallocAsync"]


class RMM:
    """Stands for the package rmm, as far as the benchmarks use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[Any] = []
        self.current: Any = None
        modules = {
            name: ModuleType(name) for name in ("rmm", "rmm.allocators", "rmm.allocators.torch")
        }
        modules["rmm"].mr = self  # type: ignore[attr-defined]
        modules["rmm.allocators.torch"].rmm_torch_allocator = "RMM's"  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def CudaMemoryResource(self) -> object:
        return SimpleNamespace()

    def StatisticsResourceAdaptor(self, upstream: Any) -> Any:
        counts = SimpleNamespace(peak_bytes=0, current_bytes=0)
        return SimpleNamespace(upstream=upstream, allocation_counts=counts)

    def PoolMemoryResource(self, upstream: Any, initial_pool_size: int) -> Any:
        assert initial_pool_size == 0
        self.pools.append(SimpleNamespace(upstream=upstream))
        return self.pools[-1]

    def set_current_device_resource(self, resource: Any) -> None:
        self.current = resource


def test_rmms_pool_is_chosen_counted_and_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    common, rmm = load("common"), RMM(monkeypatch)
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", chosen.append)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    common.choose_allocator(common.RMM)
    assert chosen == ["RMM's"] and rmm.current.upstream is rmm.pools[0]
    rmm.current.allocation_counts.peak_bytes = 3 << 20
    below = rmm.pools[0].upstream.allocation_counts
    below.peak_bytes, below.current_bytes = 5 << 20, 4 << 20
    assert common.memory_figures() == {
        "peak_allocated_mib": 3, "peak_reserved_mib": 5, "reserved_mib": 4,
        "retries": 0, "device_calls": 0,
    }  # fmt: skip
    common.empty_cache()  # a pool keeps what it has: another one takes its place
    assert len(rmm.pools) == 2 and rmm.current.upstream is rmm.pools[1] and chosen == ["RMM's"]
    assert common.memory_figures()["reserved_mib"] == 0


def test_an_unknown_allocator_is_named() -> None:
    with pytest.raises(ValueError, match="unknown allocator 'mine'; known: esper_alloc, native"):
        load("common").choose_allocator("mine")


# --- every script --------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_gpu(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"],
        capture_output=True, text=True, timeout=1200,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert script in done.stdout


#: They measure on the simulated device, work on files, or serve another script.
NEED_NO_GPU = {"choices", "growth", "neighbour", "replay_peaks", "take"}


@pytest.mark.parametrize("script", sorted({Path(one).stem for one in SCRIPTS} - NEED_NO_GPU))
def test_without_a_gpu_a_sentence_says_so(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(script)
    for where in (module, load("common"), load("turns")):  # whoever asks
        monkeypatch.setattr(where, "gpu_missing", lambda: "there is no GPU", raising=False)
    monkeypatch.setattr(sys, "argv", [script])
    assert module.main() == 1
    assert capsys.readouterr().out == "nothing can be measured: there is no GPU\n"


def test_probe_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = load("jobs")
    monkeypatch.setattr(sys, "argv", ["jobs.py", "--probe"])
    for why, code in ((None, 0), ("there is no GPU", 1)):
        monkeypatch.setattr(jobs, "gpu_missing", lambda why=why: why)
        assert jobs.main() == code
        out = capsys.readouterr().out
        assert out.startswith(f"GPU: {why or 'there is one'}\n") and "RMM's pool: " in out


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


def test_an_unknown_kind_of_goal_is_refused() -> None:
    with pytest.raises(ValueError, match="'luck'"):
        load("common").verdict(row(judged="luck"))


def test_the_interval_is_students() -> None:
    low, high = load("common").interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))


# --- result files --------------------------------------------------------------


def test_peers_left_out_stand_in_the_file_and_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = results(tmp_path, left_out={"RMM's pool": "the package rmm is not installed"})
    made.row("size", "MiB", [1.0], [2.0], "native", 1.0)
    assert made.save()
    assert "RMM's pool: not measured, the package rmm" in capsys.readouterr().out
    [run] = json.loads((tmp_path / "topic.json").read_text())["runs"]
    assert run["left_out"] == {"RMM's pool": "the package rmm is not installed"}


def test_a_later_run_replaces_its_rows_alone(tmp_path: Path) -> None:
    first = results(tmp_path)
    first.row("a", "ms", [1.0], [2.0], "native")
    first.row("b", "ms", [1.0], [2.0], "native")
    first.save()
    second = results(tmp_path)
    second.run["id"] = "second"
    second.row("b", "ms", [3.0], [2.0], "native")
    second.save()
    found = json.loads((tmp_path / "topic.json").read_text())
    assert {one["name"]: (one["ours"], one["run"]) for one in found["rows"]} == {
        "a": (1.0, first.run["id"]),
        "b": (3.0, "second"),
    }
    assert len(found["runs"]) == 2


def test_what_was_measured_is_there_whenever_it_is_cut_off(tmp_path: Path) -> None:
    common, path = load("common"), tmp_path / "topic.json"
    made = common.Results("topic", path)
    seen: list[Any] = []

    def measure(each: Any) -> list[Any]:
        rounds: list[Any] = []
        for ms in (2.0, 4.0):
            figures = {"ms": ms, "machine": ABOUT}
            rounds.append({common.OURS: figures, "native": {"ms": 2.0}})
            each(rounds)
            found = json.loads(path.read_text())
            seen.append([(one["rounds"], one["ratio"], one["run"]) for one in found["rows"]])
        raise KeyboardInterrupt

    def add(rounds: Any) -> None:
        made.compare("a step", "ms", rounds, "ms", common.OURS, "native")
        made.compare("b step", "ms", rounds, "none", common.OURS, "native", 1.0)

    with pytest.raises(KeyboardInterrupt):
        made.of_rounds(measure, add)
    run = made.run["id"]
    assert seen == [[(1, 1.0, run)], [(2, 1.5, run)]]
    assert made.complete and not made.rows  # what was missing may yet come
    assert not made.of_rounds(lambda each: [{"native": {"ms": 1.0, "machine": ABOUT}}], add)
    assert made.of_rounds(lambda each: [{"native": {"ms": 1.0, "machine": ABOUT}}], add, ours=None)


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
        (None, "no result file: .*gone.json"),
    ],
)
def test_what_nobody_can_repeat_is_not_taken(
    tmp_path: Path, more: dict[str, str] | None, why: str
) -> None:
    into, good = tmp_path / "results", result_file(tmp_path / "made" / "pair.json", "1", "a")
    other = tmp_path / "gone.json"
    if more is not None:
        result_file(other, "2", "b", **more)
    with pytest.raises(SystemExit, match=why):
        load("take").take([good, other], into)
    assert not into.exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="nothing was found"):
        load("take").take([tmp_path / "empty"], into)


# --- jobs ----------------------------------------------------------------------


def worker(allocated: float, reserved: float, step: float, outputs: str = "abc") -> dict[str, Any]:
    return {
        "peak_allocated_mib": allocated,
        "peak_reserved_mib": reserved,
        "step_ms": step,
        "first_step_ms": 2 * step,
        "beyond_reserved_mib": 500.0,
        "smi_beyond_reserved_mib": 501.0,
        "outputs": list(outputs),
    }


def job_rounds() -> list[dict[str, dict[str, Any]]]:
    return [
        {
            "esper_alloc": worker(2000, 2030, 10.0),
            "native": worker(2000, 3000, 11.0),
            "native, expandable": worker(1990, 2100, 10.2),
            "cudaMallocAsync": worker(1995, 2500, 12.0),
        },
        {
            "esper_alloc": worker(2000, 2030, 10.1),
            "native": worker(2000, 3000, 10.1),
            "native, expandable": worker(1990, 2100, 10.0),
            "cudaMallocAsync": worker(1995, 2500, 12.0, "abd"),
        },
    ]


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("", "0"), ("2,3", "2")])
def test_nvidia_smi_is_asked_about_the_gpu_that_works(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: str
) -> None:
    common = load("common")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    commands: list[list[str]] = []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "123\n", "")

    monkeypatch.setattr(common.subprocess, "run", run)
    assert common.nvidia_smi_used_mib() == 123.0
    assert commands[0][-2:] == ["-i", asked]


def test_rows_of_a_job(tmp_path: Path) -> None:
    jobs, made = load("jobs"), results(tmp_path)
    jobs.add_rows(made, "gpt2", job_rounds())
    rows = rows_of(made)
    peak = rows["gpt2: peak reserved", jobs.LEAST]
    assert (peak["ours"], peak["peer"], peak["goal"], peak["met"]) == (
        2030,
        1990,
        1 + 256 / 1990,
        True,
    )
    assert peak["peer_is"] == "native, expandable" and peak["aim"] == 1.02
    step = rows["gpt2: step time", jobs.FASTEST]
    assert step["peer_is"] == "native, expandable" and step["goal"] == 1.0
    assert step["judged"] == "no_more" and step["met"] is False  # two rounds show too little
    assert step["mean_ratio"] == pytest.approx((10.0 / 10.2 + 10.1 / 10.0) / 2)
    assert step["interval"][0] < step["mean_ratio"] < step["interval"][1]
    outputs = rows["gpt2: outputs that differ from native's", "the other peers"]
    assert (outputs["ours"], outputs["met"], outputs["peer_range"]) == (0, True, [0, 1])
    beyond = rows["gpt2: nvidia-smi's memory in use beyond reserved", "native"]
    assert beyond["met"] is True and beyond["judged"] == "difference"
    assert ("gpt2: peak reserved", "cudaMallocAsync") in rows
    assert made.complete


def test_a_job_that_takes_too_much_or_computes_something_else_is_seen(tmp_path: Path) -> None:
    jobs, made, rounds = load("jobs"), results(tmp_path), job_rounds()
    for one in rounds:
        one["esper_alloc"] = worker(2000, 2300, 11.0, "abx")
        one["esper_alloc"]["beyond_reserved_mib"] = 503.0
    jobs.add_rows(made, "gpt2", rounds)
    missed = {row["name"].removeprefix("gpt2: ") for row in made.rows if row["met"] is False}
    assert missed == {
        "peak reserved",
        "step time",
        "step time over the whole job",
        "outputs that differ from native's",
        "device memory in use beyond reserved",
    }


def test_where_peers_do_not_agree_nothing_is_asked_of_ours(tmp_path: Path) -> None:
    """Only of jobs that may depend on where tensors lie. One of the peers differs once."""
    jobs = load("jobs")

    def judged(rounds: list[dict[str, dict[str, Any]]], by_place: bool) -> tuple[Any, Any]:
        made = results(tmp_path)
        jobs.add_rows(made, "job", rounds, by_place)
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
    jobs, made = load("jobs"), results(tmp_path)
    one = {"esper_alloc": worker(live, reserved, 1.0), "native": worker(live, 2 * live, 1.0)}
    jobs.add_rows(made, "job", [one])
    assert rows_of(made)["job: peak reserved", jobs.LEAST]["met"] is met


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ((0.999, 1.001), True),  # the interval ends at 1.013
        ((0.95, 1.02), False),  # 1.43
        ((1.001, 1.002), False),  # the mean is above
        ((1.0, 1.0), True),
        ((0.9,), False),  # one round shows nothing
    ],
)
def test_no_more_bounds_the_mean_and_the_interval(
    tmp_path: Path, ratios: tuple[float, ...], met: bool
) -> None:
    made = results(tmp_path)
    rounds = [{"a": {"ms": ratio}, "b": {"ms": 1.0}} for ratio in ratios]
    made.compare("step", "ms", rounds, "ms", "a", "b", 1.0, "no_more")
    assert made.rows[0]["met"] is met


def test_time_inside_is_of_the_jobs_that_native_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, times, made = load("jobs"), load("malloc_times"), results(tmp_path)
    recorded: list[tuple[str, list[str]]] = []

    def run_worker(script: str, allocator: str, arguments: list[str], **more: Any) -> None:
        recorded.append((allocator, arguments))

    def measured_beside(script: str, cases: list[Any], *how: Any) -> bool:
        assert Path(script) == BENCHMARKS / "malloc_times.py"
        cold, *files = cases[0].args
        assert cold == "--cold" and [Path(file).stem for file in files] == ["moe", "packed"]
        assert all(case.args == cases[0].args for case in cases)
        kinds = [case.environment.get("ESPER_ALLOC_SEGMENTS") for case in cases]
        assert kinds == ["mapped", *[None] * (len(cases) - 1)]
        timed = {"esper_alloc": [([9, 1], [2])], "native": [([3, 4], [3])]}
        one = {
            case: {"jobs": dict.fromkeys(("moe", "packed"), times.figures(runs, "whole")),
                   "machine": ABOUT}
            for case, runs in timed.items()
        }  # fmt: skip
        _, _, add, *_ = how
        add([one])
        return True

    monkeypatch.setattr(jobs, "run_worker", run_worker)
    monkeypatch.setattr(jobs, "measured_beside", measured_beside)
    options = SimpleNamespace(small=True, rounds=1, seconds=1.0)
    assert jobs.compare_inside(made, ["moe", "packed"], options, "mapped")
    assert [allocator for allocator, _ in recorded] == ["native"] * 2
    assert {arguments[1] for _, arguments in recorded} == {"moe", "packed"}
    assert all(arguments[2:4] == ["--small", "--record"] for _, arguments in recorded)
    assert all(arguments[-2:] == ["--passes", "2"] for _, arguments in recorded)
    row = rows_of(made)["moe, mapped segments: time inside the allocator", "native"]
    assert (row["ours"], row["peer"], row["goal"], row["met"]) == (0.012, 0.01, 1.0, False)
    monkeypatch.setattr(jobs, "measured_beside", lambda *how: False)
    assert not jobs.compare_inside(made, ["moe"], options, None)


def test_small_jobs_have_no_finer_aim_and_missing_figures_no_row(tmp_path: Path) -> None:
    jobs, made = load("jobs"), results(tmp_path)
    rounds = [{"esper_alloc": worker(60, 62, 1.0), "native": worker(60, 70, 1.0)}]
    for figures in rounds[0].values():
        figures["smi_beyond_reserved_mib"] = None
    jobs.add_rows(made, "ppo, mapped segments", rounds)
    rows = rows_of(made)
    assert "aim" not in rows["ppo, mapped segments: peak reserved", jobs.LEAST]
    assert not any("nvidia-smi" in name for name, _ in rows)


def test_a_job_without_peers_is_incomplete(tmp_path: Path) -> None:
    jobs, made = load("jobs"), results(tmp_path)
    jobs.add_rows(made, "gpt2", [{"esper_alloc": worker(60, 62, 1.0)}])
    assert made.complete is False and made.rows == []


def test_cases_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = load("jobs")
    common = load("common")
    monkeypatch.setattr(common, "rmm_missing", lambda: "it is not there")
    cases, left_out = jobs.cases_of("ppo", True, ["classic", "mapped"])
    assert left_out == {"RMM's pool": "it is not there"}
    assert [case.name for case in cases] == [
        "esper_alloc, classic", "esper_alloc, mapped",
        "native", "native, expandable", "cudaMallocAsync",
    ]  # fmt: skip
    kinds = [case.environment.get("ESPER_ALLOC_SEGMENTS") for case in cases]
    assert kinds == ["classic", "mapped", None, None, None]
    assert [case.allocator for case in cases[:2]] == ["esper_alloc"] * 2
    assert all(case.args == ("--job", "ppo", "--small") for case in cases)
    monkeypatch.setattr(common, "rmm_missing", lambda: None)
    cases, left_out = jobs.cases_of("ppo", False, [None])
    assert cases[-1].allocator == "RMM's pool" and not left_out
    cases, _ = jobs.cases_of("ppo", False, [None], twice=True)
    assert (cases[-1].name, cases[-1].allocator) == (jobs.AGAIN, "native")


def test_native_run_again_is_nobodys_peer(tmp_path: Path) -> None:
    jobs, made = load("jobs"), results(tmp_path)
    one = {"esper_alloc": worker(60, 62, 1.0), "native": worker(60, 70, 2.0)}
    one[jobs.AGAIN] = {**worker(50, 70, 1.5), "outputs": ["another"]}
    jobs.add_rows(made, "job", [one])
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
    jobs, made = load("jobs"), results(tmp_path)
    rounds = [
        {"esper_alloc": worker(60, 62, ours), "native": worker(60, 70, 2.0)} for ours in (1.0, 2.0)
    ]
    rounds[0]["esper_alloc"]["first_step_ms"] = 9.0
    rounds[0]["native"]["first_step_ms"] = 3.0
    jobs.add_rows(made, "job", rounds)
    row = rows_of(made)["job: step time over the whole job", jobs.FASTEST]
    assert (row["ours"], row["peer"]) == (4.0, pytest.approx(7 / 3)) and row["met"] is False
    del rounds[1]["esper_alloc"]
    cut = results(tmp_path)
    jobs.add_rows(cut, "job", rounds)
    assert not any("whole job" in row["name"] for row in cut.rows)


def test_the_first_pass_is_not_timed_and_peaks_are_of_all_passes() -> None:
    jobs = load("jobs")

    def passed(step: float, peak: float, **more: Any) -> dict[str, Any]:
        return {
            "step_ms": step, "outputs": [str(step)],
            "peak_allocated_mib": peak, "peak_reserved_mib": peak + 1, **more,
        }  # fmt: skip

    once = {"machine": {"gpu": "a"}, "beyond_reserved_mib": 5.0, "smi_beyond_reserved_mib": 6.0}
    measured = [
        {"native": {}, "esper_alloc": {}},
        {"native": passed(9.0, 10, **once), "esper_alloc": passed(8.0, 10, device_calls=9, **once)},
        {"native": passed(3.0, 10), "esper_alloc": passed(2.0, 11, device_calls=12)},
        {"native": passed(4.0, 12), "esper_alloc": passed(2.5, 11, device_calls=12)},
        {"native": passed(5.0, 13)},  # ours failed
    ]
    rounds = jobs.passes(measured)
    assert [one["native"]["step_ms"] for one in rounds] == [3.0, 4.0, 5.0]
    assert [one["native"]["peak_reserved_mib"] for one in rounds] == [14, 14, 14]
    assert [one.get("esper_alloc", {}).get("step_ms") for one in rounds] == [2.0, 2.5, None]
    assert rounds[0]["esper_alloc"].items() >= {"first_step_ms": 8.0, **once}.items()
    assert "first_step_ms" not in rounds[1]["native"] and "machine" not in rounds[1]["native"]
    assert rounds[1]["native"]["outputs"] == ["4.0"]
    assert [one["esper_alloc"]["device_calls"] for one in rounds[:2]] == [3, 0]


def test_rounds_with_both_kinds_of_segments_are_told_apart() -> None:
    jobs = load("jobs")
    rounds = [
        {"esper_alloc, classic": {"x": 1}, "esper_alloc, mapped": {"x": 2}, "native": {"x": 3}}
    ]
    assert jobs.of_kind(rounds, "classic") == [{"esper_alloc": {"x": 1}, "native": {"x": 3}}]
    assert jobs.of_kind(rounds, "mapped") == [{"esper_alloc": {"x": 2}, "native": {"x": 3}}]
    alone = [{"esper_alloc": {"x": 1}, "native": {"x": 3}}]
    assert jobs.of_kind(alone, None) == alone


@pytest.mark.parametrize(
    ("a", "b", "count"), [("abc", "abc", 0), ("abc", "abd", 1), ("abc", "ab", 1), ("", "", 0)]
)
def test_differing_outputs_are_counted(a: str, b: str, count: int) -> None:
    assert load("jobs").differing(list(a), list(b)) == count


def test_a_replayed_peak_is_compared_with_the_run_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is one that was recorded before, the peak on the GPU made up."""
    from esper_alloc.replay import replay

    jobs, made = load("jobs"), results(tmp_path)
    trace = ROOT / "examples" / "traces" / "fsdp_like.pickle.gz"
    [recording] = replay.load_recordings(trace)
    peak = replay.replay(recording, "classic").peak_reserved / jobs.MIB

    def run_worker(script: str, allocator: str, arguments: list[str], **more: Any) -> dict:
        Path(arguments[-1]).write_bytes(trace.read_bytes())
        return {"machine": ABOUT, "segments": "classic", "peak_reserved_mib": peak / 1.03}

    monkeypatch.setattr(jobs, "run_worker", run_worker)
    jobs.compare_replay(made, "ppo", True, None)
    rows = rows_of(made)
    off = rows["ppo: replayed peak reserved, off by", "the run on the GPU, history of native"]
    assert off["ours"] == pytest.approx(3.0) and off["met"] is False and off["goal"] == 2.0
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("wanted", "expandable", "fine"),
    [
        (None, [False], True),
        ("mapped", [], True),
        ("mapped", [True, False], True),
        ("mapped", [False], False),
        ("classic", [True], False),
        ("classic", [False], True),
    ],
)
def test_segments_of_another_kind_than_asked_for_are_an_error(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, expandable: list[bool], fine: bool
) -> None:
    torch = pytest.importorskip("torch")
    jobs = load("jobs")
    monkeypatch.delenv("ESPER_ALLOC_SEGMENTS", raising=False)
    if wanted:
        monkeypatch.setenv("ESPER_ALLOC_SEGMENTS", wanted)
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [{"is_expandable": one} for one in expandable]
    )
    if fine:
        jobs.check_segments("esper_alloc")
    else:
        with pytest.raises(RuntimeError, match=f"ESPER_ALLOC_SEGMENTS={wanted}"):
            jobs.check_segments("esper_alloc")
    jobs.check_segments("native")


# --- turns ---------------------------------------------------------------------

TURNS = """
import argparse, os, sys, time
from turns import take_turns

options = argparse.ArgumentParser()
options.add_argument("--worker")
options.add_argument("--fail-at", type=int, default=-1)
options.add_argument("--hang-at", type=int, default=-1)
options.add_argument("--cores", type=int)
options = options.parse_args()

def measure():
    yield {}
    for number in range(100):
        if number == options.fail_at:
            print("half a line", end="")
            raise SystemExit("it went wrong")
        if number == options.hang_at:
            time.sleep(60)
        begin = time.monotonic()
        time.sleep(0.02)
        print("something else")
        yield {"number": number, "pid": os.getpid(), "from": begin, "to": time.monotonic(),
               "segments": os.environ.get("ESPER_ALLOC_SEGMENTS"),
               "cores": sorted(os.sched_getaffinity(0))}

take_turns(measure(), options.cores)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    path = tmp_path / "worker.py"
    path.write_text(TURNS)
    return path


def test_workers_take_turns_back_and_forth(script: Path) -> None:
    load("jobs")  # both modules are of the benchmarks
    common, turns = sys.modules["common"], sys.modules["turns"]
    cases = [
        common.Case("a", common.OURS, (), {"ESPER_ALLOC_SEGMENTS": "mapped"}),
        common.Case("b", common.NATIVE),
        common.Case("c", common.NATIVE),
    ]
    first, *rounds = turns.turns(script, cases, 3)
    assert first == {"a": {}, "b": {}, "c": {}}
    assert [{name: one["number"] for name, one in found.items()} for found in rounds] == [
        {"a": n, "b": n, "c": n} for n in range(3)
    ]
    for name, segments in {"a": "mapped", "b": None, "c": None}.items():
        assert len({found[name]["pid"] for found in rounds}) == 1  # it stays
        assert {found[name]["segments"] for found in rounds} == {segments}
    spans = sorted(
        (one["from"], one["to"], name) for found in rounds for name, one in found.items()
    )
    assert [name for _, _, name in spans] == list("abccbaabc")
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:]))
    for found in rounds[0].values():
        with pytest.raises(ProcessLookupError):
            os.kill(found["pid"], 0)


@pytest.mark.parametrize("cores", [None, 1, 1000])
def test_workers_stay_on_the_same_cores(script: Path, cores: int | None) -> None:
    load("jobs")
    common, turns = sys.modules["common"], sys.modules["turns"]
    arguments = () if cores is None else ("--cores", str(cores))
    cases = [common.Case(name, common.NATIVE, arguments) for name in "ab"]
    [found] = turns.turns_of_children(script, cases, 1)
    here = sorted(os.sched_getaffinity(0))
    assert {tuple(one["cores"]) for one in found.values()} == {tuple(here[-(cores or 1000) :])}


def test_workers_import_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = load("turns")
    there = os.sched_getaffinity(0)
    seen: list[int] = []

    def measure() -> Any:
        while True:
            seen.append(len(os.sched_getaffinity(0)))
            yield {}

    monkeypatch.setattr(sys, "stdin", ["\n"] * 3)
    torch = Mock()
    monkeypatch.setitem(sys.modules, "torch", torch)
    try:
        turns.take_turns(measure(), 1)
    finally:
        os.sched_setaffinity(0, there)
    assert seen == [len(there), 1, 1]
    torch.set_num_threads.assert_called_once_with(1)


def test_rounds_are_told_of_as_they_end(script: Path) -> None:
    load("jobs")
    common, turns = sys.modules["common"], sys.modules["turns"]
    told: list[int] = []
    cases = [common.Case(name, common.NATIVE) for name in "ab"]
    found = turns.turns_of_children(
        script, cases, 3, each=lambda rounds: told.append(sum(map(len, rounds)))
    )
    assert told == [2, 4, 6] and len(found) == 3


#: A worker whose child takes long.
STUCK = """
import time
from turns import in_a_child

def measure():
    print("measuring", flush=True)
    time.sleep(20)
    print("still there", flush=True)

in_a_child(measure)
"""


def test_a_worker_that_is_killed_leaves_no_child() -> None:
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    worker = subprocess.Popen(
        [sys.executable, "-c", STUCK], env=env, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout
    assert worker.stdout.readline() == "measuring\n"
    worker.kill()
    worker.wait()
    assert worker.stdout.read() == ""  # until the child has ended, too
    worker.stdout.close()


def test_workers_measure_together_where_nothing_is_timed(script: Path) -> None:
    load("jobs")
    common, turns = sys.modules["common"], sys.modules["turns"]
    cases = [common.Case(name, common.NATIVE) for name in "ab"]
    for found in turns.turns_of_children(script, cases, 50, together=True):
        if max(one["from"] for one in found.values()) < min(one["to"] for one in found.values()):
            return
    pytest.fail("none of fifty rounds began before the other one's measurement was over")


@pytest.mark.slow
def test_a_worker_that_fails_or_hangs_is_left_out(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load("jobs")
    common, turns = sys.modules["common"], sys.modules["turns"]
    cases = [
        common.Case("fails", common.NATIVE, ("--fail-at", "1")),
        common.Case("hangs", common.NATIVE, ("--hang-at", "0")),
        common.Case("works", common.NATIVE),
    ]
    _, *rounds = turns.turns(script, cases, 3, timeout=20)
    assert [sorted(found) for found in rounds] == [["fails", "works"], ["works"], ["works"]]
    printed = capsys.readouterr().out
    assert "fails: exit status 1" in printed and "it went wrong" in printed
    assert "half a line" in printed and "hangs: no result within 20 s" in printed


def test_no_round_begins_too_late(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("jobs")
    common, turns = sys.modules["common"], sys.modules["turns"]
    measured = turns.turns(script, [common.Case("a", common.NATIVE)], 50, seconds=0)
    assert len(measured) == 2  # what it says as it starts, and one round
    assert "stopped after 1 of 50 rounds" in capsys.readouterr().out


# --- startup -------------------------------------------------------------------


def test_what_a_child_finds_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    turns = load("turns")
    mine = os.getpid()
    found = turns.in_a_child(lambda: {"pid": os.getpid(), "parent": os.getppid()})
    assert found["pid"] != mine and found["parent"] == mine
    with pytest.raises(RuntimeError, match="a child ended with status 1"):
        turns.in_a_child(lambda: {"x": 1 / 0})
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_each_measurement_has_a_process_of_its_own() -> None:
    turns = load("turns")
    imported: list[str] = []
    measure = lambda: {"pid": os.getpid(), "imported": len(imported)}  # noqa: E731
    children = turns.in_children("native", measure, lambda: imported.append("torch"))
    assert next(children) == {}
    first, second = next(children), next(children)
    assert len({os.getpid(), first["pid"], second["pid"]}) == 3
    assert first["imported"] == second["imported"] == 1


def test_rows_of_startup(tmp_path: Path) -> None:
    startup, made = load("startup"), results(tmp_path)
    rounds = [
        {
            "esper_alloc": {"torch_ms": 2000 + i, "import_ms": 2012 + i, "enabled_ms": 2100,
                            "idle_mib": 500.0, "after_mib": 510.0, "first_ms": 10.0 + i / 100,
                            "first_allocation_us": 300, "context_ms": 200},
            "native": {"torch_ms": 2010, "idle_mib": 500.0, "after_mib": 510.0,
                       "first_ms": 10.0, "first_allocation_us": 300, "context_ms": 200},
        }
        for i in range(4)
    ]  # fmt: skip
    startup.add_rows(made, rounds, rounds)
    rows = rows_of(made)
    assert rows["import torch and esper_alloc", "import torch"]["met"] is True
    assert rows["idle device memory", "native"]["met"] is True
    assert rows["first allocation to the end of the first kernel", "native"]["judged"] == "no_worse"
    for one in rounds:
        one["esper_alloc"]["import_ms"] += 30
        one["esper_alloc"]["idle_mib"] += 2
    slow = results(tmp_path)
    startup.add_rows(slow, rounds, rounds)
    missed = {row["name"] for row in slow.rows if row["met"] is False}
    assert missed == {"import torch and esper_alloc", "idle device memory"}


# --- sleep ---------------------------------------------------------------------


def test_rows_of_sleep(tmp_path: Path) -> None:
    sleep, made = load("sleep"), results(tmp_path)
    one = {
        "sleep_gib_s": 50.0, "wake_gib_s": 48.0, "out_gib_s": 52.0, "back_gib_s": 53.0,
        "first_sleep_s": 9.0, "nothing_sleep_s": 0.01, "nothing_wake_s": 0.02, "unmap_s": 0.01,
        "left_mib": 10.0, "host_share": 1.0,
    }  # fmt: skip
    saver = {"sleep_gib_s": 20.0, "wake_gib_s": 21.0, "first_sleep_s": 12.0}
    sleep.add_rows(made, [{"esper_alloc": one, "torch_memory_saver": saver}] * 2)
    rows = rows_of(made)
    assert rows["sleep", "plain pinned copy"]["met"] is True
    assert rows["wake", "plain pinned copy"]["met"] is True
    assert rows["sleep", "torch_memory_saver"]["ratio"] == 2.5
    slow = results(tmp_path)
    bad = {**one, "wake_gib_s": 30.0, "left_mib": 100.0, "host_share": 1.1, "unmap_s": 0.005}
    sleep.add_rows(slow, [{"esper_alloc": bad}])
    missed = {row["name"] for row in slow.rows if row["met"] is False}
    assert missed == {
        "wake", "device memory left asleep", "host memory over live bytes",
        "sleep with keep='nothing'",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("part", "bad"),
    [("graphs", {"wrong": 1.0}), ("training", {"differing": 2.0}), ("turns", {"short": 1.0})],
)
def test_parts_of_sleep_miss_their_goals_for_one_failure(
    part: str, bad: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = load("sleep")
    good = {
        "machine": {"gpu": "a GPU"}, "wrong": 0.0, "differing": 0.0, "host_share": 1.0,
        "sleep_s": 0.1, "wake_s": 0.1, "short": 0.0, "turn_s": 0.5, "longest_s": 0.6,
    }  # fmt: skip
    monkeypatch.setattr(sleep, "missing", lambda _: None)
    for found, met in ((good, True), ({**good, **bad}, False)):
        monkeypatch.setattr(sleep, "run_worker", lambda *_, found=found: found)
        monkeypatch.setattr(
            sleep, "alternate_cases", lambda *_, found=found, **__: [{"esper_alloc": found}]
        )
        options = SimpleNamespace(out=tmp_path / "sleep.json", turn_gib=8.0)
        assert sleep.measure_parts(options, [part]) is met
    monkeypatch.setattr(sleep, "missing", lambda _: "nothing is here")
    assert not sleep.measure_parts(options, [part])


def test_the_plain_copy_moves_all_bytes_through_the_room_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    made: list[Mock] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made.append(Mock()) or made[-1])
    sleep = load("sleep")
    plain = sleep.PlainCopy(20 << 30, 5 << 30)
    assert plain.bytes == 20 << 30
    device, *host = made
    assert len(host) * sleep.PIECE == 5 << 30
    plain.out()
    plain.back()
    assert [piece.copy_.call_count for piece in host] == [4] * len(host)
    assert [call.args[0] for call in device.copy_.call_args_list] == host * 4
    small = sleep.PlainCopy(1 << 30, 5 << 30)
    assert small.bytes == len(small.host) * sleep.PIECE == 1 << 30


@pytest.mark.parametrize("fails", [False, True])
def test_the_savers_worker_ends_well_once_it_has_reported_and_not_before(fails: bool) -> None:
    pytest.importorskip("torch")
    worker = f"""
import atexit, os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import sleep
atexit.register(os._exit, 3)  # as the library ends a process
sleep.measure_saver = lambda size, cycles: {{"size": size // {0 if fails else 1}}}
sys.argv = "sleep.py --worker native --part bandwidth --saver --gib 1".split()
sys.exit(sleep.main())
"""
    done = subprocess.run([sys.executable, "-c", worker], capture_output=True, text=True)
    assert done.returncode == (3 if fails else 0), done.stderr
    assert ("ZeroDivisionError" in done.stderr) is fails
    assert ('benchmark-result: {"size": 1073741824}' in done.stdout) is not fails


def test_graphs_that_sleep_have_their_inputs_as_long_as_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    inputs: list[Any] = []

    def full(*_: Any, **__: Any) -> Any:
        x = torch.ones(3)
        inputs.append(weakref.ref(x))
        return x

    monkeypatch.setattr(torch, "full", full)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    graphs = load("sleep").make_graphs()
    assert len(graphs) == len(inputs) > 1
    assert all(x() is not None for x in inputs)


def test_memory_over_time_is_drawn_from_the_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    sleep = load("sleep")
    options = SimpleNamespace(out=tmp_path / "sleep.json", plot=tmp_path / "sleep.svg")
    assert not sleep.draw(options)
    assert "no samples" in capsys.readouterr().out
    samples = [
        {"seconds": i / 10, "engine": 9.0 * (i % 2), "trainer": 9.0, "other": 1.0, "asleep": 9.0}
        for i in range(4)
    ]
    one = {"machine": {"gpu": "a GPU"}, "halves_mib": 18.0, "both_mib": 27.0, "samples": samples}
    monkeypatch.setattr(sleep, "alternate_cases", lambda *_, **__: [{"esper_alloc": one}])
    assert sleep.measure_parts(options, ["picture"]) and sleep.draw(options)
    assert options.plot.read_text().rstrip().endswith("</svg>")


def test_a_wheel_of_the_saver_is_importable_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "saver.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("saver_of_a_wheel/__init__.py", "here = True")
    monkeypatch.setenv("PYTHONPATH", "")
    load("sleep").unpack(wheel, str(tmp_path / "unpacked"))
    command = [sys.executable, "-c", "import saver_of_a_wheel"]
    assert subprocess.run(command, timeout=1200).returncode == 0


def test_rates_of_sleep_leave_out_the_first_cycle() -> None:
    found = {"sleep": [100.0, 2.0, 2.0], "out": [50.0, 1.0, 1.0]}
    rates = load("sleep").rates(found, live=float(4 << 30), copied=float(3 << 30))
    assert rates == {"sleep_gib_s": 2.0, "out_gib_s": 3.0}


# --- recipes -------------------------------------------------------------------


def test_rows_of_recipes(tmp_path: Path) -> None:
    recipes, made = load("recipes"), results(tmp_path)
    figures = {"peak": 200.0, "reserved": 220.0, "ms": 10.0, "wrong": 0}
    for job in recipes.JOBS:
        cases = [case.name for case in recipes.CASES[job]]
        one = {name: {**figures, "peak": 200.0 + 100 * number} for number, name in enumerate(cases)}
        recipes.add_rows(made, job, [one])
    rows = rows_of(made)
    assert {peer for _, peer in rows} == {recipes.RECORD_STREAM, recipes.BY_HAND}
    peak = rows["reduce-scatter: peak active over base", recipes.RECORD_STREAM]
    assert (peak["ours"], peak["ratio"], peak["met"]) == (400.0, 2.0, False)
    assert rows["offloading: step time", recipes.RECORD_STREAM]["met"]
    assert rows["reduce-scatter: results that differ", recipes.BY_HAND]["met"]


def test_recipes_are_those_of_the_examples() -> None:
    recipes = load("recipes")
    for name, needed in (
        ("reduce_scatter", ("by_hand", "by_record_use", "one_stream", "measure", "SIDE")),
        ("offload_activations", ("Offload", "train_step", "LAYERS", "WIDTH", "ROWS")),
    ):
        assert all(hasattr(recipes.example(name), one) for one in needed)


# --- engines -------------------------------------------------------------------


def ran(losses: list[float], **figures: float) -> dict[str, Any]:
    usual = {"tokens_s": 1000.0, "peak_reserved_mib": 1000.0, "peak_allocated_mib": 800.0}
    return {"losses": losses, **usual, **figures}


def engine_rows(where: Path, engine: str, **cases: dict[str, Any]) -> dict[str, Any]:
    engines, made = load("engines"), results(where)
    names = {
        "native": engines.NATIVE, "ours": engines.OURS, "again": engines.AGAIN,
        "bare": engines.BARE, "registered": engines.REGISTERED,
        "native_registered": engines.NATIVE_REGISTERED,
    }  # fmt: skip
    engines.add_rows(made, engine, [{names[key]: one for key, one in cases.items()}])
    return {row["name"]: row for row in made.rows}


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
    ours: list[float], again: list[float], met: bool, tmp_path: Path
) -> None:
    rows = engine_rows(tmp_path, "ddp", native=ran([2.0, 1.0]), ours=ran(ours), again=ran(again))
    assert rows[f"ddp: {LOSSES}"]["met"] is met


@pytest.mark.parametrize(
    ("ours", "live", "met"),
    [
        (950.0, 800.0, True),
        (960.0, 800.0, False),
        (1000.0, 985.0, True),  # native has nothing to spare
        (1010.0, 985.0, False),
    ],
)
def test_engines_may_reserve_what_is_live(
    ours: float, live: float, met: bool, tmp_path: Path
) -> None:
    native = ran([1.0], peak_allocated_mib=live)
    rows = engine_rows(
        tmp_path, "ddp", native=native, ours=ran([1.0], peak_reserved_mib=ours), again=native
    )
    assert rows["ddp: peak reserved"]["met"] is met


def test_rows_of_engines(tmp_path: Path) -> None:
    slow = ran([1.0], tokens_s=980.0)
    both = {"native": ran([1.0]), "ours": ran([1.0], peak_reserved_mib=900.0), "again": ran([1.0])}
    rows = engine_rows(tmp_path, "fsdp2", **both, bare=slow)
    assert rows["fsdp2: tokens"]["met"] is True
    bare = "fsdp2, automatic uses, nothing kept: "
    assert rows[bare + LOSSES]["met"] is True
    assert rows[bare + "tokens"]["met"] is rows[bare + "peak reserved"]["met"] is None
    registered = {"registered": slow, "native_registered": ran([1.0], tokens_s=990.0)}
    rows = engine_rows(tmp_path, "tensor_parallel", **both, **registered)
    row = rows["tensor_parallel, registered: tokens"]
    assert row["peer_name"] == "native, registered" and row["ratio"] == pytest.approx(980 / 990)
    assert row["met"] is False


def test_engines_leave_out_what_there_is_no_time_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = load("engines")
    now = 0.0

    def run_worker(script: str, allocator: str, *_: Any) -> dict[str, Any]:
        nonlocal now
        now += 40.0
        if now == 80.0:
            raise engines.WorkerFailed("a rank died")
        return ran([1.0])

    monkeypatch.setattr(engines, "run_worker", run_worker)
    monkeypatch.setattr(engines.time, "monotonic", lambda: now)
    cases = engines.cases_of("tensor_parallel", [])
    (found,) = engines.measure_cases(cases, 1, end=150.0)
    assert list(found) == [engines.NATIVE, engines.AGAIN]
    said = capsys.readouterr().out
    assert "esper_alloc: a rank died" in said
    assert "esper_alloc, registered: left out, no time is left" in said


def test_engines_have_one_schedule_and_no_multicast() -> None:
    engines = load("engines")
    made = engines.lengths(200, 1024, 2048)
    assert made == engines.lengths(200, 1024, 2048)
    assert {1024, 2048} <= set(made) <= set(range(1024, 2049, 64))
    assert set(engines.lengths(20, 1024, 128)) == {128}
    for engine in engines.ENGINES:
        for case in engines.cases_of(engine, []):
            assert case.environment["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "tensor_parallel"])
def test_engines_train_on_the_cpu(engine: str, tmp_path: Path) -> None:
    out = tmp_path / "engines.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "engines.py"), "--cpu", "--steps", "3",
         "--engine", engine, "--out", str(out)],
        capture_output=True, text=True, timeout=2400,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows[f"{engine}: {LOSSES}"]["ours"] == 0.0
    assert "was not measured" not in done.stdout


# --- limits --------------------------------------------------------------------


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 7, 8, 9, 63, 64, 100])
@pytest.mark.parametrize("most", [1, 5, 64, 100])
def test_the_largest_that_fits_is_found(answer: int, most: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= answer

    assert load("limits").largest(fits, most) == min(answer, most)
    assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 1
    assert all(1 <= number <= most for number in asked)


def test_rows_of_limits(tmp_path: Path) -> None:
    limits, made = load("limits"), results(tmp_path)
    batches = {"esper_alloc": 10, "native": 8, "native, expandable": 10, "cudaMallocAsync": 9}
    limits.add_rows(made, "batch", "gpt2", [{case: {"batch": n} for case, n in batches.items()}])
    rounds = [
        {
            "esper_alloc": {"failed": 1, "step_ms": None},
            "native": {"failed": 1, "step_ms": None},
            "native, expandable": {"failed": 0, "step_ms": 20.0},
            "cudaMallocAsync": {"failed": 0, "step_ms": 22.0},
        }
    ]
    limits.add_rows(made, "tight", "gpt2", rounds)
    rows = rows_of(made)
    batch = rows["gpt2: largest batch within 20 GiB", limits.BEST]
    assert (batch["peer"], batch["met"]) == (10, True)
    failed = rows["gpt2, 99% of 20 GiB in use: failed", limits.BEST]
    assert (failed["ours"], failed["peer"], failed["met"]) == (1, 0, False)
    assert not any("step time" in name for name, _ in rows)
    rounds[0]["esper_alloc"] = {"failed": 0, "step_ms": 21.0}
    fine = results(tmp_path)
    limits.add_rows(fine, "neighbour", "gpt2", rounds)
    rows = rows_of(fine)
    assert rows["gpt2, beside a neighbour: failed", limits.BEST]["met"] is True
    assert rows["gpt2, beside a neighbour: step time", limits.BEST]["peer"] == 20.0


# --- pipelines -------------------------------------------------------------------


def pipeline_figures(step: float, active: float, reserved: float, wrong: int = 0) -> dict[str, Any]:
    return {"step_ms": step, "peak_over_base_mib": active, "reserved_mib": reserved,
            "wrong": wrong, "by_layer": [active]}  # fmt: skip


def test_rows_of_pipelines(tmp_path: Path) -> None:
    pipeline, made = load("pipeline"), results(tmp_path)
    one = {case.name: pipeline_figures(10.0, 384, 400) for case in pipeline.CASES}
    one[pipeline.OURS_MARKED] = pipeline_figures(9.9, 448, 528)
    one[pipeline.VIEWS] = pipeline_figures(10.2, 449, 529)
    one[pipeline.AUTOMATIC] = pipeline_figures(10.0, 7872, 7900, 1)
    pipeline.add_rows(made, "small", [one, one])
    rows = rows_of(made)
    wrong = pipeline.WRONG[0]
    for title, met in (
        ("", True), ("views, grad mode: ", False), ("record_stream: ", True),
    ):  # fmt: skip
        for name in ("step time", "peak active over base", "reserved over base"):
            assert rows[title + name, pipeline.RECIPE]["met"] is met, title + name
    assert rows["record_stream: " + wrong, pipeline.RECIPE]["met"] is True
    assert rows["automatic uses: peak active over base", pipeline.RECIPE]["met"] is False
    assert rows["automatic uses: " + wrong, pipeline.RECIPE]["met"] is False
    assert rows["peak active over base", "native, record_stream"]["ours_by_layer"] == [448]
    large = {case.name: pipeline_figures(10.0, 2000, 2000) for case in pipeline.CASES}
    large[pipeline.OURS_MARKED] = pipeline_figures(10.0, 2512, 9000)
    large[pipeline.VIEWS] = pipeline_figures(11.0, 2513, 9000, 1)
    made = results(tmp_path)
    pipeline.add_rows(made, "large", [large, large])
    rows = rows_of(made)
    for title, met in (("", True), (", views", False), (", automatic uses", True)):
        for name in ("step time", "peak active over base", wrong):
            row = rows[f"layers of 512 MiB{title}: {name}", pipeline.RECIPE]
            assert row["met"] is met, row
    assert not any("by_layer" in key for row in made.rows for key in row)


def test_large_layers_have_as_many_mib_as_their_rows_say() -> None:
    pipeline = load("pipeline")
    for size, mib in (("small", 32), ("large", pipeline.LARGE_MIB)):
        layers, width, _ = pipeline.SHAPES[size][False]
        assert width * width * 2 == mib * pipeline.MIB
        assert layers * mib <= 16 << 10  # record_stream holds the layers of six steps


def least_figures(failed: int, step: float | None, reserved: int = 100 << 20) -> dict[str, Any]:
    return {"machine": ABOUT, "failed": failed, "why": "no memory" if failed else None,
            "step_ms": step, "reserved": reserved, "retries": failed, "ooms": failed}  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_pipelines_run_within_the_least_that_was_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    least, out = load("least"), tmp_path / "least.json"
    asked: list[dict[str, tuple[str, ...]]] = []

    def turns(script: str, cases: Any, rounds: int, **how: Any) -> list[dict[str, Any]]:
        asked.append({case.name: case.args for case in cases})
        ours = least_figures(int(fails and len(cases) > 1), None if fails else 9.0)
        names = [case.name for case in cases]
        return [{name: least_figures(1, None) if name == least.PEER else ours for name in names}]

    monkeypatch.setattr(least, "nothing_measurable", lambda: False)
    monkeypatch.setattr(least, "turns_of_children", turns)
    command = ["least.py", "--pipeline", "fsdp", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert least.main() == int(fails)
    first, then = asked
    assert list(first) == [least.LEAST] and "--limit" not in first[least.LEAST]
    limit = ("--limit", str(105 << 20))
    assert len(then) == 3 and all(args[-2:] == limit for args in then.values())
    rows = {(row["name"], row["peer_name"]): row for row in json.loads(out.read_text())["rows"]}
    title = "fsdp, within 1.05 of what an allowance of 0 reserves"
    for case in ("", ", allowance 0"):
        row = rows[f"{title}{case}: failed", least.PEER]
        assert (row["ours"], row["peer"], row["met"]) == (fails, 1, not fails)
    assert ((f"{title}: step time", least.LEAST) in rows) is not fails


def test_allowances_are_compared_with_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowances, out = load("allowances"), tmp_path / "allowances.json"
    asked: dict[str, dict[str, str]] = {}

    def turns(script: str, cases: Any, rounds: int, **how: Any) -> list[dict[str, Any]]:
        asked.update({case.name: dict(case.environment) for case in cases})
        figures = {"step_ms": 2.0, "malloc_us": 1.0, "stall_us": 1.0, "stall_total_ms": 1.0,
                   "peak_over_base_mib": 448.0, "reserved_mib": 448.0, "held_back": 3,
                   "held_back_seconds": 0.25, "held_back_in_vain": 0}  # fmt: skip
        return [{case.name: {"machine": ABOUT, **figures} for case in cases}]

    monkeypatch.setattr(allowances, "nothing_measurable", lambda: False)
    monkeypatch.setattr(allowances, "turns_of_children", turns)
    command = ["allowances.py", "--job", "churn", "--allowance", "off", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert allowances.main() == 0
    assert asked == {
        "allowance 128MiB": {"ESPER_ALLOC_ALLOWANCE": "128MiB"},
        "allowance off": {"ESPER_ALLOC_ALLOWANCE": "off"},
    }
    rows = {(row["name"], row["peer_name"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 9
    row = rows["churn, allowance 128MiB: the host was held back, all told", "allowance off"]
    assert (row["ours"], row["peer"], row["unit"]) == (0.25, 0.25, "s")


def test_without_the_least_peak_pipelines_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    least = load("least")
    monkeypatch.setattr(least, "nothing_measurable", lambda: False)
    monkeypatch.setattr(least, "turns_of_children", lambda *_: [{}])
    monkeypatch.setattr(sys, "argv", ["least.py", "--out", str(tmp_path / "least.json")])
    assert least.main() == 1
    assert "fsdp: an allowance of 0 did not go through without a limit" in capsys.readouterr().out


def test_no_job_begins_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = load("jobs")
    begun: list[str] = []
    now = [0.0]

    def turns(
        script: str, cases: Any, rounds: int, *, seconds: float, each: Any
    ) -> list[dict[str, Any]]:
        begun.append(cases[0].args[1])
        assert seconds == 50.0  # half of what is left
        now[0] += 100.0
        return [{}, {}]

    monkeypatch.setattr(jobs, "nothing_measurable", lambda: False)
    monkeypatch.setattr(jobs, "turns", turns)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    command = "jobs.py --job moe --job packed --rounds 5 --seconds 100 --out".split()
    monkeypatch.setattr(sys, "argv", [*command, str(tmp_path / "jobs.json")])
    assert jobs.main() == 1
    assert begun == ["moe"]
    assert "packed: not begun, 100 s are over" in capsys.readouterr().out


def test_jobs_that_are_cut_off_leave_their_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, out = load("jobs"), tmp_path / "jobs.json"
    once = {"machine": ABOUT, "beyond_reserved_mib": 5.0, "smi_beyond_reserved_mib": 6.0}
    passed = {name: {**worker(2000, 2010, 10.0), **once} for name in ("esper_alloc", "native")}

    def turns(*_: Any, each: Any, **__: Any) -> None:
        for count in range(2, 5):  # what starting them said, the first pass, and later ones
            each([{}, *[passed] * (count - 1)])
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "nothing_measurable", lambda: False)
    monkeypatch.setattr(jobs, "turns", turns)
    monkeypatch.setattr(sys, "argv", ["jobs.py", "--job", "ppo", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        jobs.main()
    rows = {(row["name"], row["peer_name"]): row for row in json.loads(out.read_text())["rows"]}
    assert rows["ppo: step time", jobs.FASTEST]["rounds"] == 2
    assert rows["ppo: peak reserved", jobs.LEAST]["met"] is True


# --- outputs of graphs -----------------------------------------------------------


@pytest.mark.parametrize(
    "broken, error, met",
    [("", "has been overwritten", True), ("", "", False), ("512", "has been overwritten", False)],
)
def test_the_simulator_must_fail_without_the_wrapper_and_run_with_it(
    broken: str,
    error: str,
    met: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    detailed = load("benchmark_detailed")
    figures = {"eager": 3.0, "compiled": 1.0, "graphs": 2.0, "bytes": 8, "image bytes": 8}
    about = {"gpu": "none", "driver": "none", "torch": "none"}

    def worker(dtype: str, options: Any, what: str, allocator: str | None = None) -> dict[str, Any]:
        sizes = list(map(str, options.sizes))
        if what == "fail":
            return {"machine": about, "errors": dict.fromkeys(sizes, error)}
        ran = [size for size in sizes if size != broken or dtype == "fp32"]
        return {"machine": about, "figures": {size: figures for size in ran}}

    monkeypatch.setattr(detailed, "nothing_measurable", lambda: False)
    monkeypatch.setattr(detailed, "worker", worker)
    monkeypatch.setattr(detailed, "add_rows", lambda *_: None)
    monkeypatch.setattr(detailed, "sentence", lambda _: "none")
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["benchmark_detailed.py", "--sizes", "256,512", "--out", str(file)]
    )
    assert detailed.main() == (0 if met else 1)
    rows = {row["name"].split(":")[0]: row["met"] for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["simulator fp32", "simulator fp64"]
    assert rows["simulator fp64"] is met
    assert rows["simulator fp32"] is (met or broken != "")


class FakeDevice:
    """A device of so many free bytes, of which the largest gap is half."""

    def __init__(self, free: int) -> None:
        self.bytes_free, self.next = free, 0
        self.taken: dict[int, int] = {}

    def free(self) -> int:
        return self.bytes_free

    def take(self, size: int) -> int | None:
        if size > max(self.bytes_free // 2, 4 << 20):
            return None
        self.bytes_free -= size
        self.next += 1
        self.taken[self.next] = size
        return self.next

    def give(self, address: int) -> None:
        self.bytes_free += self.taken.pop(address)


def test_a_neighbour_leaves_what_it_is_told_to() -> None:
    gib, mib = 1 << 30, 1 << 20
    device = FakeDevice(80 * gib)
    neighbour = load("neighbour").Neighbour(device)
    for wanted in (10 * gib, 64 * mib, 3 * gib + 5 * mib, 90 * gib):
        held = neighbour.leave(wanted)
        assert held == sum(device.taken.values()) == 80 * gib - device.free()
        assert min(wanted, 80 * gib) <= device.free() < wanted + 4 * mib or held == 0
    assert held == 0


def test_a_neighbour_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = load("neighbour")

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(neighbour.ctypes, "CDLL", missing)
    with pytest.raises(neighbour.DriverError, match="libcuda"):
        neighbour.Device()


# --- replayed peaks ------------------------------------------------------------


def test_replayed_peaks_are_a_table_and_a_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = load("replay_peaks")
    monkeypatch.delenv("ESPER_TRACES", raising=False)
    traces = sorted(map(str, (ROOT / "examples" / "traces").glob("*.pickle.gz")))
    monkeypatch.setattr(
        sys, "argv", ["replay_peaks.py", *traces, "--out", str(tmp_path / "peaks.json")]
    )
    assert peaks.main() == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:4]] == ["fsdp_like", "gpt_train", "all"]
    assert re.match(r"fsdp_like +1,056.0 MiB( +\d\.\d{4}){2,}$", out[1])
    found = json.loads((tmp_path / "peaks.json").read_text())
    assert len(found["rows"]) == 3 * len(peaks.replay.SEGMENTS)
    ratios = {one["name"]: one["ratio"] for one in found["rows"]}
    for name, ratio in ratios.items():
        if name.endswith(" classic"):
            assert ratio > 1
        else:  # pages are as much as is wanted, or hardly more
            assert 1 <= ratio < ratios[name.replace(" mapped", " classic")]


def test_the_sum_of_recordings_is_weighted_by_their_size() -> None:
    peaks = load("replay_peaks")
    lines = [peaks.Line("a", 100, {"p": 110}), peaks.Line("b", 300, {"p": 450})]
    assert peaks.total(lines).ratio("p") == pytest.approx(1.4)


def test_a_file_that_is_no_snapshot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.pickle"
    path.write_bytes(b"nothing")
    monkeypatch.setattr(sys, "argv", ["replay_peaks.py", str(path)])
    assert load("replay_peaks").main() == 2
    assert str(path) in capsys.readouterr().out


def test_of_traces_with_one_name_the_first_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gpt_train", "other"):
        (tmp_path / f"{name}.pickle.gz").write_bytes(b"")
    monkeypatch.setenv("ESPER_TRACES", str(tmp_path))
    found = load("replay_peaks").traces()
    names = [path.name.split(".")[0] for path in found]
    assert names[:2] == ["fsdp_like", "gpt_train"] and names[-1] == "other"
    assert len(set(names)) == len(names) == 9
    assert (
        found[1].parent == ROOT / "examples" / "traces"
        and found[-2].parent == ROOT / "tests" / "traces"
    )


# --- times of malloc -----------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "answer"),
    [(1, 0.999, 1), (2, 0.5, 1), (1000, 0.999, 999), (1001, 0.999, 1000), (3, 0.5, 2)],
)
def test_percentiles(count: int, share: float, answer: int) -> None:
    values = list(range(count, 0, -1))
    assert load("malloc_times").percentile(values, share) == answer


def test_rows_of_malloc_times(tmp_path: Path) -> None:
    times, made = load("malloc_times"), results(tmp_path)
    runs = [([100] * 999 + [9000], [50] * 900), ([200] * 999 + [7000], [70] * 900)]
    fast = times.figures(runs, "whole")
    assert fast == {
        "whole_median_us": 0.15, "whole_slow_us": 0.15, "whole_sum_us": 157.85,
        "whole_inside_us": 157.85 + 54,
    }  # fmt: skip
    slow = {key: 2 * value for key, value in fast.items()}
    warm = times.figures([([50, 60], [])], "warm")
    rounds = [
        {
            "esper_alloc": {"jobs": {"gpt": {**fast, **warm}}},
            "native": {"jobs": {"gpt": {**slow, **warm}}},
        }
    ]
    times.add_rows(made, rounds)
    rows = rows_of(made)
    row = rows["gpt: malloc, the whole job, 99.9th percentile", "native"]
    assert (row["ratio"], row["goal"], row["met"]) == (0.5, 1.5, True)
    assert rows["gpt: malloc, the whole job, all together", "native"]["goal"] == 1.0
    assert rows["gpt: malloc and free, the whole job, all together", "native"]["ours"] == 211.85
    assert {name for _, name in rows} == {"native"}


def test_only_whole_jobs_on_one_device_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = load("malloc_times")
    traces = ROOT / "tests" / "traces"
    paths = [traces / f"{name}.pickle.gz" for name in ("expandable", "two_devices")]
    found = times.whole_jobs(paths)
    assert list(found) == ["expandable"] and found["expandable"].slots > 100
    (tmp_path / "no.pickle").write_bytes(b"nothing")
    for file, said in ((paths[1], "whole job"), (tmp_path / "no.pickle", "no.pickle")):
        monkeypatch.setattr(sys, "argv", ["malloc_times.py", str(file)])
        assert times.main() == 2
        assert said in capsys.readouterr().out


# --- pair, threads and churn -----------------------------------------------------


def test_rows_of_pair(tmp_path: Path) -> None:
    pair, made = load("pair"), results(tmp_path)
    ours, slower = (dict.fromkeys(pair.GOALS, ns) for ns in (80.0, 100.0))
    measured = {"esper_alloc": ours, "native": slower, "cudaMallocAsync": slower}
    pair.add_rows(made, [measured])
    rows = rows_of(made)
    assert {peer for _, peer in rows} == {"native", "cudaMallocAsync"}
    assert rows["raw_alloc + raw_delete, 1 MiB", "native"]["met"] is False
    assert rows["raw_alloc + raw_delete, 1 MiB", "cudaMallocAsync"]["goal"] is None
    assert made.complete is False  # the other of native's modes has goals, too


def test_rows_of_overlap_without_marks(tmp_path: Path) -> None:
    module, made = load("overlap"), results(tmp_path)
    one = {
        case: {"step_ms": step, "reserved_mib": mib}
        for case, step, mib in (
            (module.NATIVE_MARKS, 10.0, 4000.0),
            (module.DEFAULT, 10.1, 2000.0),
            (module.RECORD_STREAM, 10.2, 2200.0),
            (module.AUTOMATIC, 10.0, 3000.0),
        )
    }
    module.add_rows(made, "small", list(one), [one, one])
    rows = rows_of(made)
    met = {
        title: tuple(
            rows[f"small{title}: {name}", module.NATIVE_MARKS]["met"]
            for name in ("step time", "peak reserved")
        )
        for title in ("", ", record_stream", ", automatic uses")
    }
    assert met == {
        "": (True, True), ", record_stream": (False, True), ", automatic uses": (True, False),
    }  # fmt: skip


def test_rows_of_automatic_uses(tmp_path: Path) -> None:
    module, made = load("automatic_uses"), results(tmp_path)
    names = [f"{name}, one stream" for name in module.ONE_STREAM]
    names += [f"{name}, {where}" for where in ("at home", "elsewhere") for name in module.OPERATORS]
    names.append("add, dropped")
    ours = {f"{name}, {kind}": 1000.0 for name in names for kind in module.KINDS}
    ours["add, one stream, automatic"] = 1011.0
    ours["view, at home, automatic"] = 1150.0
    ours["view, elsewhere, automatic"] = 1151.0
    for step, automatic in ((module.ONE_STREAM_STEP, 60.5), (module.STEP, 61.0)):
        ours |= {f"{step}, marked": 60.0, f"{step}, automatic": automatic}
    module.add_rows(made, [{module.OURS: {"figures": ours}}])
    rows = {name: row for (name, _), row in rows_of(made).items()}
    assert list(rows) == [*names, module.ONE_STREAM_STEP, module.STEP] and made.complete
    missed = [name for name, row in rows.items() if row["met"] is False]
    assert missed == ["add, one stream", "view, elsewhere", module.STEP]
    assert rows[module.STEP]["unit"] == "ms"
    assert rows["add, dropped"]["goal"] is None


def test_rows_of_fences(tmp_path: Path) -> None:
    module, made = load("fence"), results(tmp_path)
    one = {"no audit": {"step_ms": 10.0, "mib": 100.0}, "audit": {"step_ms": 20.0, "mib": 100.0}}
    one["fence"] = {"step_ms": 50.0, "mib": 300.0}
    module.add_rows(made, [one, one])
    ratios = {name: row["ratio"] for (name, _), row in rows_of(made).items()}
    assert ratios == {
        "step, audit": 2, "step, fence": 5, "peak reserved, audit": 1, "peak reserved, fence": 3,
    }  # fmt: skip
    assert made.complete and {peer for _, peer in rows_of(made)} == {"no audit"}


def test_automatic_uses_and_marked_ones_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("automatic_uses")
    monkeypatch.setattr(module, "REPEATS", 3)
    monkeypatch.setattr(module, "CALLS", 2)
    chosen: list[str] = []
    calls: list[str] = []
    found = module.by_turns(chosen.append, lambda: calls.append(chosen[-1]), lambda: None)
    assert set(found) == set(module.KINDS) and all(ns > 0 for ns in found.values())
    assert chosen == ["automatic", "marked", "marked", "automatic"] * 2
    assert calls.count("marked") == calls.count("automatic") == 8
    drained: list[int] = []
    monkeypatch.setattr(module, "STEP_REPEATS", 1)
    calls.clear()
    module.by_turns(
        chosen.append,
        lambda: calls.append(chosen[-1]),
        lambda: drained.append(len(calls)),
        whole=True,
    )
    assert drained == [0, 5, 5, 5, 10, 10, 10, 15, 15, 15, 20, 20]  # after each measurement, too


def test_rows_of_the_auditor(tmp_path: Path) -> None:
    module, made = load("auditor"), results(tmp_path)
    bug, race = ["freed-in-use", 9], ["race", 9]
    audit = {"a_wrong": [[bug], [bug]], "b_wrong": [[bug], []], "a_right": [[], []]}
    sanitizer = {"a_wrong": [[bug], []], "b_wrong": [[bug], [race]], "a_right": [[], [race]]}
    module.add_rows(
        made,
        {
            "step, ours": [{"audited": 290.0, "alone": 100.0}],
            "step, native": [{"audited": 310.0, "alone": 100.0}],
            "poison": [{"audited": 900.0, "alone": 100.0}],
            "memory": [{"late": 109.0, "early": 100.0}],
            "corpus": [{"audit": audit, "sanitizer": sanitizer}],
        },
    )
    rows = {name: row for (name, _), row in rows_of(made).items()}
    assert {name: (row["ours"], row["peer"]) for name, row in rows.items() if ":" in name} == {
        "missed: a_wrong": (0, 1),
        "missed: b_wrong": (1, 0),
        "reports: a_right": (0, 1),
    }
    assert rows["bugs missed, of 2"]["ours"] == 1
    assert rows["correct programs reported, of 1"]["peer"] == 1
    missed = [name for name, row in rows.items() if row["met"] is False]
    assert missed == ["GPT-2 step under native, audited", "missed: b_wrong", "bugs missed, of 2"]
    assert rows["GPT-2 step, audited with poison"]["goal"] is None
    assert rows["host memory after 1,000,000 operators"]["met"]


def test_the_corpus_of_the_auditor_is_what_is_run() -> None:
    module = load("auditor")
    names = module.names()
    assert len(names) > 40 and not any(name.startswith("marked/") for name in names)
    assert all((module.PROGRAMS.parent / "corpus" / f"{name}.py").is_file() for name in names)


def test_rows_of_threads(tmp_path: Path) -> None:
    threads, made = load("threads"), results(tmp_path)
    keys = [
        threads.key_of(count, size, handing)
        for size in threads.SIZES for handing in threads.KINDS for count in threads.THREADS
        if count > handing
    ]  # fmt: skip
    native = dict.fromkeys(keys, 0.5)
    ours = {key: 12.0 if "handed on" in key else 14.0 for key in keys}
    threads.add_rows(made, [{"esper_alloc": {"figures": ours}, "native": {"figures": native}}] * 2)
    rows = rows_of(made)
    assert len(rows) == len(keys) == 10
    pairs, handed = (
        rows[f"{name}, 4 KiB, 16 threads", "native"] for name in ("pairs", "pairs, handed on")
    )
    assert (pairs["ratio"], pairs["goal"], pairs["met"]) == (28.0, 30.0, False)
    assert (handed["ratio"], handed["goal"], handed["met"]) == (24.0, 20.0, True)
    assert rows["pairs, 4 KiB, 4 threads", "native"]["goal"] is None
    others = results(tmp_path)
    threads.add_rows(
        others, [{"esper_alloc": {"figures": ours}, "RMM's pool": {"figures": native}}]
    )
    assert {peer for _, peer in rows_of(others)} == {"RMM's pool"}
    assert not any(row["goal"] for row in others.rows) and others.complete is False


def test_rows_of_churn(tmp_path: Path) -> None:
    churn, made = load("churn"), results(tmp_path)
    names = [one.name for one in churn.SETTINGS]
    assert names[0] == "100 live blocks up to 8 MiB"
    assert names[-1] == "1,000,000 live blocks up to 64 KiB"
    native = {f"{name}: {what}": 1000.0 for name in names for what in ("ns", "reserved")}
    ours = {**native, **{f"{name}: ns": 100.0 * (i + 1) for i, name in enumerate(names)}}
    churn.add_rows(made, [{"esper_alloc": {"figures": ours}, "native": {"figures": native}}])
    rows = rows_of(made)
    met = [rows[f"free and malloc among {name}", "native"]["met"] for name in names]
    assert met == [True, True, True, False, False]
    growth = rows["free and malloc among 100,000 live blocks up to 8 MiB, growth", "among 100"]
    assert growth["goal"] == pytest.approx(2.5) and growth["met"] is False
    # A device on which the largest settings had no room has no rows of them.
    few = results(tmp_path)
    for figures in (ours, native):
        for name in names[3:]:
            del figures[f"{name}: ns"], figures[f"{name}: reserved"]
    churn.add_rows(few, [{"esper_alloc": {"figures": ours}, "native": {"figures": native}}])
    assert len(few.rows) == 6


def test_churn_asks_an_allocator_without_pytorchs_statistics_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    churn, torch = load("churn"), pytest.importorskip("torch")
    reserved = iter([2048.0, float("nan")])  # of the first two settings
    emptied: list[int] = []

    class Loops:
        @staticmethod
        def churn(live: int, *how: float) -> tuple[list[float], float, float]:
            return [3.0, 1.0, 2.0], 1024.0, next(reserved)

    monkeypatch.setattr(load("loops"), "load", lambda name: Loops)
    monkeypatch.setattr(churn, "use_allocator", lambda name: None)
    monkeypatch.setattr(churn, "machine", lambda: {})
    monkeypatch.setattr(churn, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(churn, "memory_figures", lambda: {"reserved_mib": 4096 / 2**20})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    found = churn.measure("RMM's pool", 1000, 5)["figures"]
    few, more = (f"{one.name}: " for one in churn.SETTINGS[:2])
    assert found == {
        f"{few}ns": 2.0,
        f"{few}reserved": 2.0,
        f"{more}ns": 2.0,
        f"{more}reserved": 4.0,
    }
    assert emptied == [1, 1]


class PagesDriver:
    """Stands for the driver: what is made, and where it is mapped and open."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.opened: set[int] = set()
        self.entered: set[int] = set()
        self.most_mapped = self.last = 0

    def new(self) -> int:
        self.last += 1 << 40
        return self.last

    def enter(self) -> None:
        self.entered.add(threading.get_ident())

    def reserve(self, size: int) -> int:
        self.reserved[address := self.new()] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size

    def make(self, size: int) -> int:
        self.pages[page := self.new()] = size
        return page

    def release(self, page: int) -> None:
        assert page not in self.mapped.values()
        del self.pages[page]

    def map(self, address: int, size: int, page: int) -> None:
        assert address not in self.mapped and self.pages[page] == size
        self.mapped[address] = page
        self.most_mapped = max(self.most_mapped, len(self.mapped))

    def open(self, address: int, size: int) -> None:
        pages = {at for at in self.mapped if address <= at < address + size}
        assert (
            pages
            and not pages & self.opened
            and sum(self.pages[self.mapped[at]] for at in pages) == size
        )
        self.opened |= pages

    def unmap(self, address: int, size: int) -> None:
        assert self.pages[self.mapped.pop(address)] == size
        self.opened.discard(address)

    def alloc(self, size: int) -> int:
        self.blocks[address := self.new()] = size
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]


def test_pages_are_measured_and_all_are_given_back(tmp_path: Path) -> None:
    pages, driver, made = load("pages"), PagesDriver(), results(tmp_path)
    found = pages.measure_size(driver, 4096, 8)
    assert not (driver.reserved or driver.blocks or driver.pages or driver.mapped or driver.opened)
    assert driver.most_mapped == 9  # a page that moves is at both addresses for a while
    assert len(driver.entered) == pages.THREADS and all(us > 0 for us in found.values())
    times = {"make": 8.0, "map": 0.5, "open": 22.0, "unmap": 15.0, "release": 5.0, "move": 40.0,
             "alloc": 61.0, "free": 40.0, "open again": 20.0, "open at once": 20.0,
             "open by threads": 10.0}  # fmt: skip
    assert set(times) == set(found)
    pages.add_rows(made, "8 MiB", [times, times])
    rows = {name: (row["ours"], row["ratio"]) for (name, _), row in rows_of(made).items()}
    assert rows["a new page of 8 MiB"] == (30.5, 0.5)
    assert rows["giving back a page of 8 MiB"] == (20.0, 0.5)
    assert rows["moving a page of 8 MiB"][0] == 40.0
    assert rows["opening a page of 8 MiB again"] == (20.0, 20 / 22)
    assert rows["opening pages of 8 MiB again, at once"] == (20.0, 1.0)
    assert rows["opening pages of 8 MiB again, four threads"] == (10.0, 0.5)
    assert rows["to open a page of 8 MiB"][0] == 22.0
    assert all(row["goal"] is None for row in made.rows)


class SlowPagesDriver(PagesDriver):
    """Lets other threads work when it has made a page."""

    def make(self, size: int) -> int:
        page = super().make(size)
        time.sleep(0.0005)
        return page


class Launcher:
    """Stands for launches, and notes how many pages there were at each."""

    def __init__(self, driver: PagesDriver) -> None:
        self.driver = driver
        self.waits = 0
        self.beside: list[int] = []

    def launch(self) -> None:
        self.beside.append(len(self.driver.pages))

    def wait(self) -> None:
        self.waits += 1


def test_launches_are_timed_while_another_thread_makes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, driver, made = load("mapping_threads"), SlowPagesDriver(), results(tmp_path)
    monkeypatch.setattr(threads, "LAUNCHES", 300)
    launcher = Launcher(driver)
    found = threads.measure(driver, launcher, 600.0)
    assert not (driver.reserved or driver.pages or driver.mapped or driver.opened)
    assert driver.entered and threading.get_ident() not in driver.entered
    assert not any(launcher.beside[:300]) and any(launcher.beside[300:])
    assert launcher.waits >= 6 and all(us > 0 for us in found.values())
    threads.add_rows(made, [found, found])
    assert len(rows_of(made)) == 6 and all(row["goal"] is None for row in made.rows)


def test_launches_count_only_while_pages_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, launcher = load("mapping_threads"), Launcher(PagesDriver())
    monkeypatch.setattr(threads, "LAUNCHES", 4)
    answers = iter([True, True, True, False, False] + [True] * 6)  # before and after launches
    assert len(threads.launches(launcher, lambda: next(answers), 600.0)) == 4
    assert len(launcher.beside) == 6  # during the second pages ended, the third had none


def test_a_mapping_thread_that_fails_says_so() -> None:
    threads, driver = load("mapping_threads"), PagesDriver()
    driver.make = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError, match="not callable"), threads.Mapper(driver, 4096):
        pass
    assert not driver.reserved


def test_live_blocks_take_what_is_expected() -> None:
    churn = load("churn")
    uniform = churn.Setting(1000, 16, 1)
    assert uniform.expected_bytes() / 1000 == pytest.approx(
        (2**16 - 2**9) / (7 * 0.6931472), rel=1e-3
    )
    assert 40 < churn.MANY.expected_bytes() / 2**30 < 45


# --- growth --------------------------------------------------------------------

PRINTED = "100 20 100.0 60000 200000 1000 2000\n1000 100 150.0 140800 300000 10000 12000\n"


def test_what_growth_prints_is_read() -> None:
    growth = load("growth")
    first, second = growth.parse(PRINTED)
    assert (first.live, first.ns, first.metadata_per_block) == (100, 100.0, 500)
    assert (second.metadata_per_block, second.reserved) == (128, 12000)
    for wrong in ("", "growth: ESPER_OUT_OF_MEMORY", "1 2 3"):
        with pytest.raises(growth.GrowthError, match="printed"):
            growth.parse(wrong)
    assert growth.parse_drift("  early 1.5000, late 1.6000\n") == (1.5, 1.6)
    with pytest.raises(growth.GrowthError):
        growth.parse_drift("a check failed")


def test_rows_of_growth(tmp_path: Path) -> None:
    growth, made = load("growth"), results(tmp_path)
    many = "100000 10000 240.0 16500000 20000000 1 1\n"
    rounds = [growth.parse(PRINTED + many), growth.parse(PRINTED + many.replace("240", "260"))]
    growth.add_rows(made, rounds)
    rows = {row["name"]: row for row in made.rows}
    cost = rows["free and malloc among 100,000 live blocks, simulated device, classic segments"]
    assert (cost["ours"], cost["peer"]) == (250, 150)
    assert cost["goal"] == pytest.approx(5 / 3) and cost["met"] is True
    metadata = rows["metadata a block, 100,000 live blocks, classic segments"]
    assert (metadata["ours"], metadata["goal"], metadata["met"]) == (150, 128, False)
    assert rows["metadata a block, 1,000 live blocks, classic segments"]["goal"] is None


def test_growth_is_drawn_where_matplotlib_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth, made = load("growth"), results(tmp_path)
    for kind in growth.KINDS:
        growth.add_rows(made, [growth.parse(PRINTED)], kind)
    rows = made.rows
    for kind in growth.KINDS:
        assert growth.line(rows, growth.PANELS[0][1], kind) == {100: 100, 1000: 150}
        assert growth.line(rows, growth.PANELS[1][1], kind) == {100: 500, 1000: 128}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(growth.GrowthError, match="pip install matplotlib"):
            growth.draw(rows, tmp_path / "growth.svg")
    pytest.importorskip("matplotlib")
    for name in ("growth.svg", "again.svg"):
        growth.draw(rows, tmp_path / name)
    drawn = (tmp_path / "growth.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert drawn.rstrip().endswith("</svg>")


def test_streams_are_drawn_where_matplotlib_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cifar_envs = load("cifar_envs")
    events = [
        [0, stream, 100.0 * stream, 50.0, kind]
        for stream in range(3)
        for kind in ("gather", "train")
    ]
    panels = {"Plain PyTorch, one GPU": events, "esper_alloc, one GPU": []}
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        cifar_envs.draw(panels, tmp_path / "none.svg")
    assert "python -m pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "none.svg").exists()
    pytest.importorskip("matplotlib")
    for name in ("envs.svg", "again.svg"):
        cifar_envs.draw(panels, tmp_path / name)
    drawn = (tmp_path / "envs.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert drawn.rstrip().endswith("</svg>")


def test_choices_name_what_the_core_has_written_into_it() -> None:
    """Or the script would measure nothing, and say so only when it is run."""
    choices = load("choices")
    for choice in choices.CHOICES:
        for value in choice.alternatives:
            source = choice.source(value)
            assert choice.text.format(value) in source and value != choice.chosen
    gone = dataclasses.replace(choices.CHOICES[0], chosen="3 * MIB")
    with pytest.raises(choices.ChoiceError, match="no more"):
        gone.source("1 * MIB")


@pytest.mark.slow
def test_a_choice_is_replayed(tmp_path: Path) -> None:
    """A core with pages of 2 MiB maps more of them."""
    choices = load("choices")
    try:
        choices.compiler()
    except choices.GrowthError as error:
        pytest.skip(str(error))
    [large] = [choice for choice in choices.CHOICES if choice.name == "largest page"]
    files = [ROOT / "examples" / "traces" / "gpt_train.pickle.gz"]
    ours = choices.replayed(None, "what it has", choices.MAPPED, files)
    other = choices.replayed(large, "2 << 20", choices.MAPPED, files)
    made = results(tmp_path)
    choices.add_rows(made, large, "2 << 20", ours, other)
    ratio, pages = made.rows
    assert ratio["ours"] >= 1 and ratio["peer"] >= 1
    assert pages["ours"] < pages["peer"]


@pytest.mark.slow
def test_growth_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growth = load("growth")
    try:
        growth.compiler()
    except growth.GrowthError as error:
        pytest.skip(str(error))
    out = tmp_path / "growth.json"
    arguments = ["--out", out, "--most", 10_000, "--operations", 20_000, "--rounds", 1]
    monkeypatch.setattr(sys, "argv", ["growth.py", *map(str, arguments)])
    growth.main()  # the goals are for a quiet machine and a million operations
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 9
    assert 64 < rows["metadata a block, 10,000 live blocks, classic segments"]["ours"] <= 128
    monkeypatch.setenv("CC", "no-such-compiler")
    assert growth.main() == 1


def test_the_long_run_names_tests_that_exist() -> None:
    source = (ROOT / "tests" / "core" / "whole" / "test_drift.c").read_text()
    assert re.findall(r"^TEST\((\w+)\)", source, re.M) == list(load("growth").DRIFT_TESTS.values())
