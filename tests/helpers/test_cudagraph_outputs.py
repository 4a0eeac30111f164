"""cudagraph_outputs without a GPU: over functions that behave as CUDA graphs do.

A `Graph` here writes its outputs to the same memory in every run, and `Trees`
keeps the account of it that PyTorch's CUDA graph trees keep. What PyTorch
really does is in tests/gpu/test_graph_outputs.py.
"""

import collections
import copy
import dataclasses
import inspect
import pickle
import threading
import types
import warnings
import weakref
from pathlib import Path

import pytest
from documents import blocks
from processes import ROOT

torch = pytest.importorskip("torch")

import esper_alloc  # noqa: E402
from esper_alloc import cudagraph_outputs  # noqa: E402
from esper_alloc.helpers.cudagraph_outputs import copies, memory, trees as trees_module, wrapper  # noqa: E402
from esper_alloc.uses import containers  # noqa: E402


class Reference:
    """To an output: where its storage is, and whether somebody holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._start = tensor.untyped_storage().data_ptr()
        self._tensor = weakref.ref(tensor)

    def data_ptr(self) -> int:
        return self._start

    def is_live(self) -> bool:
        return self._tensor() is not None


class Node:
    """A run: its outputs, and the run before it on the path."""

    def __init__(self, outputs, parent) -> None:
        self.outputs_weakrefs = [None, *map(Reference, outputs)]
        self._path_from_root = [*(parent._path_from_root if parent else ()), self]

    def path_live_weakrefs(self):
        for node in self._path_from_root:
            yield from (one for one in node.outputs_weakrefs if one and one.is_live())


class Trees:
    """The account: the current path, and the step that it belongs to."""

    def __init__(self) -> None:
        self.current_node = None
        self.current_gen = 0
        self.killed = 0
        self.MarkStepBox = types.SimpleNamespace(mark_step_counter=0)
        container = types.SimpleNamespace(tree_manager=self)
        self.local = types.SimpleNamespace(tree_manager_containers={0: container})

    def mark(self) -> None:
        self.MarkStepBox.mark_step_counter -= 1

    def update_generation(self) -> None:
        self.current_gen = self.MarkStepBox.mark_step_counter

    def ran(self, *outputs) -> None:
        alive = self.current_node and list(self.current_node.path_live_weakrefs())
        if self.current_gen != self.MarkStepBox.mark_step_counter or not alive:
            self.killed += len(alive or ())
            self.current_node = None
        self.current_node = Node(outputs, self.current_node)
        self.update_generation()


@pytest.fixture
def trees(monkeypatch):
    """Graphs run on the CPU, and PyTorch has an account of them."""
    made = Trees()
    monkeypatch.setattr(memory, "DEVICE", "cpu")
    monkeypatch.setattr(wrapper, "_graphs_are_possible", lambda: True)
    monkeypatch.setattr(trees_module, "_trees", lambda: made)
    monkeypatch.setattr(wrapper, "_mark_step_begin", made.mark)
    monkeypatch.setattr(wrapper._thread, "depth", 0)
    return made


class Graph:
    """Outputs `function(x)` at the same addresses in each run."""

    def __init__(self, trees, function=lambda x: x * 2) -> None:
        self.trees = trees
        self.function = function
        self.memory = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            value = self.function(x)
            if self.memory is None:
                self.memory = torch.empty_like(value)
            self.memory.copy_(value)
            output = self.memory.view_as(self.memory)
        self.trees.ran(output)
        return output


class Sine(torch.autograd.Function):
    """A graph with a backward: results and gradients at fixed addresses."""

    memory: dict = {}

    @staticmethod
    def fixed(name: str, value: torch.Tensor) -> torch.Tensor:
        kept = Sine.memory.setdefault((name, value.shape, value.dtype), torch.empty_like(value))
        output = kept.copy_(value).view_as(kept)
        Sine.trees.ran(output)
        return output

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Sine.fixed("out", x.sin())

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return Sine.fixed("gradient", gradient * x.cos())


@pytest.fixture
def sine(trees):
    Sine.memory.clear()
    Sine.trees = trees
    return Sine.apply


# Values


def test_results_keep_their_values(trees) -> None:
    step = cudagraph_outputs(Graph(trees))
    results = [step(torch.full((3,), float(n))) for n in range(5)]
    assert [result.tolist() for result in results] == [[2.0 * n] * 3 for n in range(5)]
    counts = step.counts
    assert (counts.steps, counts.marked, counts.clones, counts.bytes) == (5, 5, 5, 60)
    assert trees.killed == 0


def test_a_step_of_several_graphs_copies_what_it_returns(trees) -> None:
    direction, image = Graph(trees), Graph(trees, lambda x: x.expand(4, 3).sum(1) + 1)
    step = cudagraph_outputs(lambda x: image(direction(x)))
    results = [step(torch.full((3,), float(n))) for n in range(3)]
    assert [result.tolist() for result in results] == [[6.0 * n + 1] * 4 for n in range(3)]
    assert step.counts.bytes == 3 * 16
    assert trees.killed == 0


def test_the_same_as_a_context(trees) -> None:
    direction, image = Graph(trees), Graph(trees)
    results = []
    for n in range(3):
        with cudagraph_outputs() as step:
            middle = direction(torch.full((3,), float(n)))
            results.append(step.keep(image(middle)))
            del middle
        assert step.counts.clones == 1 and step.counts.marked == 1
    assert [result.tolist() for result in results] == [[0.0] * 3, [4.0] * 3, [8.0] * 3]


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    rest: object = None


Pair = collections.namedtuple("Pair", "left right")


def test_containers_to_any_depth(trees) -> None:
    graph = Graph(trees)

    def function(x):
        y = graph(x)
        return {
            "a": [y, (y, None, 3)],
            "pair": Pair(y, "text"),
            "frozen": Frozen(y, {"deep": Frozen(y)}),
            "set": {y},
            "ordered": collections.OrderedDict(z=y),
        }

    found = cudagraph_outputs(function)(torch.ones(2))
    graph(torch.zeros(2))
    a = found["a"][0]
    assert a.tolist() == [2, 2]
    same = (
        found["a"][1][0], found["pair"].left, found["frozen"].image,
        found["frozen"].rest["deep"].image, next(iter(found["set"])), found["ordered"]["z"],
    )  # fmt: skip
    assert all(other is a for other in same)
    assert found["a"][1][1:] == (None, 3) and found["pair"].right == "text"
    assert type(found["ordered"]) is collections.OrderedDict


def test_only_what_belongs_to_a_graph_is_copied(trees) -> None:
    graph, weight = Graph(trees), torch.ones(3)

    def function(x):
        return x, x[1:], weight, graph(x), 7, "text", torch.zeros(2), x.tolist()

    x = torch.ones(3)
    step = cudagraph_outputs(function)
    found = step(x)
    assert found[0] is x and found[1].data_ptr() == x[1:].data_ptr() and found[2] is weight
    assert found[4:6] == (7, "text")
    assert step.counts.clones == 1


def test_a_value_without_graphs_is_returned_itself(trees) -> None:
    graph, answer = Graph(trees), [torch.ones(2), {"x": 3}]
    graph(torch.ones(3))
    step = cudagraph_outputs(lambda: answer)
    assert step() is answer and step.keep(answer) is answer
    assert step.counts.clones == 0


def test_outputs_that_share_memory_go_on_sharing_it(trees) -> None:
    graph = Graph(trees)

    def function(x):
        y = graph(x)
        return y[2:6], y.view(torch.int32)[1:3], y[4:].view(2, 2).t(), y[3]

    x = torch.arange(8.0)
    step = cudagraph_outputs(function)
    a, b, c, d = step(x)
    assert a.tolist() == [4, 6, 8, 10] and c.tolist() == [[8, 12], [10, 14]] and d.item() == 6
    assert b.view(torch.float32).tolist() == [2, 4]
    starts = {one.untyped_storage().data_ptr() for one in (a, b, c, d)}
    assert len(starts) == 1 and graph.memory.data_ptr() not in starts
    a[1] = 100.0
    assert d.item() == 100.0
    assert step.counts.bytes <= 32 and step.counts.clones == 4


def test_what_expand_repeats_is_copied_once(trees) -> None:
    graph = Graph(trees)
    step = cudagraph_outputs(lambda x: graph(x).expand(1000, 3))
    result = step(torch.ones(3))
    graph(torch.zeros(3))
    assert result.shape == (1000, 3) and result.stride() == (0, 1)
    assert bool((result == 2).all())
    assert step.counts.bytes == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda y: y[:0], lambda y: y.to(torch.complex64).conj(), lambda y: y.t(), lambda y: y[:, 1],
        lambda y: torch.nn.Parameter(y),
    ],
)  # fmt: skip
def test_unusual_tensors(trees, make) -> None:
    memory = torch.ones(2, 3)

    def function():
        y = make(memory)
        trees.ran(y)
        return y

    found = cudagraph_outputs(function)()
    expected = make(torch.ones(2, 3))
    memory.zero_()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found.detach(), expected.detach())


def test_sparse_outputs_of_graphs(trees) -> None:
    def function():
        values = torch.ones(2)
        trees.ran(values)
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4,), is_coalesced=True)
        return sparse, values

    sparse, values = cudagraph_outputs(function)()
    assert sparse._values().data_ptr() != values.data_ptr()
    assert sparse.to_dense().tolist() == [1, 0, 1, 0]


def test_unknown_objects_and_views_of_dicts_are_named(trees, monkeypatch) -> None:
    monkeypatch.setattr(containers, "_warned_of", set())
    kind = type("Opaque", (), {"__module__": "somebodys"})
    graph = Graph(trees)

    @cudagraph_outputs
    def step(x):
        y = {"y": graph(x)}
        return y, kind(), y.values(), types.MappingProxyType(y), y.keys()

    with pytest.warns(RuntimeWarning, match="does not look for tensors inside") as seen:
        step(torch.ones(1))
    names = [str(one.message).split()[7] for one in seen]
    assert names == ["somebodys.Opaque:", "builtins.dict_values:", "builtins.mappingproxy:"]
    assert {one.filename for one in seen} == {__file__}


def test_everything_is_copied_on_request(trees) -> None:
    """As for graphs that PyTorch keeps no account of."""
    memory, layer = torch.zeros(3), torch.nn.Linear(3, 3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return memory.copy_(x), x[:1], layer.weight

    x = torch.ones(3)
    step = cudagraph_outputs(Model(), clone="all")
    result, view, weight = step(x)
    memory.zero_()
    assert result.tolist() == [1, 1, 1]
    assert view.data_ptr() == x.data_ptr() and weight is layer.weight
    assert step.counts.clones == 1
    assert step.layer is layer  # the wrapped module is still asked


def test_a_pytorch_with_another_account_gets_copies_of_everything(trees, monkeypatch) -> None:
    graph = Graph(trees)
    step = cudagraph_outputs(graph)
    monkeypatch.setattr(trees, "local", types.SimpleNamespace(
        tree_manager_containers={0: types.SimpleNamespace(tree_manager=types.SimpleNamespace())}
    ))  # fmt: skip
    result = step(torch.ones(3))
    graph(torch.zeros(3))
    assert result.tolist() == [2, 2, 2]


# Steps


def test_what_lives_is_not_invalidated(trees) -> None:
    graph, other = Graph(trees), Graph(trees)
    held = graph(torch.ones(3))  # not wrapped, and kept
    step = cudagraph_outputs(other)
    step(torch.ones(3))
    assert step.counts.marked == 0 and trees.killed == 0
    # Steps are ours to begin from here on, all the same.
    assert trees.MarkStepBox.mark_step_counter == -1
    del held
    step(torch.ones(3))
    assert step.counts.marked == 1


def test_always_and_never(trees) -> None:
    graph = Graph(trees)
    held = graph(torch.ones(3))
    step = cudagraph_outputs(graph, mark="never")
    step(torch.ones(3))
    assert trees.MarkStepBox.mark_step_counter == 0
    step = cudagraph_outputs(graph, mark="always")
    step(torch.ones(3))
    assert trees.killed > 0 and step.counts.marked == 1
    assert held is not None


def test_a_warning_when_steps_never_end(trees) -> None:
    graph, other = Graph(trees), Graph(trees)
    held = graph(torch.ones(3))
    step = cudagraph_outputs(other)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(40):
            step(torch.ones(3))
    assert [str(one.message).split(":")[0] for one in seen] == [
        "16 steps of cudagraph_outputs in a row began with 1 tensors of earlier steps' CUDA "
        "graphs alive, so PyTorch records graphs again each time. The program keeps what an unwrapped compiled "
        "function returned, or results whose backward never ran"
    ]
    assert seen[0].filename == __file__
    assert held is not None


def test_inner_steps_copy_and_mark_nothing(trees) -> None:
    inner = cudagraph_outputs(Graph(trees))
    outer = cudagraph_outputs(lambda x: inner(x) + inner(x + 1))
    assert outer(torch.ones(2)).tolist() == [6, 6]
    assert inner.counts.clones == 2 and inner.counts.steps == 0
    assert outer.counts.steps == 1 and trees.MarkStepBox.mark_step_counter == -1


def test_an_error_ends_the_step(trees) -> None:
    @cudagraph_outputs
    def fails():
        raise KeyError("inside")

    for _ in range(3):
        with pytest.raises(KeyError, match="inside"):
            fails()
    assert fails.counts.marked == 3
    assert wrapper._thread.depth == 0


def test_a_thread_does_not_end_anothers_step(trees) -> None:
    inside, done = threading.Event(), threading.Event()

    def long_step():
        with cudagraph_outputs():
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=long_step)
    thread.start()
    assert inside.wait(30)
    before = trees.MarkStepBox.mark_step_counter
    step = cudagraph_outputs(Graph(trees))
    step(torch.ones(1))
    assert trees.MarkStepBox.mark_step_counter == before and step.counts.marked == 0
    done.set()
    thread.join()
    step(torch.ones(1))
    assert step.counts.marked == 1


# Gradients


def test_gradcheck(sine) -> None:
    step = cudagraph_outputs(sine)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(step, (x,))
    assert step.counts.clones > 0


def test_gradients_outlive_the_next_backward(sine, trees) -> None:
    step = cudagraph_outputs(sine)
    inputs = [torch.full((3,), float(n), requires_grad=True) for n in range(4)]
    for x in inputs:
        step(x).sum().backward()
    for x in inputs:
        torch.testing.assert_close(x.grad, x.detach().cos())
    gradients = [torch.autograd.grad(step(x).sum(), x)[0] for x in inputs]
    for x, gradient in zip(inputs, gradients):
        torch.testing.assert_close(gradient, x.detach().cos())
    assert step.counts.gradient_clones == 8 and step.counts.gradient_bytes == 96
    assert trees.killed == 0


def test_a_pending_backward_keeps_its_step(sine, trees) -> None:
    """Two forwards before a backward: a mark between them would be wrong."""

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved = x.cos()
            trees.ran(saved)  # what backward reads belongs to the graph too
            ctx.save_for_backward(saved)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    step = cudagraph_outputs(Saves.apply)
    x = torch.ones(3, requires_grad=True)
    first = step(x)
    second = step(2 * x)
    assert step.counts.marked == 1 and trees.killed == 0
    (first + second).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() + 2 * (2 * x.detach()).cos())
    del first, second
    step(x)
    assert step.counts.marked == 2


def test_what_a_backward_still_reads_is_held(sine, trees) -> None:
    """From Python: PyTorch 2.11 does not see what autograd alone holds."""

    def alive() -> int:
        return len(list(trees.current_node.path_live_weakrefs()))

    step = cudagraph_outputs(sine)
    x = torch.ones(3, requires_grad=True)
    y = step(x)
    assert alive() == 1
    y.sum().backward(retain_graph=True)
    assert alive() == 1
    y.sum().backward()
    assert alive() == 0
    y = step(x)  # y is still there, and keeps nothing
    assert step.counts.marked == 2 and alive() == 1
    del y
    assert alive() == 0


def test_backward_of_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(copies._clone_and_hold(x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6, 6, 6]


def model_of(sine, **options) -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3), **options)

        def forward(self, x):
            return sine(self.weight) + x

    return Model()


def test_parameters_of_a_module_get_gradients_of_their_own(sine, trees) -> None:
    model = model_of(sine)
    step = cudagraph_outputs(model)
    step(torch.ones(3)).sum().backward()
    kept = model.weight.grad
    assert kept.untyped_storage().data_ptr() not in trees_module.graph_storages()
    step(torch.ones(3)).sum().backward()  # accumulates
    assert kept.tolist() == [2, 2, 2]
    assert list(step.parameters()) == [model.weight]
    assert set(step.state_dict()) == {"weight"}


def test_a_module_stays_wrapped_where_its_methods_return_it() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    for function in (net, torch.compile(net, backend="eager")):
        step = cudagraph_outputs(function)
        same = [step.to("cpu"), step.eval(), step.cpu(), step.float(), step.requires_grad_(False)]
        assert all(one is step for one in same)
        assert not net.training and not net[0].weight.requires_grad
        assert step.train() is step and net.training
        assert step.state_dict().keys() == function.state_dict().keys()
        assert step.to.__name__ == "to"


@dataclasses.dataclass(eq=False)
class Linked:
    value: torch.Tensor
    next: object = None


def test_arguments_are_found_in_dataclasses_and_sets(trees) -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    first = Linked(x)
    first.next = Linked(torch.ones(2), first)  # in a circle
    step = cudagraph_outputs(lambda a, b: (a.value, next(iter(b)), a.value * 2), clone="all")
    found, other, made = step(first, {y})
    assert found is x and other is y and step.counts.clones == 1
    made.sum().backward()
    assert step.counts.gradient_clones == 1


def test_results_are_found_in_dataclasses_that_lead_in_a_circle(trees) -> None:
    graph = Graph(trees)

    @cudagraph_outputs
    def step(x):
        made = Linked(graph(x))
        made.next = Linked(x, [made])
        return made

    first = step(torch.ones(2))
    step(torch.zeros(2))
    assert first.value.tolist() == [2, 2]
    assert first.next.next[0] is first and first.next.value.tolist() == [1, 1]


def test_parameters_that_took_anothers_place_get_gradients_of_their_own(sine, trees) -> None:
    model = model_of(sine)
    step = cudagraph_outputs(model)
    step(torch.ones(3)).sum().backward()
    before = step.counts.gradient_clones
    model.load_state_dict({"weight": torch.ones(3)}, assign=True)
    step(torch.ones(3)).sum().backward()
    assert step.counts.gradient_clones == before + 1
    assert model.weight.grad.untyped_storage().data_ptr() not in trees_module.graph_storages()
    other = pickle.loads(pickle.dumps(cudagraph_outputs(torch.nn.Linear(2, 2), clone="all")))
    other(torch.ones(1, 2)).sum().backward()
    assert other.counts.gradient_clones == 2


def test_a_wrapped_module_is_a_module() -> None:
    net = torch.nn.Linear(2, 2)
    step = cudagraph_outputs(net)
    assert isinstance(step, torch.nn.Linear) and isinstance(step, cudagraph_outputs)
    assert not isinstance(cudagraph_outputs(print), torch.nn.Module)
    model = torch.nn.Sequential(step, torch.nn.ReLU())
    assert list(model.parameters()) == [net.weight, net.bias]
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    model.double().eval()
    assert net.weight.dtype == torch.float64 and not net.training
    x = torch.randn(3, 2, dtype=torch.float64)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(model(x), net(x).relu()) and torch.equal(compiled(x), model(x))
    step.tag = "new"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied[0], cudagraph_outputs) and copied[0].weight is not net.weight
        assert isinstance(copied[0], torch.nn.Linear) and copied[0].tag == "new"
        assert torch.equal(copied(x), model(x))


def test_what_is_written_to_a_wrapper_is_its_functions() -> None:
    net = torch.nn.Linear(2, 2)
    net.counts = "the module's own"
    step = cudagraph_outputs(net)
    step.training = False
    assert not net.training and not step.training
    step.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert net.weight is step.weight
    step.counts = wrapper.CloneCounts(steps=3)  # documented, and the wrapper's
    step.tag = "new"
    assert step.counts.steps == 3 and net.counts == "the module's own"
    assert step.tag == "new" and not hasattr(net, "tag")

    def plain(x):
        return x

    wrapped = cudagraph_outputs(plain)
    wrapped.tag = "new"
    assert wrapped.tag == "new" and wrapped(3) == 3


def test_the_parts_of_a_wrapper_that_are_no_tensors_have_no_memory(monkeypatch) -> None:
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            return ["inner", "mesh"], None

    wrapper = torch.zeros(2).as_subclass(Wrapper)
    wrapper.inner, wrapper.mesh = torch.ones(3), object()
    monkeypatch.setattr(memory, "DEVICE", "cpu")
    assert memory.storages(wrapper) == [wrapper.inner.untyped_storage().data_ptr()]


def test_parameters_that_were_frozen_get_them_later(sine, trees) -> None:
    model = model_of(sine, requires_grad=False)
    step = cudagraph_outputs(model)
    step(torch.ones(3, requires_grad=True)).sum().backward()
    model.weight.requires_grad_(True)
    before = step.counts.gradient_clones
    step(torch.ones(3)).sum().backward()
    assert step.counts.gradient_clones == before + 1
    assert model.weight.grad.untyped_storage().data_ptr() not in trees_module.graph_storages()
    step(torch.ones(3)).sum().backward()
    assert model.weight.grad.tolist() == [2, 2, 2]
    assert len(model.weight._backward_hooks) == 1


class Doubled(torch.autograd.Function):
    """As make_graphed_callables: fixed memory, of which nobody keeps an account."""

    gradient_memory = torch.zeros(3)

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return Doubled.gradient_memory.copy_(gradient * 2).detach()


@pytest.mark.parametrize("account", ["none is kept", "another one is kept"])
def test_gradients_without_an_account(trees, monkeypatch, account) -> None:
    if account == "none is kept":
        step = cudagraph_outputs(Doubled.apply, clone="all")
        # A wrapper that copies less was there before, and does not get in the way.
        other = cudagraph_outputs(Doubled.apply)
    else:
        monkeypatch.setattr(wrapper, "graph_storages", lambda: None)
        other = step = cudagraph_outputs(Doubled.apply)
    weight = torch.ones(3, requires_grad=True)
    other(weight)
    for factor in (1.0, 10.0):
        (step(weight) * factor).sum().backward()
    assert weight.grad.tolist() == [22.0] * 3
    kept = [torch.autograd.grad((step(weight) * n).sum(), weight)[0] for n in (1.0, 10.0)]
    assert [one.tolist() for one in kept] == [[2.0] * 3, [20.0] * 3]
    assert step.counts.gradient_clones == 4 and step.counts.gradient_bytes == 48


def test_no_gradients_without_grad_mode(sine) -> None:
    step = cudagraph_outputs(sine)
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not step(x).requires_grad
    with torch.inference_mode():
        assert step(torch.zeros(3)).tolist() == [0, 0, 0]
    assert not x._backward_hooks


# Wrapping


def test_functions_methods_and_decorators(trees) -> None:
    graph = Graph(trees)

    @cudagraph_outputs
    def double(x: torch.Tensor, *, extra: int = 0) -> torch.Tensor:
        """Twice x."""
        return graph(x) + extra

    assert double.__name__ == "double" and double.__doc__ == "Twice x."
    assert str(inspect.signature(double)).startswith("(x:")
    assert double(torch.ones(1), extra=1).tolist() == [3]
    assert "double" in repr(double)

    class Simulator:
        @cudagraph_outputs(mark="never")
        def run(self, x):
            return graph(x)

    simulator = Simulator()
    first = simulator.run(torch.ones(1))
    simulator.run(torch.zeros(1))
    assert first.tolist() == [2]
    assert Simulator.run.counts.marked == 0 and Simulator.run.counts.clones == 2


@cudagraph_outputs
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_decorated_function_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((3,), {}, TypeError, "wraps a function or module, not int"),
        ((), {"clone": "some"}, ValueError, "clone='some': use 'graphs' or 'all'"),
        ((), {"mark": True}, ValueError, "mark=True: use 'auto', 'always' or 'never'"),
    ],
)
def test_bad_arguments(arguments, options, error, message) -> None:
    with pytest.raises(error, match=message):
        cudagraph_outputs(*arguments, **options)


def test_a_context_manager_is_not_called_with_inputs() -> None:
    with pytest.raises(TypeError, match="wraps nothing: use it in a with statement"):
        cudagraph_outputs()(torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="wraps a function or module, not Tensor"):
        cudagraph_outputs()(torch.ones(1))


def test_missing_attributes_are_errors() -> None:
    step = cudagraph_outputs(torch.nn.Linear(1, 1))
    assert step.in_features == 1
    with pytest.raises(AttributeError, match="nothing"):
        step.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="nothing"):
        cudagraph_outputs().nothing  # noqa: B018


# The CPU, really


def simulate(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list]:
    return (x @ y).sin(), [x.sum(), x]


@pytest.mark.slow
def test_on_the_cpu_nothing_changes(monkeypatch) -> None:
    if torch.cuda.is_available():
        monkeypatch.setattr(wrapper, "_graphs_are_possible", lambda: False)
    compiled = torch.compile(simulate, mode="reduce-overhead")
    step = cudagraph_outputs(compiled)
    x, y = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain, (total, same) = compiled(x, y)
    wrapped, (total_again, same_again) = step(x, y)
    assert torch.equal(plain, wrapped) and torch.equal(total, total_again)
    assert same is x and same_again is x
    assert torch.autograd.gradcheck(lambda x, y: step(x, y)[0], (x, y), check_undefined_grad=False)
    assert step.counts == esper_alloc.CloneCounts()
    assert not x._backward_hooks
    with cudagraph_outputs() as scope:
        assert scope.keep(plain) is plain


def test_inside_a_compiled_function_it_is_not_there() -> None:
    step = cudagraph_outputs(lambda x: x * 2)
    outer = torch.compile(lambda x: step(x) + 1, backend="eager", fullgraph=True)
    assert outer(torch.ones(2)).tolist() == [3, 3]


def test_pytorch_still_keeps_the_account_that_is_read() -> None:
    """The names used here exist in this PyTorch: else everything is copied."""
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    assert hasattr(trees, "local") and hasattr(trees.MarkStepBox, "mark_step_counter")
    assert isinstance(trees.local.tree_manager_containers, dict)
    manager = trees.CUDAGraphTreeManager
    assert callable(manager.update_generation) and hasattr(manager, "current_node")
    for node in (trees.CUDAGraphNode, trees.CUDAWarmupNode):
        assert callable(node.path_live_weakrefs) and hasattr(node, "_path_from_root")
    source = Path(trees.__file__).read_text()
    assert "self.outputs_weakrefs" in source and "self.tree_manager" in source
    assert callable(trees.StorageWeakRefWrapper.data_ptr)


# The documented example


def test_the_documented_example_runs(monkeypatch) -> None:
    page = ROOT / "docs" / "cudagraph_outputs.md"
    (example,) = [one for one in blocks(page) if "# runs anywhere" in one]
    compiled = torch.compile  # by Inductor in test_on_the_cpu_nothing_changes
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: compiled(f, backend="eager"))
    names: dict = {}
    exec(compile(example, str(page), "exec"), names)
    assert len(names["results"]) == 3
