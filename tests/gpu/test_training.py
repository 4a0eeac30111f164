"""Training gives the losses that it gives under the native allocator, bit for bit.

Batches come from a copy stream, one step ahead: marked with record_use under
ours, with record_stream under native.
"""

from typing import Any

import pytest
from scenario import NATIVE, OURS, run_program

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
MODELS = ["convolutions", "recurrent", "attention"]


def train(allocator: str, **env: str) -> dict[str, Any]:
    default = {"ESPER_ALLOC_ALLOWANCE": "128MiB"}
    return run_program("training", allocator, env={**DETERMINISTIC, **default, **env})["losses"]


@pytest.fixture(scope="module")
def native() -> dict[str, Any]:
    return train(NATIVE)


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return train(OURS)


def test_native_repeats_itself(native: dict[str, Any]) -> None:
    assert train(NATIVE) == native, "the models are not deterministic: nothing can be compared"


@pytest.mark.parametrize("model", MODELS)
def test_losses_equal_natives(model: str, ours: dict[str, Any], native: dict[str, Any]) -> None:
    assert len(ours[model]) == 20
    assert len(set(ours[model])) > 10, "the losses hardly vary: little would be compared"
    assert ours[model] == native[model]
