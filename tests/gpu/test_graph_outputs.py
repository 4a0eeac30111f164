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


@pytest.mark.parametrize("allocator", [NATIVE, OURS])
@pytest.mark.parametrize("scenario", ["values", "gradients", "graphed"])
def test_outputs_and_gradients_keep_their_values(scenario: str, allocator: str) -> None:
    assert wrong(run(allocator, scenario)) == []
