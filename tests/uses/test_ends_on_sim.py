"""When a marked use ends, on the simulated device: at the mark, at an event, or at the free."""

import pytest
from on_sim import Run, running

HEAD = """
import collections, dataclasses
import simulated
import torch
import esper_alloc
from esper_alloc import record_use, using
from simulated import say

esper_alloc.install_tensor_method()


def empty(n=1 << 20):
    return torch.empty(n, device="cuda")


def addresses(state=None):
    "Of blocks that owe uses, or are in a state."
    taken = torch.cuda.memory._snapshot()
    if state is None:
        notes = taken["external_annotations"]
        return {int(n["address"]) for n in notes if n.get("name") == "esper_alloc.use"}
    blocks = [b for segment in taken["segments"] for b in segment["blocks"]]
    return {b["address"] for b in blocks if b["state"] == state}


def end(mark, make=empty):
    "When a use ends that mark(x, side) marks: at the mark, at the free, or it is none."
    return ends(lambda x, side: mark(x[0], side), lambda: [make()])[0]


def ends(mark, make):
    "The same for each of the tensors in what make() returns."
    side = torch.cuda.Stream()
    x = make()
    simulated.work(side)
    at = [one.data_ptr() for one in torch.utils._pytree.tree_leaves(x)]
    mark(x, side)
    marked = addresses()
    simulated.time_passes()
    simulated.work(side)  # behind the mark
    del x
    late = addresses("active_pending_free")
    simulated.time_passes()
    assert not late & addresses("active_pending_free")
    return ["free" if a in late else "mark" if a in marked else "none" for a in at]


def scope(x, side):
    with using(x, stream=side):
        pass

"""


run = running(HEAD)


MARKS = {
    "function": "record_use",
    "named stream": "lambda x, side: record_use(x, stream=side)",
    "method": "lambda x, side: x.record_use(side)",
    "current stream": "in_stream(lambda x, side: record_use(x))",
    "view": "lambda x, side: record_use(x[8:].view(2, -1), side)",
    "parameter": "lambda x, side: record_use(torch.nn.Parameter(x), side)",
    "sparse": "lambda x, side: record_use(sparse(x), side)",
    "strided": "lambda x, side: record_use(strided(x), side)",
    "jagged": "lambda x, side: record_use(jagged(x), side)",
    "from another library": "lambda x, side: record_use(torch.from_dlpack(x), side)",
    "scope": "scope",
    "scope without a stream": "in_stream(lambda x, side: scope(x, None))",
}
IN_STREAM = """
def in_stream(mark):
    def inside(x, side):
        with torch.cuda.stream(side):
            mark(x, side)
    return inside


two = torch.tensor([[2], [2]])


def sparse(x):
    where = torch.empty(1, len(x), dtype=torch.int64, device="cuda")
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1, 0, [9], where, x, layout=torch.sparse_coo, device=x.device, dtype=x.dtype
    )


def strided(x):
    return torch._nested_view_from_buffer(x, two, two, two[:, 0])


def jagged(x):
    offsets = torch.empty(3, dtype=torch.int64, device="cuda")
    return torch.nested.nested_tensor_from_jagged(x.view(-1, 2), offsets, min_seqlen=1, max_seqlen=9)


"""


@pytest.mark.parametrize(
    "mode, wanted",
    {
        "torch.enable_grad()": "free",
        "torch.no_grad()": "mark",
        "torch.inference_mode()": "mark",
        "torch.set_grad_enabled(False)": "mark",
    }.items(),
)
def test_a_mark_ends_at_the_call_if_grad_mode_is_off(run: Run, mode: str, wanted: str) -> None:
    code = f"with {mode}:\n    say(*map(end, [{', '.join(MARKS.values())}]))"
    found = run(IN_STREAM + code)
    assert dict(zip(MARKS, found, strict=True)) == dict.fromkeys(MARKS, wanted)


def test_grad_mode_counts_when_the_call_is_made_and_nothing_else_does(run: Run) -> None:
    """Not the mode at the scope's beginning, nor what was recorded, nor who has the tensor."""
    found = run("""
kept = []


def scope_that_turns_grad_mode_off(x, side):
    with using(x, stream=side):
        torch.set_grad_enabled(False)


def saved_before(x, side):
    kept.append(x.requires_grad_() * empty())
    with torch.no_grad():
        record_use(x, side)
    kept.clear()


def alone(x, side):
    return record_use(x.detach(), side)


answers = [end(scope_that_turns_grad_mode_off)]
torch.set_grad_enabled(True)
say(*answers, end(saved_before), end(alone))
""")
    assert found == ["mark", "mark", "free"]


def test_in_backward_a_mark_lasts_until_the_free(run: Run) -> None:
    """Grad mode is off there, but nodes that run later may have saved the tensor."""
    found = run("""
modes = []


def in_backward(mark):
    def inside(x, side):
        def hook(grad):
            modes.append(torch.is_grad_enabled())
            mark(x, side)
        product = torch.ones(1, requires_grad=True) * 2
        product.register_hook(hook)
        product.backward()
    return inside


operator = torch.ops.esper_alloc.record_use
found = [end(in_backward(mark)) for mark in (
    record_use,
    scope,
    lambda x, side: operator([x], side.stream_id, side.device_index, False),
)]
say(modes, found)
""")
    assert found == [[False] * 3, ["free"] * 3]


def test_in_the_forward_of_a_custom_function_grad_mode_is_off(run: Run) -> None:
    """docs/uses.md says how to mark what is saved there."""
    found = run("""
class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, mark):
        mark(x)
        ctx.save_for_backward(x)
        return w * 1

    @staticmethod
    def backward(ctx, grad):
        record_use(ctx.saved_tensors[0], other)
        return None, grad, None


def forward(mark):
    w = torch.ones(1, requires_grad=True)
    return lambda x, side: Saves.apply(x, w, lambda x: mark(x, side))


def and_backward(x, side):
    global other
    other = side
    forward(lambda x, side: None)(x, side).backward()


by_record_stream = lambda x, side: x.record_stream(side)
say(*map(end, [forward(record_use), forward(by_record_stream), and_backward]))
""")
    assert found == ["mark", "free", "free"]


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad"])
def test_with_an_event_the_use_ends_at_the_event(run: Run, mode: str) -> None:
    found = run(f"""
by_event = lambda x, side: record_use(x, event=side.record_event())
both = lambda x, side: record_use(x, side, event=side.record_event())
in_a_list = lambda x, side: record_use([x, None], event=side.record_event())
with torch.{mode}():
    say(*map(end, [by_event, both, in_a_list]))
""")
    assert found == ["mark"] * 3


@pytest.mark.parametrize("mode", ["no_grad", "enable_grad"])
def test_take_and_touch_last_until_the_free(run: Run, mode: str) -> None:
    found = run(f"""
def take(x, side):
    with using(stream=torch.cuda.Stream()) as scope:
        pass
    with torch.cuda.stream(side):
        scope.take(x)


with torch.{mode}():
    say(*map(end, [take, esper_alloc.touch]))
""")
    assert found == ["free"] * 2


@pytest.mark.parametrize("mode, wanted", {"no_grad": "mark", "enable_grad": "free"}.items())
def test_all_tensors_in_a_container_are_marked_alike(run: Run, mode: str, wanted: str) -> None:
    found = run(f"""
@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    rest: dict


containers = [
    lambda a, b: [a, (b, None, 3)],
    lambda a, b: {{"a": a, "b": [b]}},
    lambda a, b: collections.OrderedDict(a=a, b=b),
    lambda a, b: collections.UserDict(a=a, b=b),
    lambda a, b: {{"a": a, "b": b}}.values(),
    lambda a, b: [{{a}}, frozenset([b])],
    lambda a, b: collections.deque([a, b]),
    lambda a, b: Batch(a, {{"b": b}}),
    lambda a, b: [*a.split(1 << 18), *b.split(1 << 18)],
]
with torch.{mode}():
    say(*[
        ends(lambda x, side: mark(container(*x), side), lambda: [empty(), empty()])
        for container in containers
        for mark in (record_use, scope)
    ])
""")
    assert found == [[wanted] * 2] * 18


def test_a_dispatch_mode_sees_the_mark_which_ends_by_the_same_rule(run: Run) -> None:
    found = run("""
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "esper_alloc":
            seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def in_a_mode(x, side):
    with Mode():
        record_use(x, side)


seen = []
with torch.no_grad():
    found = [end(in_a_mode)]
say(found + [end(in_a_mode)], seen)
""")
    assert found == [["mark", "free"], ["record_use.default"] * 2]


def test_a_mark_on_the_own_stream_is_nothing(run: Run) -> None:
    found = run("""
own = lambda x, side: record_use(x, torch.cuda.current_stream())
with torch.no_grad():
    found = end(own)
say(found, end(own))
""")
    assert found == ["none", "none"]
