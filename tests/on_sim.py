"""For tests that run programs on the simulated device (shim/simulated.py): a file that imports this
is skipped where there is a GPU, or no PyTorch with CUDA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch with CUDA, and no GPU", allow_module_level=True)

import build  # noqa: E402

__all__ = ["Run", "build", "running", "torch"]

#: Runs code, with variables of its environment, and returns what it says last.
Run = Callable[..., Any]


def running(head: str, **always: str) -> Callable[[Path], Run]:
    """A fixture that runs code behind this beginning, always with these variables."""

    @pytest.fixture
    def run(library: Path) -> Run:
        return lambda code, **env: build.answer(library, head + code, **{**always, **env})

    return run
