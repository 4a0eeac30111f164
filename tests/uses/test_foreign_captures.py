"""capturing(): what the allocator is told of other libraries' captures."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from processes import python
from pytest import MonkeyPatch

import esper_alloc

torch = pytest.importorskip("torch")

import build  # noqa: E402


def test_under_another_allocator_it_does_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with esper_alloc.capturing(), esper_alloc.capturing(0), esper_alloc.capturing("cuda:0"):
            pass


def test_that_it_cannot_be_told_is_a_warning_at_the_callers_line(monkeypatch: MonkeyPatch) -> None:
    from esper_alloc.uses import foreign_captures, use

    monkeypatch.setattr(use, "_compiled", None)
    monkeypatch.setattr(foreign_captures, "is_enabled", lambda: True)
    with pytest.warns(RuntimeWarning, match="cannot be told of a capture") as caught:
        with esper_alloc.capturing():
            pass
    assert caught[0].filename == __file__


def test_where_no_gpu_is_there_it_does_nothing() -> None:
    program = """
import esper_alloc
esper_alloc.enable()
with esper_alloc.capturing():
    print("inside")
"""
    done = python("-c", program, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr


SIMULATED = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs a torch with CUDA, and no GPU",
)


@pytest.fixture
def run(library: Path) -> Any:
    head = "import json, os, simulated, torch, esper_alloc\n"
    return lambda code: build.answer(library, head + code)


@SIMULATED
def test_a_block_may_begin_before_any_memory_was_asked_for(run: Any) -> None:
    found = run("""
with esper_alloc.capturing():
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    within = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
print(json.dumps([within > 0, torch.cuda.memory_reserved()]))
""")
    assert found == [True, 0]


@SIMULATED
def test_cached_memory_stays_until_the_last_block_ends(run: Any) -> None:
    """As it does during any capture that the core knows of."""
    found: dict[str, Any] = run("""

def reserved(device):
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) > 0


x = [torch.empty(3 << 20, dtype=torch.uint8, device=f"cuda:{device}") for device in (0, 1)]
del x
answer = []
first = esper_alloc.capturing()
with first:
    second = esper_alloc.capturing("cuda:0")
    second.__enter__()
    answer.append([reserved(0), reserved(1)])
answer.append(reserved(0))
second.__exit__(None, None, None)
answer.append(reserved(0))
try:
    with esper_alloc.capturing():
        raise KeyError
except KeyError:
    y = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    del y
    answer.append(reserved(0))
print(json.dumps(answer))
""")
    assert found == [[True, False], True, False, False]


@SIMULATED
def test_a_child_that_is_forked_within_may_leave_the_block(run: Any) -> None:
    found = run("""
torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
child = None
try:
    with esper_alloc.capturing():
        child = os.fork()
except BaseException:
    if child == 0:
        os._exit(1)
    raise
if child == 0:
    os._exit(0)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
""")
    assert found == 0
