"""The ten planted jobs (benchmarks/planted.py) on the simulated device: the cause is named first,
and with the advice followed they run, with the peak that was predicted."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from on_sim import build

pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import planted


@pytest.mark.parametrize("job", planted.JOBS)
def test_the_advice_lets_it_run(job: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = {"SIM_MAPS_PAGES": "1", "SIM_CAPACITY_MB": "4096", **build.environment(library)}

    def run(name: str, options: list[str], env: dict[str, str]) -> Any:
        code = f"import runpy, sys\nsys.argv[1:] = {[name, *options]!r}\n"
        code += f"runpy.run_path({planted.__file__!r}, run_name='__main__')"
        return build.program(code, {**os.environ, **simulated, **env})

    monkeypatch.setattr(planted, "_run", run)
    found = planted.explain_and_follow(job)
    assert found["cause"] == planted.JOBS[job].cause
    assert (found["missed"], found["failed"]) == (0, 0), found
    assert found["off_percent"] <= 1
