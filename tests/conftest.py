"""How many processes the tests are spread over by `make test`, a file each."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One for each core; one alone where there is a GPU, which many tests want for
    themselves (tools/gpu knows which do not)."""
    try:
        import torch
    except ImportError:
        return len(os.sched_getaffinity(0))
    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
