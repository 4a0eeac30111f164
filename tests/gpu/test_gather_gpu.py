"""The gather iterator on the GPU, under both allocators: what programs/gather.py checks."""

import re

import pytest
from helper import ROOT, run_fresh
from scenario import NATIVE, OURS, PROGRAMS, run_program

CHECKS = [
    pytest.param(name, marks=[pytest.mark.two_gpus] if name.startswith("two_") else [])
    for name in re.findall(r"^@check\ndef (\w+)", (PROGRAMS / "gather.py").read_text(), re.M)
]


@pytest.fixture(scope="module", params=[OURS, NATIVE])
def outcome(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each check found: all of them run in one process, once for each allocator."""
    return run_program("gather", request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_gather(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == ""


def test_the_example_trains_16_environments() -> None:
    printed = run_fresh(str(ROOT / "examples" / "cifar_envs.py"))
    losses = [
        float(found) for found in re.findall(r"48 batches for 16 .* mean loss (\S+)", printed)
    ]
    assert len(losses) == 2 and losses[1] < 2.4, printed
