"""The conformance suite of tests/gpu, as far as it needs no kernel: PyTorch's own
allocator and esper_alloc, both on the simulated device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "shim"), str(HERE / "gpu" / "conformance")]

torch = pytest.importorskip("torch")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch with CUDA, and no GPU", allow_module_level=True)

import build  # noqa: E402
import driver  # noqa: E402
import ground  # noqa: E402

import esper_alloc  # noqa: E402

Answers = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    try:
        esper_alloc.allocator()
    except esper_alloc.UnavailableError as error:
        pytest.skip(str(error))
    library = build.build(tmp_path_factory.mktemp("simulated"))
    return driver.run_all(ground.GROUPS, build.environment(library), workers=4)


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, one.name, id=f"{group}-{one.name}")
        for group, one in ground.every_scenario()
        if "gpu" not in one.needs
    ],
)
def test_the_answer_is_natives(answers: Answers, group: str, name: str) -> None:
    wrong = driver.judge(answers[group, "native"], answers[group, "esper_alloc"], name)
    assert wrong is None, wrong
