"""Marks in grad mode on the simulated device: exact where only the caller can reach the memory,
until the free everywhere else, and gated on as the caller allowed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "shim"))

torch = pytest.importorskip("torch")
if torch.version.cuda is None or torch.cuda.is_available():
    pytest.skip("needs a torch with CUDA, and no GPU", allow_module_level=True)

import build  # noqa: E402

CASES = TESTS / "uses" / "reach"


def names(program: str) -> list[str]:
    """The cases of a program, without running it."""
    return [
        one.name
        for one in ast.parse((CASES / f"{program}.py").read_text()).body
        if isinstance(one, ast.FunctionDef) and one.decorator_list
    ]


@pytest.fixture(scope="module")
def kinds(library: Path) -> Any:
    """Of every case."""
    return {
        name: found
        for program in ("alone", "reached")
        for name, found in build.answer(
            library,
            f"import runpy, sys; sys.path.insert(0, {str(CASES)!r})\n"
            f"runpy.run_path({str(CASES / program)!r} + '.py', run_name='__main__')",
        ).items()
    }


@pytest.mark.parametrize("case", names("alone"))
def test_what_only_the_caller_can_reach_is_marked_exactly(kinds: Any, case: str) -> None:
    assert kinds[case] == ["record_use"]


@pytest.mark.parametrize("case", names("reached"))
def test_what_others_can_reach_is_marked_until_the_free(kinds: Any, case: str) -> None:
    assert kinds[case] == ["until_free"]


HEAD = """
import json
import simulated
import torch
import esper_alloc

side = torch.cuda.Stream()
held = []

def marked(gate=True, how="mark", event=False):
    "A tensor that others can reach, marked on a stream that is at work; its address."
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    held.append(x)
    simulated.work(side)
    if how == "take":
        with torch.cuda.stream(side):
            scope = esper_alloc.using(stream=torch.cuda.default_stream())
            with scope:
                pass
            scope.take(x)
    elif how == "using":
        with esper_alloc.using(x, stream=side):
            y = x[:0].float().requires_grad_() * 2
        held.append(y)
    elif event:
        done = torch.cuda.Event()
        done.record(side)
        esper_alloc.record_use(x, event=done)
    else:
        esper_alloc.record_use(x, side, gate=gate)
    return x.data_ptr()

def is_reused(address):
    "Whether that memory serves again although the stream is at work."
    held.clear()
    other = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    return other.data_ptr() == address

def say(**answer):
    print(json.dumps(answer))

"""


@pytest.mark.parametrize(
    "how, reused",
    [
        ("", True),
        ("gate=False", False),
        ("how='using'", True),
        ("how='take'", False),  # its caller said nothing of gates
        ("event=True", False),  # an event does not tell its stream
    ],
)
def test_a_mark_until_the_free_is_gated_on_as_its_caller_allowed(
    library: Path, how: str, reused: bool
) -> None:
    assert build.answer(library, HEAD + f"say(reused=is_reused(marked({how})))\n") == {
        "reused": reused
    }


def test_the_trait_keeps_streams_from_waiting_for_a_mark_until_the_free(library: Path) -> None:
    code = """
address = marked()
esper_alloc.set_stream_traits(side, rendezvous=True)
say(reused=is_reused(address))
"""
    assert build.answer(library, HEAD + code) == {"reused": False}
