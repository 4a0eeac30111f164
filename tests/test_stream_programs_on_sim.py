"""Random programs over several streams, without a mark, on the simulated device: with automatic
uses no memory is handed out while a program may still use it, and without them it mostly is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from on_sim import build
from processes import output_of

SHIM = Path(__file__).resolve().parent / "shim"


@pytest.fixture
def programs(pytestconfig: pytest.Config) -> int:
    return 60 if pytestconfig.getoption("quick") else 200


def run(library: Path, uses: str, programs: int, **env: str) -> Any:
    env = {**os.environ, **build.environment(library), "SIM_HAS_ORACLE": "1", **env}
    said = output_of(SHIM / "stream_programs_on_sim.py", uses, "1", programs, env=env)
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("env", [{}, {"SIM_MAPS_PAGES": "1"}], ids=["classic", "mapped"])
def test_with_automatic_uses_none_goes_wrong(
    library: Path, programs: int, env: dict[str, str]
) -> None:
    found = run(library, "automatic", programs, **env)
    assert found == {"programs": programs, "failed": 0, "first": []}


@pytest.mark.slow
def test_without_them_most_do(library: Path, programs: int) -> None:
    assert run(library, "marked", programs)["failed"] > programs / 2
