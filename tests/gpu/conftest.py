"""GPU tests: skipped where there is no GPU, failed there when ESPER_REQUIRE_GPU=1."""

from __future__ import annotations

import os

import pytest


def missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return None


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    """Every test in this folder needs a GPU."""
    reason = missing()
    if reason is None:
        return
    if os.environ.get("ESPER_REQUIRE_GPU", "") not in ("", "0"):
        pytest.fail(f"ESPER_REQUIRE_GPU is set, but {reason}", pytrace=False)
    pytest.skip(reason)
