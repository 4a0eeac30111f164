"""cudagraph_outputs over PyTorch's own CUDA graphs."""

import importlib.util
from typing import Any

import pytest
from scenario import NATIVE, OURS, run_program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch.compile on CUDA needs triton"
)


def run(allocator: str, scenario: str) -> dict[str, Any]:
    return run_program("graph_outputs", allocator, scenario)


def wrong(found: dict[str, Any]) -> list[str]:
    assert found
    return [name for name, right in found.items() if right is not True]


def test_without_it_pytorch_refuses() -> None:
    assert "has been overwritten by a subsequent run" in run(NATIVE, "bare")["error"]


@pytest.mark.parametrize("scenario", ["values", "gradients", "graphed"])
def test_under_pytorchs_own_allocator(scenario: str) -> None:
    assert wrong(run(NATIVE, scenario)) == []


@pytest.mark.parametrize("scenario", ["values", "gradients", "graphed"])
def test_under_esper_alloc(scenario: str) -> None:
    assert wrong(run(OURS, scenario)) == []
