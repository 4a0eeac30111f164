"""The ten planted jobs (benchmarks/planted.py) on the simulated device: the cause is named first,
and with the advice followed they run, with the peak that was predicted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from on_sim import build

pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import planted


@pytest.mark.parametrize("job", planted.JOBS)
def test_the_advice_lets_it_run(job: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in build.environment(library).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SIM_MAPS_PAGES", "1")
    monkeypatch.setenv("SIM_CAPACITY_MB", "4096")
    found = planted.explain_and_follow(job)
    assert found["cause"] == planted.JOBS[job].cause
    assert (found["missed"], found["failed"]) == (0, 0), found
    assert found["off_percent"] <= 1
