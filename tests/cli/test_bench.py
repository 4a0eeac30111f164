"""``python -m esper_alloc bench`` without a GPU: its messages, its table, its plot."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pictures import assert_no_title_is_cut_or_covered
from pytest import CaptureFixture, MonkeyPatch

from esper_alloc.cli import bench, workers
from esper_alloc.cli.main import main


def command(*arguments: str) -> int:
    return main(["bench", *arguments])


def process(factor: float) -> dict[str, Any]:
    figures: dict[str, Any] = {figure.key: 100 * factor for figure in bench.FIGURES}
    return {"gpu": "a GPU", "torch": "2.11.0", **figures}


class Machine:
    """One on which ours takes half as much as the others."""

    def __init__(self) -> None:
        self.started: list[tuple[str, bool]] = []
        self.broken: dict[str, str] = {}  # what allocators fail with

    def run_worker(self, allocator: str, small: bool) -> dict[str, Any]:
        self.started.append((allocator, small))
        if allocator in self.broken:
            raise bench.WorkerFailed("exit status 1", self.broken[allocator])
        return process(1 if allocator == bench.OURS else 2 + len(self.started) / 100)


@pytest.fixture
def machine(monkeypatch: MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(bench, "check_machine", lambda: None)
    monkeypatch.setattr(bench, "run_worker", made.run_worker)
    return made


# --- what is missing -----------------------------------------------------------


def test_without_torch_a_sentence_says_so(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert command() == 1
    assert capsys.readouterr().err == (
        "esper_alloc bench: PyTorch is not installed: install torch with CUDA\n"
    )


@pytest.mark.parametrize("driver", [True, False])
def test_without_a_gpu_a_sentence_says_so(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], driver: bool
) -> None:
    def library(name: str) -> SimpleNamespace:
        if not driver:
            raise OSError(name)
        return SimpleNamespace(cuInit=lambda _: 100, cuDeviceGetCount=lambda _: 100)  # no device

    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(workers.ctypes, "CDLL", library)
    assert command() == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "this needs an NVIDIA GPU" in err and "doctor" in err
    assert ("finds no GPU" if driver else "no CUDA driver") in err


def test_a_plot_that_cannot_be_drawn_is_refused_first(
    machine: Machine, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], tmp_path: Any
) -> None:
    def message(path: str) -> str:
        assert command("--plot", path) == 2
        assert machine.started == []  # nothing was measured
        return capsys.readouterr().err

    assert "there is no folder" in message(str(tmp_path / "nowhere" / "x.svg"))
    assert "must end in .png or .svg" in message(str(tmp_path / "x.pdf"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib: python -m pip install matplotlib" in message(str(tmp_path / "x.svg"))


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_rounds_that_make_no_sense_are_wrong_usage(
    rounds: str, capsys: CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command("--rounds", rounds)
    assert caught.value.code == 2
    assert "--rounds" in capsys.readouterr().err


# --- what is measured ----------------------------------------------------------


def test_the_table_has_every_figure_and_ours_over_the_best(
    machine: Machine, capsys: CaptureFixture[str]
) -> None:
    assert command("--rounds", "3", "--small") == 0
    assert machine.started == [(allocator, True) for allocator in bench.ALLOCATORS] * 3
    out, err = capsys.readouterr()
    head, *rows = out.splitlines()
    assert head.split()[0] == "esper_alloc" and head.endswith("ours / best")
    for figure, row in zip(bench.FIGURES, rows):
        assert row.startswith(f"{figure.title}, {figure.unit}")
        assert 0.45 < float(row.split()[-1]) < 0.5
    assert rows[-1] == "a GPU, torch 2.11.0; medians of 3 processes each, in turn; less is better"
    assert "round 3 of 3: cudaMallocAsync" in err


def test_json_has_medians_and_every_process(machine: Machine, capsys: CaptureFixture[str]) -> None:
    assert command("--rounds", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"gpu", "torch", "medians", "processes"}
    assert set(found["medians"]) == set(bench.ALLOCATORS)
    assert found["medians"]["esper_alloc"] == {figure.key: 100 for figure in bench.FIGURES}
    assert all(len(processes) == 2 for processes in found["processes"].values())


def test_a_peer_that_fails_is_left_out_and_named(
    machine: Machine, capsys: CaptureFixture[str]
) -> None:
    machine.broken["cudaMallocAsync"] = "no such backend\n"
    assert command("--rounds", "2") == 0
    out, err = capsys.readouterr()
    assert "cudaMallocAsync" not in out
    assert err.count("left out: cudaMallocAsync: exit status 1") == 1
    assert err.count("cudaMallocAsync\n") == 1  # not tried a second time


def test_ours_failing_is_the_end(machine: Machine, capsys: CaptureFixture[str]) -> None:
    machine.broken[bench.OURS] = "built for another torch\n"
    assert command() == 1
    assert capsys.readouterr().err.endswith("esper_alloc: exit status 1: built for another torch\n")


@pytest.mark.slow
def test_the_plot_is_drawn(machine: Machine, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.svg"
    assert command("--rounds", "1", "--plot", str(path)) == 0
    assert path.read_text().rstrip().endswith("</svg>")


def test_no_title_of_the_plot_is_cut(machine: Machine) -> None:
    pytest.importorskip("matplotlib")
    figure = bench.picture(bench.measure(1, True))
    assert_no_title_is_cut_or_covered(figure, len(bench.FIGURES))


# --- the worker ----------------------------------------------------------------


def test_a_worker_that_fails_says_why_in_one_line(monkeypatch: MonkeyPatch) -> None:
    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert "PYTORCH_CUDA_ALLOC_CONF" not in how["env"]
        return subprocess.CompletedProcess(command, 3, "", "Traceback\n  ...\nRuntimeError: no\n")

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setattr(workers.subprocess, "run", run)
    with pytest.raises(bench.WorkerFailed, match="exit status 3 and this output") as caught:
        bench.run_worker("native", True)
    assert caught.value.brief == "exit status 3: RuntimeError: no"


def test_a_workers_line_is_found_among_others(monkeypatch: MonkeyPatch) -> None:
    printed = f'hello\n{workers._MARK}{{"a": 1}}\nwarning\n'

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        assert how["env"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
        assert command[1:4] == ["-m", "esper_alloc.cli.bench_worker", "native, expandable"]
        assert "--small" not in command
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(workers.subprocess, "run", run)
    assert bench.run_worker("native, expandable", False) == {"a": 1}
