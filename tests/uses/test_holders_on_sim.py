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

#: Pending memory serves at once, whatever the default is.
GATE = {"ESPER_ALLOC_REUSE": "gate"}
CASES = TESTS / "uses" / "reach"


def names(program: str) -> list[str]:
    """The cases of a program, without running it."""
    return [
        one.name
        for one in ast.parse((CASES / f"{program}.py").read_text()).body
        if isinstance(one, ast.FunctionDef) and one.decorator_list
    ]


@pytest.fixture(scope="module")
def found(library: Path) -> Any:
    """Of every case the kinds of the uses, and the report's lines."""
    return {
        name: answer
        for program in ("alone", "reached")
        for name, answer in build.answer(
            library,
            f"import runpy, sys; sys.path.insert(0, {str(CASES)!r})\n"
            f"runpy.run_path({str(CASES / program)!r} + '.py', run_name='__main__')",
        ).items()
    }


@pytest.mark.parametrize("case", names("alone"))
def test_what_only_the_caller_can_reach_is_marked_exactly(found: Any, case: str) -> None:
    if case not in found:
        pytest.skip("not on this Python or PyTorch")
    assert found[case] == [["record_use"], []]


@pytest.mark.parametrize("case", names("reached"))
def test_what_others_can_reach_is_marked_until_the_free(found: Any, case: str) -> None:
    if case not in found:
        pytest.skip("not on this Python or PyTorch")
    kinds, lines = found[case]
    assert kinds == ["until_free"]
    assert len(lines) == 1 and "reached.py" in lines[0]


@pytest.mark.parametrize(
    "case, why",
    {
        "saved": "autograd saved the tensor",
        "saved_output": "others share its memory",
        "view_whose_base_is_saved": "others hold the tensor that it is a view of",
        "attribute_of_a_context": "other Python references to the tensor",
        "list_that_others_hold": "others hold the container",
        "view_that_is_missing": "or other views of that",
        "base_that_others_hold": "others hold the tensor that it is a view of",
        "storage": "others share its memory",
        "parameter": "it is a Parameter",
        "weak_reference": "weak references",
        "weak_reference_to_the_base": "weak references",
        "weak_reference_to_the_storage": "weak references",
        "dlpack": "a storage that cannot be counted",
        "subclass": "a subclass of Tensor",
        "vmap": "a transform wraps the tensor",
    }.items(),
)
def test_the_report_says_why(found: Any, case: str, why: str) -> None:
    assert why in found[case][1][0]


#: What a compiled function runs that was traced without grad mode.
TRACED = f"""
import json, sys
sys.path.insert(0, {str(CASES)!r})
from helper import KEPT, empty, keep_busy, kinds, torch

def use(x):
    side = torch.cuda.Stream()
    keep_busy(side)
    torch.ops.esper_alloc.record_use([x], side.stream_id, side.device_index, True, False)

class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, inference):
        ctx.save_for_backward(x)
        with torch.inference_mode(inference):
            use(x)
        return w * 1

    @staticmethod
    def backward(ctx, grad):
        return None, None, None

def pack(x):
    use(x)
    return x

w, x, y, z = torch.ones(1, requires_grad=True), empty(), empty(8, 1), empty()
KEPT.append(Saves.apply(x, w, True))
with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
    KEPT.append(y * empty(0, requires_grad=True))
product = w * 2
product.register_hook(lambda grad: use(z))
product.backward()
with torch.inference_mode():
    use(plain := empty())
print(json.dumps([kinds(x), kinds(y), kinds(z), kinds(plain)]))
"""


def test_a_compiled_mark_lasts_until_the_free_where_autograd_may_save_it(library: Path) -> None:
    """In the forward of a custom function, even in inference mode, in a hook that packs, in a hook of
    backward."""
    assert build.answer(library, TRACED) == [*[["until_free"]] * 3, ["record_use"]]


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
    code = HEAD + f"say(reused=is_reused(marked({how})))\n"
    assert build.answer(library, code, **GATE) == {"reused": reused}


def test_a_mark_after_a_scope_that_was_too_early_lasts_until_the_free(library: Path) -> None:
    code = f"""
import sys

sys.path.insert(0, {str(CASES)!r})
from helper import kinds

w = torch.empty(0, device="cuda", requires_grad=True)
simulated.work(side)
x = torch.empty(1 << 20, 1, device="cuda")
with torch.cuda.stream(side):
    y = x * w
with esper_alloc.using(x, stream=side):
    pass
after_scope = kinds(x)
esper_alloc.record_use(x, side)
say(after_scope=after_scope, after_mark=kinds(x))
"""
    assert build.answer(library, HEAD + code) == {
        "after_scope": ["record_use"],
        "after_mark": ["until_free"],
    }


@pytest.mark.parametrize("held, waits", [("[]", False), ("[x]", True)])
def test_what_comes_after_an_exact_mark_is_not_waited_for(
    library: Path, held: str, waits: bool
) -> None:
    """The stream gets more work, which does not end, between the mark and the free."""
    code = f"""
def program():
    main = torch.cuda.current_stream()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    address, holders = x.data_ptr(), {held}
    simulated.work(side)
    esper_alloc.record_use(x, side)
    simulated.time_passes()
    simulated.work(side)
    before = main.query()
    del x, holders
    y = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    done = main.record_event()
    return {{"idle": before, "reused": y.data_ptr() == address, "waits": not done.query()}}

say(**program())
"""
    assert build.answer(library, HEAD + code, **GATE) == {
        "idle": True,
        "reused": True,
        "waits": waits,
    }


def test_the_trait_keeps_streams_from_waiting_for_a_mark_until_the_free(library: Path) -> None:
    code = """
address = marked()
esper_alloc.set_stream_traits(side, rendezvous=True)
say(reused=is_reused(address))
"""
    assert build.answer(library, HEAD + code, **GATE) == {"reused": False}


def test_each_line_is_named_once_while_it_is_asked_for(library: Path) -> None:
    code = """
import warnings
from esper_alloc.torch_allocator import lasting_marks

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    marked()
    esper_alloc.warn_about_marks()
    for _ in range(3):
        marked()
    marked(how="using")
    marked(how="take")  # which says until the free
    lines = list(lasting_marks.lines())
    esper_alloc.warn_about_marks(False)
    marked(event=True)
say(warned=[(w.lineno, w.category.__name__, str(w.message)) for w in seen], lines=lines)
"""
    found = build.answer(library, HEAD + code)
    source = (HEAD + code).splitlines()
    assert [[source[line - 1].strip(), *said] for line, *said in found["warned"]] == [
        [
            "esper_alloc.record_use(x, side, gate=gate)",
            "RuntimeWarning",
            "this mark lasts until the memory is freed: other Python references to the tensor exist",
        ],
        [
            "with esper_alloc.using(x, stream=side):",
            "RuntimeWarning",
            "this mark lasts until the memory is freed: autograd recorded an operation in the "
            "scope, or the mark is in a custom function or among hooks of saved tensors",
        ],
    ]
    assert found["lines"][0] == "marks that last until the free:"
    assert sorted(line.split("(")[1].split(")")[0] for line in found["lines"][1:]) == [
        "1 mark",
        "3 marks",
    ]


def test_a_warning_that_is_an_error_comes_after_the_mark(library: Path) -> None:
    code = """
import warnings

warnings.simplefilter("error")
esper_alloc.warn_about_marks()
try:
    marked()
except RuntimeWarning:
    raised = True
annotations = torch.cuda.memory._snapshot()["external_annotations"]
say(raised=raised, kinds=[one["kind"] for one in annotations if one["name"] == "esper_alloc.use"])
"""
    assert build.answer(library, HEAD + code) == {
        "raised": True,
        "kinds": ["until_free"],
    }
