"""record_use and using without a GPU, with and without the compiled half."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import types
import warnings

import pytest
from processes import ROOT, output_of

torch = pytest.importorskip("torch")

import esper_alloc  # noqa: E402
from esper_alloc.uses import containers, use  # noqa: E402


@pytest.fixture(params=["compiled", "python"])
def record_use(request, monkeypatch):
    """Both implementations of record_use, one at a time."""
    if request.param == "python":
        monkeypatch.setattr(use, "_compiled", None)
        function = getattr(use, "_python_record_use", use.record_use)
        monkeypatch.setattr(use, "record_use", function)
        return function
    if use._compiled is None:
        pytest.skip("the PyTorch part is not built for this torch")
    return use.record_use


def cuda_stream() -> torch.Stream:
    """A stream object of a CUDA device, without the device."""
    return torch.Stream(stream_id=3, device_index=0, device_type=1)


class Pretending(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore


def pretend(*shape: int) -> Pretending:
    return torch.zeros(*shape).as_subclass(Pretending)


@pytest.fixture
def marked(monkeypatch):
    """What the Python implementation would have marked on a GPU."""
    marks: list[tuple] = []
    monkeypatch.setattr(use, "_compiled", None)
    monkeypatch.setattr(use, "record_use", getattr(use, "_python_record_use", use.record_use))
    monkeypatch.setattr(use, "_mark_cuda", lambda *mark: marks.append(mark))
    return marks


# What is accepted


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    rest: dict


@dataclasses.dataclass
class Made:
    """One field comes later, and one thing is no field."""

    x: torch.Tensor
    later: torch.Tensor = dataclasses.field(init=False, repr=False)
    scale: dataclasses.InitVar[int] = 1


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3), torch.ones(3).to_sparse(), torch.nn.Parameter(torch.ones(3)),
        torch.empty(3, device="meta"), [torch.ones(3), (torch.ones(2), None)],
        {"a": torch.ones(3), "b": [torch.ones(1)]}, {torch.ones(3)}, Pair(torch.ones(1), 2),
        Batch(torch.ones(1), {"x": torch.ones(2)}), Made(torch.ones(1)),
        collections.UserDict(x=torch.ones(2)), collections.OrderedDict(x=torch.ones(2)),
        [1, 2.0, "three", b"four", None, torch.float32, {5}, range(3)], [], None,
    ],
    ids=str,
)  # fmt: skip
def test_cpu_tensors_need_nothing(record_use, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record_use(value) is None
        assert record_use(value, cuda_stream()) is None
        assert record_use(value, torch.cpu.Stream()) is None
        assert record_use(value, stream=None, event=None) is None


@pytest.mark.parametrize("value", [5, "text", 2.5, object(), torch.float32])
def test_other_arguments_are_type_errors(record_use, value):
    with pytest.raises(TypeError, match="expected a tensor, or a container"):
        record_use(value)


@pytest.mark.parametrize("stream", [7, "side", torch.ones(1)])
def test_bad_streams_are_type_errors(record_use, stream):
    with pytest.raises(TypeError, match="stream must be"):
        record_use(torch.ones(1), stream)


def test_bad_events_are_errors(record_use):
    with pytest.raises(TypeError, match="event must be"):
        record_use(torch.ones(1), event=3)
    if torch.version.cuda is not None:
        with pytest.raises(ValueError, match="not recorded yet"):
            record_use(torch.ones(1), event=torch.cuda.Event())


def test_bad_calls_are_type_errors(record_use):
    with pytest.raises(TypeError):
        record_use()
    with pytest.raises(TypeError):
        record_use(torch.ones(1), None, None)
    with pytest.raises(TypeError):
        record_use(torch.ones(1), streams=None)


def test_opaque_objects_inside_containers_are_named_once(record_use):
    kind = type("Opaque", (), {"__module__": f"user_{id(record_use)}"})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        record_use([kind(), kind(), torch.ones(1)])
        record_use({"x": kind()})
    texts = [str(w.message) for w in seen]
    assert len(texts) == 1 and "Opaque" in texts[0], texts


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (t for t in [x]), lambda x: iter([x]), lambda x: map(abs, [x]),
        lambda x: torch.nn.ParameterList([x]), lambda x: torch.nn.Linear(2, 2),
        lambda x: x.untyped_storage(),
    ],
)  # fmt: skip
def test_what_may_hold_tensors_is_not_passed_over_in_silence(record_use, make, monkeypatch):
    monkeypatch.setattr(containers, "_warned_of", set())
    with pytest.warns(RuntimeWarning, match="does not look for tensors inside"):
        record_use([make(torch.ones(1))])


def test_values_of_a_dict_are_a_container(record_use, marked):
    use.record_use([{"a": pretend(3)}.values(), {"b": pretend(4)}.values()])
    assert [m[0].shape[0] for m in marked] == [3, 4]
    assert record_use({"a": torch.ones(1)}.values()) is None


def test_containers_that_contain_themselves_end(record_use):
    endless: list = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(RecursionError):
        record_use(endless)


def test_the_compiled_function_is_the_public_one():
    if use._compiled is None:
        pytest.skip("the PyTorch part is not built for this torch")
    assert esper_alloc.record_use is use._compiled.record_use


# What is marked


def test_every_tensor_is_marked_with_the_arguments(marked):
    a, b, c, d = (pretend(4) for _ in range(4))
    stream = cuda_stream()
    use.record_use([a, {"x": (b, None)}, Batch(c, {"y": [d]})], stream)
    assert len(marked) == 4
    assert all(m[0] is x for m, x in zip(marked, (a, b, c, d)))
    assert all(m[1:] == (stream, None) for m in marked)


def test_a_bad_argument_marks_nothing(marked):
    with pytest.raises(TypeError):
        use.record_use([pretend(1)], "not a stream")
    with pytest.raises(TypeError):
        use.record_use([pretend(1)], event="no")
    assert marked == []


def test_wrappers_stand_for_the_tensors_that_they_hold(marked):
    """DTensor, for one, names its mesh of devices among its parts in newer versions."""

    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            return ["inner", "mesh", "other"], None

    wrapper = torch.zeros(2).as_subclass(Wrapper)
    wrapper.inner, wrapper.mesh, wrapper.other = pretend(3), object(), pretend(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use.record_use(wrapper)
        containers.find_tensors(wrapper, [])
    assert [m[0].shape[0] for m in marked] == [3, 1]


@pytest.mark.parametrize(
    "make, count",
    [
        (lambda x: x.to_sparse(), 2), (lambda x: x.to_sparse_csr(), 3),
        (lambda x: x.to_sparse_csc(), 3), (lambda x: x.to_sparse_bsr((2, 2)), 3),
        (lambda x: x.to_sparse_bsc((2, 2)), 3), (lambda x: x, 1),
        (lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]), 1),
    ],
)  # fmt: skip
def test_without_the_shim_sparse_tensors_are_marked_in_parts(make, count):
    """Of a sparse tensor there is neither storage nor record_stream."""
    tensor = make(torch.eye(4))
    parts = containers.parts(tensor)
    assert len(parts) == count
    assert all(part.untyped_storage().nbytes() for part in parts)
    if tensor.layout != torch.strided:
        with pytest.raises(NotImplementedError):
            tensor.untyped_storage()


def test_without_the_shim_the_search_finds_the_parts(monkeypatch):
    a, b = pretend(3), pretend(4)
    monkeypatch.setattr(containers, "parts", lambda tensor: (a, b))
    found = []
    containers.find_tensors([pretend(1)], found)
    assert found[0] is a and found[1] is b and len(found) == 2


def test_memory_that_cannot_be_looked_at_is_left_to_record_stream(monkeypatch):
    class Wrapper:
        def untyped_storage(self):
            raise NotImplementedError

    made = functools.cache(object)
    made()
    monkeypatch.setattr(use, "pluggable_allocator", made)
    monkeypatch.setattr(use, "is_current", lambda allocator: True)
    assert use._mark_through_library(Wrapper(), cuda_stream()) is False


@pytest.fixture
def without_the_shim(monkeypatch):
    """What is marked until the free (`held`), and what at the call (`exact`)."""
    found = types.SimpleNamespace(held=[], exact=[])
    monkeypatch.setattr(use, "_compiled", None)
    monkeypatch.setattr(use, "_record_stream", lambda t, s: found.held.append(t))
    monkeypatch.setattr(use, "_mark_through_library", lambda t, s: found.exact.append(t) or True)
    return found


def test_without_the_shim_grad_mode_means_record_stream(without_the_shim):
    x, stream = pretend(3), cuda_stream()
    use._mark_cuda(x, stream, None)
    assert (without_the_shim.held, without_the_shim.exact) == ([x], [])
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            use._mark_cuda(x, stream, None)
    assert (len(without_the_shim.held), len(without_the_shim.exact)) == (1, 2)


def test_without_the_shim_backward_is_like_grad_mode(without_the_shim):
    modes = []

    def mark(grad):
        modes.append(torch.is_grad_enabled())
        use._mark_cuda(pretend(3), cuda_stream(), None)

    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(mark)
    y.backward()
    assert modes == [False]
    assert (len(without_the_shim.held), len(without_the_shim.exact)) == (1, 0)


def test_without_the_shim_touch_is_record_stream(monkeypatch):
    monkeypatch.setattr(use, "_compiled", None)
    held = []
    monkeypatch.setattr(use, "_record_stream", lambda t, s: held.append((t, s)))
    x, y, stream = pretend(3), pretend(4), cuda_stream()
    use.touch({"x": x, "more": (y, None)}, stream)
    use.touch(x)
    use.touch(x, torch.cpu.Stream())
    assert [(id(t), s) for t, s in held] == [
        (id(x), stream), (id(y), stream), (id(x), None), (id(x), None)
    ]  # fmt: skip
    with pytest.raises(TypeError, match="expected a tensor"):
        use.touch(3)
    with pytest.raises(TypeError, match="stream must be"):
        use.touch(x, 3)


def test_tensors_of_other_devices_get_their_own_record_stream():
    calls = []
    tensor = types.SimpleNamespace(device=torch.device("cpu"), record_stream=calls.append)
    use._record_stream(tensor, "stream")
    assert calls == ["stream"]

    def missing(stream):
        raise NotImplementedError

    use._record_stream(
        types.SimpleNamespace(device=torch.device("cpu"), record_stream=missing), "stream"
    )


# using


@pytest.fixture
def steps(monkeypatch):
    """using() on streams that exist on paper, and what it did with them."""
    log: list[tuple] = []

    @dataclasses.dataclass(frozen=True)
    class Stream:
        name: str
        device: torch.device = torch.device("cuda", 0)  # noqa: RUF009

        def wait_stream(self, other: Stream) -> None:
            log.append(("wait", self.name, other.name))

    current = [Stream("main")]

    @contextlib.contextmanager
    def entered(stream: Stream):
        current.append(stream)
        log.append(("enter", stream.name))
        yield
        log.append(("leave", stream.name))
        current.pop()

    module = types.SimpleNamespace(current_stream=lambda device=None: current[-1], stream=entered)
    monkeypatch.setattr(use, "_compiled", None)
    monkeypatch.setattr(use, "check_stream", lambda stream: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(
        use,
        "_record_stream",
        lambda tensor, stream: log.append(("mark", tensor.numel(), stream.name)),
    )
    return types.SimpleNamespace(log=log, stream=Stream, current=current)


def test_using_waits_enters_marks_and_leaves(steps):
    x = pretend(5)
    with use.using([x, None], {"y": pretend(2)}, stream=steps.stream("side")):
        assert steps.current[-1].name == "side"
        del x
    assert steps.log == [
        ("wait", "side", "main"), ("enter", "side"), ("mark", 5, "side"), ("mark", 2, "side"),
        ("leave", "side"),
    ]  # fmt: skip


def test_using_nests_and_can_be_entered_again(steps):
    outer = use.using(pretend(1), stream=steps.stream("a"))
    with outer, use.using(pretend(2), stream=steps.stream("b")), outer:
        assert [s.name for s in steps.current] == ["main", "a", "b", "a"]
    assert [s.name for s in steps.current] == ["main"]
    assert [step for step in steps.log if step[0] != "mark"] == [
        ("wait", "a", "main"), ("enter", "a"), ("wait", "b", "a"), ("enter", "b"),
        ("wait", "a", "b"), ("enter", "a"), ("leave", "a"), ("leave", "b"), ("leave", "a"),
    ]  # fmt: skip


def test_using_marks_when_the_body_raises(steps):
    with pytest.raises(KeyError, match="inside"):
        with use.using(pretend(3), stream=steps.stream("side")):
            raise KeyError("inside")
    assert ("mark", 3, "side") in steps.log
    assert steps.log[-1] == ("leave", "side")


def test_using_restores_the_stream_when_marking_fails(steps, monkeypatch):
    def broken(tensor, stream):
        raise RuntimeError("no mark")

    monkeypatch.setattr(use, "_record_stream", broken)
    with pytest.raises(RuntimeError, match="no mark"):
        with use.using(pretend(3), stream=steps.stream("side")):
            pass
    assert steps.log[-1] == ("leave", "side")
    assert [s.name for s in steps.current] == ["main"]


def test_take_waits_and_protects(steps):
    scope = use.using(stream=steps.stream("side"))
    with scope:
        y, z = pretend(7), pretend(8)
        with pytest.raises(RuntimeError, match="after the `with` block"):
            scope.take(y)
    steps.log.clear()
    assert scope.take(y) is y
    assert steps.log == [("wait", "main", "side"), ("mark", 7, "main")]
    pair = scope.take(y, z)
    assert pair[0] is y and pair[1] is z


@pytest.mark.parametrize("compiled", [True, False])
def test_using_on_the_cpu_does_nothing(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(use, "_compiled", None)
    x = torch.ones(3)
    with esper_alloc.using(x, [x], stream=None) as scope:
        y = x + 1
    assert scope.take(y) is y
    with esper_alloc.using(x, stream=torch.cpu.Stream()) as scope:
        pass
    assert scope.take(x, y)[1] is y
    with pytest.raises(TypeError, match="expected a tensor, .* not int"):
        esper_alloc.using(3)
    with pytest.raises(TypeError, match="stream must be"):
        esper_alloc.using(x, stream=4)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_error_says_what_to_pass_instead(compiled, monkeypatch):
    mark = esper_alloc.record_use
    if not compiled:
        monkeypatch.setattr(use, "_compiled", None)
        mark = getattr(use, "_python_record_use", mark)
    model = torch.nn.Linear(1, 1)
    for wrong, said in (
        (model.parameters(), "not generator: make a list of it"),
        (model, r"not Linear: pass list\(module.parameters\(\)\)"),
        (3, "not int$"),
    ):
        with pytest.raises(TypeError, match=said):
            mark(wrong)
    with pytest.raises(TypeError, match="not int: wrap a handle in torch.cuda.ExternalStream"):
        mark(torch.ones(1), 3)


def test_using_refuses_what_it_cannot_take_before_its_block_runs():
    x, side = torch.ones(3), torch.cpu.Stream()
    for wrong in (side, [x, side], (side,), {"s": side}, [x, ([side],)]):
        with pytest.raises(TypeError, match=r"pass it by name, using\(x, stream=side\)"):
            esper_alloc.using(x, wrong)
    for wrong in (3, "x", object(), torch.Event(), (i for i in ())):
        with pytest.raises(TypeError, match="expected a tensor"):
            esper_alloc.using(x, wrong)
    esper_alloc.using(None, x, [None, 3, "x"], {"a": (x,)})


@pytest.mark.parametrize("form", ["function", "scope"])
def test_what_is_passed_over_is_named_on_the_users_line(record_use, form: str) -> None:
    kind = type("Opaque", (), {"__module__": "somebodys"})
    with pytest.warns(RuntimeWarning, match="tensors inside somebodys.Opaque") as seen:
        if form == "function":
            record_use([kind()])
        else:
            with esper_alloc.using([kind()]):
                pass
    assert [one.filename for one in seen] == [__file__]


# In compiled functions, where the PyTorch part is missing

WITHOUT_THE_PART = """
import importlib, warnings
import torch
pytorch = importlib.import_module("esper_alloc.installation.pytorch")
def refuse():
    raise pytorch.UnavailableError("not built")
pytorch.load_shim = refuse
import esper_alloc
from esper_alloc.uses import use
from torch._subclasses.fake_tensor import FakeTensorMode
assert use._compiled is None
esper_alloc.install_tensor_method()
marks = []
use._mark_cuda = lambda tensor, stream, event: marks.append((tuple(tensor.shape), stream))
class Entered:
    def __init__(self, stream):
        marks.append("enter")
    def leave(self, tensors):
        marks.append("leave")
use._EnteredGeneric = Entered
side = torch.Stream(stream_id=3, device_index=0, device_type=1)

def function(x):
    y = x + 1
    esper_alloc.record_use([y, None], side)
    return y * 2

def method(x):
    y = x + 1
    y.record_use(side)
    return y * 2

def scope(x):
    with esper_alloc.using(x, stream=side):
        y = x + 1
    return y * 2

wanted = {
    function: [((3,), side)], method: [((3,), side)], scope: ["enter", "leave"],
}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for call, expected in wanted.items():
        with FakeTensorMode():
            x = torch.ones(3, device="cuda")
            try:
                torch.compile(call, fullgraph=True, backend="eager")(x)
            except torch._dynamo.exc.Unsupported as error:
                assert "PyTorch part is not there for this torch" in str(error), error
            else:
                raise AssertionError("no error")
            torch._dynamo.reset()
            assert not marks
            assert torch.compile(call, backend="eager")(x).shape == (3,)
        assert marks == expected, marks
        marks.clear()
said = [str(w.message) for w in seen if "cannot stand in a graph" in str(w.message)]
assert len(said) == 1 and "doctor" in said[0], said
"""


@pytest.mark.slow
def test_without_the_part_marks_are_breaks_in_the_graph_which_is_said_once():
    output_of("-c", WITHOUT_THE_PART, cwd=ROOT)


@pytest.mark.skipif(use._compiled is None, reason="the shim was not built for this torch")
def test_the_compiled_function_has_the_documentation_and_signature_of_the_one_in_python():
    compiled, written = esper_alloc.record_use, use._python_record_use
    assert inspect.getdoc(compiled) == inspect.getdoc(written)
    ours, theirs = inspect.signature(written), inspect.signature(compiled)
    bare = [one.replace(annotation=one.empty) for one in ours.parameters.values()]
    assert [*theirs.parameters.values()] == bare
