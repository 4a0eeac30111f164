"""However a process ends, it ends as under PyTorch's own allocator, and quietly.

The scenarios are in programs/exits.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
import exits


def rows() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.two_gpus if "two_gpus" in one.needs else ())
        for name, one in exits.SCENARIOS.items()
        if "simulated" not in one.needs
    ]


@pytest.fixture(scope="module")
def ends(chosen: Callable[[str], set[str]]) -> dict[tuple[str, str], exits.End]:
    import torch

    names = [
        name
        for name in sorted(chosen("name"))
        if "two_gpus" not in exits.SCENARIOS[name].needs or torch.cuda.device_count() > 1
    ]
    return exits.run_all(
        (allocator, name) for name in names for allocator in (exits.OURS, exits.NATIVE)
    )


@pytest.mark.parametrize("name", rows())
def test_it_ends_as_it_should(ends: dict[tuple[str, str], exits.End], name: str) -> None:
    wrong = exits.judge(name, ends[exits.OURS, name], ends[exits.NATIVE, name])
    assert wrong is None, wrong
