"""Marks and scopes under torch.compile and other tracing, without a GPU.

Graphs are traced with fake CUDA tensors, or with the operators called on CPU
tensors, for which they do nothing.
"""

import collections
import contextlib
import dataclasses
import functools
import re
import types
import warnings

import pytest
from processes import ROOT, output_of

torch = pytest.importorskip("torch")

import esper_alloc  # noqa: E402
from esper_alloc.uses import containers, teaching, use  # noqa: E402

if use._compiled is None:
    pytest.skip("the PyTorch part is not built for this torch", allow_module_level=True)

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

OPS = torch.ops.esper_alloc


def stream(number: int = 3) -> torch.Stream:
    """A stream object of a CUDA device, without the device."""
    return torch.Stream(stream_id=number, device_index=0, device_type=1)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    esper_alloc.install_tensor_method()
    yield
    esper_alloc.uninstall_tensor_method()
    torch._dynamo.reset()


@pytest.fixture
def marks_on_the_cpu(monkeypatch):
    """As if the CPU were a device with streams: a backward needs devices that exist."""
    monkeypatch.setattr(containers, "_HOST", ("meta",))


class Graphs:
    """Compiles a function, and keeps the graphs that AOTAutograd made of it."""

    def __init__(self, function, **options):
        self.dynamo: list = []
        self.forward: list = []
        self.backward: list = []

        def keep(graphs):
            def compiler(module, inputs):
                graphs.append(module)
                return module

            return compiler

        aot = aot_autograd(fw_compiler=keep(self.forward), bw_compiler=keep(self.backward))

        def backend(module, inputs):
            self.dynamo.append(module)
            return aot(module, inputs)

        self.call = torch.compile(function, backend=backend, fullgraph=True, **options)

    def names(self, which="forward", index=-1):
        """The operators of a graph, in its order."""
        return [
            node.target.__name__ for node in getattr(self, which)[index].graph.nodes
            if node.op == "call_function"
        ]  # fmt: skip

    def marks(self, which="forward", index=-1):
        """Our operators in a graph: (name, arguments after the tensors)."""
        return [
            (node.target.__name__, node.args[1:])
            for node in getattr(self, which)[index].graph.nodes
            if node.op == "call_function" and node.target.namespace == "esper_alloc"
        ]


def on_fake_cuda(function, *shapes, **options):
    """The graphs of `function` called once on fake CUDA tensors."""
    graphs = Graphs(function, **options)
    with FakeTensorMode(), torch.no_grad():
        graphs.call(*(torch.ones(*shape, device="cuda") for shape in shapes))
    return graphs


# In the graph


@pytest.mark.parametrize("name", ["record_use", "touch"])
def test_the_function_is_one_operator_at_its_place(name):
    side = stream(3)

    def f(x):
        y = x.sin()
        r = y.cos()
        getattr(esper_alloc, name)(y, side)
        return r.exp()

    graphs = on_fake_cuda(f, (4,))
    assert len(graphs.dynamo) == 1
    assert graphs.names() == ["sin.default", "cos.default", "record_use.default", "exp.default"]
    assert graphs.marks() == [("record_use.default", (3, 0, True))]


def test_the_method_called_through_the_class_is_the_same():
    side, method = stream(5), None

    def f(x):
        torch.Tensor.record_use(x, side)
        method(x, side)
        type(x).record_use(x, stream=side)
        functools.partial(torch.Tensor.record_use, stream=side)(x)
        return x.exp()

    method = torch.Tensor.record_use
    graphs = on_fake_cuda(f, (4,))
    assert graphs.names() == ["record_use.default"] * 4 + ["exp.default"]


def test_without_a_stream_the_current_one_is_meant():
    def f(x):
        esper_alloc.record_use(x)
        x.record_use()
        with esper_alloc.using(x) as scope:
            y = x + 1
        return scope.take(y)

    marks = on_fake_cuda(f, (4,)).marks()
    assert marks == [("record_use.default", (0, -1, True))] * 3


@dataclasses.dataclass
class Made:
    x: torch.Tensor
    scale: dataclasses.InitVar[int]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: collections.deque([x]), lambda x: [collections.deque([x])],
        lambda x: [collections.UserDict(a=x)], lambda x: [collections.OrderedDict(a=x)],
        lambda x: (collections.defaultdict(list, {1: [x]}),),
        lambda x: [types.MappingProxyType({"a": x})], lambda x: {"a": x}.values(),
        lambda x: [frozenset([x])], lambda x: [3, (None, "x", {"a": [x]})], lambda x: Made(x, 2),
    ],
)  # fmt: skip
def test_containers_are_searched_as_in_eager_code(make):
    def f(x):
        y = x + 1
        esper_alloc.record_use(make(y))
        return y * 2

    found = []
    containers.find_tensors(make(torch.empty(4, device="meta")), found)  # no error
    (node,) = [
        n for n in on_fake_cuda(f, (4,)).forward[0].graph.nodes if "record_use" in str(n.target)
    ]
    assert [n.meta["val"].shape[0] for n in node.args[0]] == [4]


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


def test_what_is_not_searched_is_named_while_tracing(monkeypatch):
    monkeypatch.setattr(containers, "_warned_of", set())

    def f(x):
        y = x + 1
        esper_alloc.record_use([Opaque(y), Opaque(x), 3, None])
        return y * 2

    with pytest.warns(RuntimeWarning, match="inside .*Opaque") as seen:
        assert on_fake_cuda(f, (4,)).names() == ["add.Tensor", "mul.Tensor"]
    assert len([w for w in seen if "Opaque" in str(w.message)]) == 1


class Functional(torch.Tensor):
    """A subclass with a __torch_function__ of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Marking(Functional):
    def record_use(self):
        return self + 1


def test_subclasses_with_torch_function_are_marked(marks_on_the_cpu):
    # AOTAutograd does not take such tensors, so what Dynamo made is looked at.
    counts = []

    def backend(module, inputs):
        nodes = [n for n in module.graph.nodes if "record_use" in str(n.target)]
        counts.append([len(n.args[0]) for n in nodes])
        return module

    def f(x):
        y = x * 2
        y.record_use()
        esper_alloc.record_use([x, y])
        return y + 1

    x = torch.ones(3).as_subclass(Functional)
    assert torch.equal(torch.compile(f, fullgraph=True, backend=backend)(x), x * 2 + 1)
    assert counts == [[1, 2]]

    def own(x):
        return x.record_use()

    x = torch.ones(3).as_subclass(Marking)
    with contextlib.suppress(torch._dynamo.exc.Unsupported):
        assert torch.equal(torch.compile(own, fullgraph=True, backend=backend)(x), x + 1)
    assert counts in ([[1, 2]], [[1, 2], []])


@pytest.mark.parametrize("grad", [False, True])
def test_jagged_tensors_are_marked_in_their_parts(grad, marks_on_the_cpu):
    def f(x):
        y = x * 2
        esper_alloc.record_use(y)
        y.record_use()
        return y.sin()

    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)
    graphs = Graphs(f)
    with torch.set_grad_enabled(grad):
        y = graphs.call(x)
    torch.testing.assert_close(y.values(), (x.values() * 2).sin())
    assert [args for _, args in graphs.marks()] == [(0, -1, True)] * 2
    values = x.values().shape
    for node in graphs.forward[0].graph.nodes:
        if "esper_alloc" in str(node.target):
            assert values in [n.meta["val"].shape for n in node.args[0]]
    if grad:
        y.values().sum().backward()
        torch.testing.assert_close(x.grad.values(), (x.values() * 2).cos() * 2)


def test_transforms_and_branches_keep_their_marks(marks_on_the_cpu):
    def f(x):
        y = x * 2
        esper_alloc.record_use(y)
        return y + 1

    def branches(x):
        return torch.cond(x.sum() > 0, f, lambda x: x.clone(), (x,))

    def marks_of(function, x):
        graphs = Graphs(function)
        with torch.no_grad():
            torch.testing.assert_close(graphs.call(x), function(x))
        nodes = [
            node for module in graphs.forward[0].modules() if hasattr(module, "graph")
            for node in module.graph.nodes
        ]  # fmt: skip
        return len([n for n in nodes if "esper_alloc" in str(n.target)])

    x = torch.ones(4, 3)
    assert marks_of(torch.vmap(f), x) == 1
    assert marks_of(torch.func.grad(lambda x: f(x).sum()), x) == 1
    assert marks_of(branches, x) == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_in_a_graph_mark_on_one_stream(backend, marks_on_the_cpu):
    side = stream()

    def block(x):
        y = x.sin()
        esper_alloc.record_use(y, side)
        return y.cos()

    def twice(x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        esper_alloc.record_use(x, side)
        return x

    def branches(x):
        return torch.cond(x.sum() > 0, block, lambda x: block(x) + 1, (x,))

    class Marking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            esper_alloc.record_use(x, side)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            esper_alloc.record_use(gradient, side)
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    for function in (twice, branches, Marking.apply):
        found = torch.compile(lambda x, f=function: f(x), backend=backend)(x)
        torch.testing.assert_close(found, function(x))
        found.sum().backward()


def test_a_scope_takes_containers():
    side = stream(7)

    def f(x):
        with esper_alloc.using([x], {"a": (x, None)}, stream=side):
            return x.sin()

    assert [name for name, _ in on_fake_cuda(f, (4,)).marks()] == [
        "order.default", "order.default", "record_use.default",
    ]  # fmt: skip

    def wrong(x):
        with esper_alloc.using([x, side]):
            return x + 1

    with pytest.raises(Exception, match="a stream is among the tensors"):
        on_fake_cuda(wrong, (4,))


def test_a_scope_orders_and_marks():
    side = stream(7)

    def f(x):
        with esper_alloc.using(x, stream=side) as scope:
            y = x.sin()
        return scope.take(y).cos()

    graphs = on_fake_cuda(f, (4,))
    assert graphs.names() == [
        "order.default", "sin.default", "order.default", "record_use.default",
        "order.default", "record_use.default", "cos.default",
    ]  # fmt: skip
    assert [arguments for _, arguments in graphs.marks()] == [
        (7, 0, False), (7, 0, True), (7, 0, True), (7, 0, False), (0, -1, True),
    ]  # fmt: skip


def test_scopes_nest_and_can_be_entered_again():
    outer_stream, inner_stream = stream(3), stream(5)

    def f(x):
        outer = esper_alloc.using(x, stream=outer_stream)
        with outer, esper_alloc.using(x, stream=inner_stream), outer:
            return x + 1

    marks = on_fake_cuda(f, (4,)).marks()
    ends = [(args[2], args[0]) for name, args in marks if name == "order.default"]
    assert ends == [(False, 3), (False, 5), (False, 3), (True, 3), (True, 5), (True, 3)]


def test_an_event_cannot_stand_in_a_graph_so_memory_is_held():
    event = torch.Event("cpu")

    def f(x):
        esper_alloc.record_use(x, event=event)
        return x + 1

    assert on_fake_cuda(f, (4,)).marks() == [
        ("order.default", (0, -1, True)), ("record_use.default", (0, -2, True)),
    ]  # fmt: skip


def test_cpu_tensors_leave_nothing_in_the_graph():
    side = stream()

    def f(x):
        esper_alloc.record_use([x, None], side)
        x.record_use(side)
        return x + 1

    graphs = Graphs(f)
    assert torch.equal(graphs.call(torch.ones(3)), torch.full((3,), 2.0))
    assert graphs.names() == ["add.Tensor"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: esper_alloc.record_use(5), "expected a tensor"),
        (lambda x: esper_alloc.record_use(x, "side"), "stream must be"),
        (lambda x: esper_alloc.using(x, stream="side"), "stream must be"),
    ],
)
def test_bad_arguments_are_the_same_errors(call, message):
    def f(x):
        call(x)
        return x + 1

    with pytest.raises(Exception, match=message):
        Graphs(f).call(torch.ones(3))


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_shapes(strict):
    class Marks(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            esper_alloc.record_use(y)
            return y + 1

    shapes = {"x": {0: torch.export.Dim("rows", min=4)}}
    model = torch.export.export(Marks(), (torch.ones(5, 2),), dynamic_shapes=shapes, strict=strict)
    for rows in (4, 7):
        assert model.module()(torch.ones(rows, 2)).equal(torch.full((rows, 2), 3.0))


def test_the_same_stream_compiles_once_and_another_again():
    def f(x, s):
        y = x + 1
        esper_alloc.record_use(y, s)
        y.record_use(s)
        with esper_alloc.using(x, stream=s):
            return y * 2

    graphs = Graphs(f)
    with FakeTensorMode(), torch.no_grad():
        x = torch.ones(3, device="cuda")
        for s in (stream(3), stream(3), stream(3)):
            graphs.call(x, s)
        assert len(graphs.forward) == 1
        graphs.call(x, stream(5))
        assert len(graphs.forward) == 2
        graphs.call(x, stream(3))
        graphs.call(x, stream(5))
    assert len(graphs.forward) == 2
    for index, number in enumerate((3, 5)):
        assert {int(args[0]) for _, args in graphs.marks(index=index)} == {number}


def test_a_mark_is_not_eliminated_where_nothing_else_is_left():
    side = stream()

    def f(x):
        esper_alloc.record_use(x + 1, side)

    assert on_fake_cuda(f, (4,)).names() == ["add.Tensor", "record_use.default"]


def test_in_any_mode_memory_is_protected_until_its_free(marks_on_the_cpu):
    def f(x, w):
        y = x * w
        esper_alloc.record_use(x)
        with esper_alloc.using(y):
            return (y * w).sum()

    graphs = Graphs(f)
    w = torch.full((4,), 3.0, requires_grad=True)
    graphs.call(torch.ones(4), w).backward()
    assert torch.equal(w.grad, torch.full((4,), 6.0))
    assert graphs.marks() == [("record_use.default", (0, -1, True))] * 2
    with torch.inference_mode():
        graphs.call(torch.ones(4), w)
    assert graphs.marks() == [("record_use.default", (0, -1, True))] * 2


# Inductor, on CPU tensors: there the operators themselves are called


@pytest.fixture(scope="module")
def read_elsewhere():
    """Operators that may read or write their argument on a stream of their own."""

    def fill(x):
        x.fill_(3)

    library = torch.library.Library("esper_test", "DEF")
    for schema, function in (
        ("read(Tensor x) -> Tensor", lambda x: x.sum(0)),
        ("launch(Tensor x) -> ()", lambda x: None),
        ("fill(Tensor(a!) x) -> ()", fill),
    ):
        name = library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"esper_test::{name}", function, lib=library)
    torch.fx.node.has_side_effect(torch.ops.esper_test.launch.default)
    yield torch.ops.esper_test
    library._destroy()


@contextlib.contextmanager
def compiled_anew():
    """Graphs of an earlier run are not taken from Inductor's caches. What the processor says it
    can do is not tried, which takes a process with torch for each kind of instruction; nor is code
    made for it, which takes longer."""
    inductor, aot = torch._inductor.config, torch._functorch.config
    how = {"fx_graph_cache": False, "cpp.vec_isa_ok": True, "cpp.simdlen": 1}
    with inductor.patch(how), aot.patch(enable_autograd_cache=False):
        yield


def inductor_code(function, *arguments):
    """The statements of the generated function; the results are compared."""
    with torch.no_grad(), compiled_anew():
        wanted = function(*arguments)
        compiled = torch.compile(function, fullgraph=True)
        found, (code, *_) = run_and_get_code(compiled, *arguments)
    torch.testing.assert_close(found, wanted)
    return statements(code)


def statements(code):
    body = code[code.index("def call(") :]
    lines = [line.strip() for line in body[: body.index("return (")].splitlines()]
    return [line for line in lines if not line.startswith(("#", "assert"))]


def line_of(lines, text):
    (index,) = [i for i, line in enumerate(lines) if text in line]
    return index


def argument_of(line):
    return re.search(r"\(\[?(?:reinterpret_tensor\()?(\w+)", line).group(1)


def reused(lines, buffer):
    """Whether another buffer takes over the memory."""
    return [line for line in lines if "reuse" in line and f"= {buffer};" in line]


def assert_marks_what_is_read(lines, operator):
    read, mark = line_of(lines, operator), line_of(lines, "record_use.default")
    assert argument_of(lines[read]) == argument_of(lines[mark])


@pytest.mark.slow
@pytest.mark.parametrize("mark", [False, True])
def test_inductor_marks_the_buffer_that_was_read_and_uses_it_no_more(mark, read_elsewhere):
    """Without the mark it would."""

    def f(x, w):
        y = (x @ w).relu()
        r = read_elsewhere.read(y)
        if mark:
            OPS.record_use.default([y], 0, -1, False)
        z = (x + 1) @ w
        return z @ w, r + 1

    lines = inductor_code(f, torch.randn(32, 32), torch.randn(32, 32))
    if mark:
        assert_marks_what_is_read(lines, "esper_test.read")
    assert bool(reused(lines, argument_of(lines[line_of(lines, "esper_test.read")]))) != mark


@pytest.mark.slow
def test_inductor_marks_what_is_read_without_a_result(read_elsewhere):
    def f(x):
        y = x + 1
        read_elsewhere.launch(y)
        OPS.record_use.default([y], 0, -1, False)
        return x * 2

    lines = inductor_code(f, torch.randn(32))
    assert_marks_what_is_read(lines, "esper_test.launch")


@pytest.mark.slow
def test_inductor_marks_what_is_read_through_a_view(read_elsewhere):
    def f(x):
        y = x + 1
        r = read_elsewhere.read(y.view(8, 4)[1:])
        OPS.record_use.default([y], 0, -1, False)
        return (y * 3).sum(), r.exp()

    lines = inductor_code(f, torch.randn(4, 8))
    assert_marks_what_is_read(lines, "esper_test.read")


@pytest.mark.slow
def test_inductor_puts_a_scope_between_its_ends():
    def f(x, w):
        before = x.sum()
        OPS.order.default([x], 0, -1, False)
        y = x @ w
        z = y @ w
        OPS.order.default([x], 0, -1, True)
        OPS.order.default([z], 0, -1, False)
        return (z @ w), y, before

    lines = inductor_code(f, torch.randn(16, 16), torch.randn(16, 16))
    enter, leave, take = [i for i, line in enumerate(lines) if "order.pinned" in line]
    products = [i for i, line in enumerate(lines) if "extern_kernels.mm" in line]
    assert [enter < i < leave for i in products] == [True, True, False]
    assert take < products[2]


@pytest.mark.slow
def test_inductor_trains_through_marks_and_leaves_them_in_the_forward():
    def f(x, w):
        y = (x @ w).relu()
        OPS.order.default([x], 0, -1, False)
        z = y * 2
        OPS.order.default([x, w], 0, -1, True)
        OPS.record_use.default([y, w], 0, -1, True)
        return z.sum()

    def train(x, w):
        compiled(x, w).backward()

    x = torch.randn(16, 16)
    w1 = torch.randn(16, 16, requires_grad=True)
    w2 = w1.detach().clone().requires_grad_()
    compiled = torch.compile(f, fullgraph=True)
    with compiled_anew():
        _, codes = run_and_get_code(train, x, w1)
    f(x, w2).backward()
    torch.testing.assert_close(w1.grad, w2.grad)
    forward, backward = codes
    for call, count in (("order.pinned", 2), ("record_use.default", 1)):
        assert forward.count(f"ops.esper_alloc.{call}(") == count
    assert "esper_alloc" not in backward.split("def call(")[1]


@pytest.mark.slow
def test_inductors_marks_last_until_the_free():
    """It may still move a read behind one: here it finds that the copy is none."""

    def f(x):
        y = x.clone()
        OPS.record_use.default([x], 0, -1, False)
        return y.sin()

    lines = inductor_code(f, torch.randn(32))
    mark = lines[line_of(lines, "record_use.default")]
    assert re.search(r"\(\[arg0_1\], .*, True\)", mark), mark


def test_inductor_marks_inputs_that_it_writes_after_the_mark():
    def f(x):
        x.relu_()
        y = x.sum()
        OPS.record_use.default([x], 0, -1, False)
        return y

    lines = inductor_code(f, torch.randn(32))
    assert "arg0_1" in lines[line_of(lines, "record_use.default")]


def test_inductor_marks_what_has_a_size_that_depends_on_data():
    def f(x):
        found = x.nonzero().flatten()
        OPS.record_use.default([found], 0, -1, False)
        return x[found].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        lines = inductor_code(f, torch.tensor([0.0, 2.0, 3.0]))
    assert line_of(lines, "nonzero") < line_of(lines, "record_use.default")


def test_inductor_keeps_what_a_scope_computes_inside_it():
    """Also what the scope reads again itself and could be computed anew behind it."""

    def f(x, w):
        OPS.order.default([x], 0, -1, False)
        y = x.sin()
        z = y.cos() @ w
        OPS.order.default([x], 0, -1, True)
        return z, y.exp()

    lines = inductor_code(f, torch.randn(16, 16), torch.randn(16, 16))
    _, leave = [i for i, line in enumerate(lines) if "order.pinned" in line]
    behind = [line for line in lines[leave:] if "fused_exp" in line]
    assert behind and "arg0_1" not in "".join(behind)


def test_equal_ends_of_scopes_are_not_merged():
    def f(x, w):
        for _ in range(2):
            OPS.order.default([x], 0, -1, False)
            OPS.order.default([x], 0, -1, True)
        return (x * w).sum()

    w = torch.randn(16, requires_grad=True)
    forward, _ = inductor_training(f, torch.randn(16), w)
    assert len([line for line in forward if "order.pinned" in line]) == 4


@pytest.mark.parametrize("mark", [False, True])
def test_inductor_does_not_write_into_a_marked_buffer(mark, read_elsewhere):
    def f(x, index, value):
        y = x @ x
        r = read_elsewhere.read(y)
        if mark:
            OPS.record_use.default([y], 0, -1, False)
        return y.index_put((index,), value + r)

    arguments = torch.randn(8, 8), torch.tensor([1, 2]), torch.zeros(2, 8)
    lines = inductor_code(f, *arguments)
    buffer = argument_of(lines[line_of(lines, "esper_test.read")])
    writes = [line for line in lines if line.startswith("cpp_fused") and "index_put" in line]
    written = writes[-1].rstrip(")").rpartition(" ")[2]
    assert (written == buffer) != mark


def inductor_training(function, *arguments):
    """The statements of forward and backward; the gradients are compared."""
    gradients = []
    with compiled_anew():
        compiled = torch.compile(function, fullgraph=True)
        for call in (compiled, function):
            plain = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
            _, codes = run_and_get_code(lambda c=call, a=plain: c(*a).backward())
            gradients.append([a.grad for a in plain])
            if call is compiled:
                forward, backward = map(statements, codes)
    torch.testing.assert_close(*gradients)
    return forward, backward


@pytest.mark.parametrize("mark", [False, True])
def test_backward_does_not_write_into_what_forward_marked(mark, read_elsewhere):
    def f(x, w):
        y = x.sin() @ w
        r = read_elsewhere.read(y)
        if mark:
            OPS.record_use.default([y], 0, -1, False)
        return (y * 2).tanh().exp().sum() + r.detach().sum()

    w = torch.randn(16, 16, requires_grad=True)
    _, backward = inductor_training(f, torch.randn(16, 16), w)
    assert bool(reused(backward, "mm")) != mark
    assert "esper_alloc" not in "".join(backward)


def test_a_read_that_backward_repeats_is_marked_again(read_elsewhere):
    def everything(context, operator, *args, **kwargs):
        return torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return read_elsewhere.read(x.t())

        @staticmethod
        def backward(ctx, gradient):
            return gradient.expand(16, 16)

    def block(x, w):
        y = (x @ w).sin()
        r = Read.apply(y)
        OPS.record_use.default([y], 0, -1, True)
        return r.sin()

    def f(x, w):
        contexts = functools.partial(
            torch.utils.checkpoint.create_selective_checkpoint_contexts, everything
        )
        return torch.utils.checkpoint.checkpoint(
            block, x, w, use_reentrant=False, context_fn=contexts
        ).sum()

    w = torch.randn(16, 16, requires_grad=True)
    for lines in inductor_training(f, torch.randn(16, 16), w):
        assert_marks_what_is_read(lines, "esper_test.read")


def test_what_is_read_keeps_its_strides_where_others_prefer_their_own(read_elsewhere):
    """Else the reader would get a copy, and the mark another tensor."""

    def f(x, weight):
        y = torch.conv2d(x, weight, padding=1).relu()
        z = torch.conv2d(y, weight, padding=1)
        r = read_elsewhere.read(y)
        OPS.record_use.default([y], 0, -1, False)
        return z, r

    lines = inductor_code(f, torch.randn(2, 8, 8, 8), torch.randn(8, 8, 3, 3))
    assert_marks_what_is_read(lines, "esper_test.read")


def test_backward_makes_marks_of_its_own():
    class Marking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x @ x
            ctx.save_for_backward(y)
            return y.sin()

        @staticmethod
        def backward(ctx, gradient):
            (y,) = ctx.saved_tensors
            OPS.record_use.default([y], 0, -1, True)
            return y.cos() * gradient

    x = torch.randn(16, 16, requires_grad=True)
    _, backward = inductor_training(lambda x: Marking.apply(x).sum(), x)
    assert argument_of(backward[line_of(backward, "record_use.default")]) == "mm"


def test_inductor_marks_what_an_operator_has_written_into_a_part_of(read_elsewhere):
    def f(x):
        y = x @ x
        for start in (2, 4):
            read_elsewhere.fill(y[start:])
            OPS.record_use.default([y[start:]], 0, -1, False)
        return y.sin() + x

    lines = inductor_code(f, torch.randn(8, 8))
    fills = [argument_of(line) for line in lines if "esper_test.fill" in line]
    marks = [argument_of(line) for line in lines if "record_use.default" in line]
    assert len(fills) == 2 and fills == marks


@pytest.mark.slow
@pytest.mark.parametrize("mark", [False, True])
def test_a_buffer_that_a_branch_marks_is_not_reused_around_it(mark, read_elsewhere):
    def read(y):
        r = read_elsewhere.read(y)
        if mark:
            OPS.record_use.default([y], 0, -1, False)
        return r.clone()

    def f(x, w, choice):
        y = x @ w
        r = torch.cond(choice, read, lambda y: y.sum(0), (y,))
        z = y @ w
        return z @ w @ x, r + 1

    lines = inductor_code(f, torch.randn(32, 32), torch.randn(32, 32), torch.tensor(True))
    buffer = re.search(r"args = \[(\w+),", "".join(lines)).group(1)
    assert bool(reused(lines, buffer)) != mark


def test_without_the_passes_that_they_need_marks_are_an_error():
    def f(x):
        y = x + 1
        OPS.record_use.default([y], 0, -1, False)
        return y * 2

    with (
        torch._inductor.config.patch(pattern_matcher=False),
        pytest.raises(Exception, match="switch both on"),
    ):
        inductor_code(f, torch.randn(32))


# The operators


@pytest.mark.parametrize(
    "operator, arguments",
    [
        ("record_use", (0, -1, False)), ("record_use", (0, -2, True)),
        ("record_use.again", (0, -1, 7)), ("order", (0, -1, False)), ("in_memory", ()),
    ],
)  # fmt: skip
def test_operators_pass_opcheck(operator, arguments):
    packet, _, overload = operator.partition(".")
    op = getattr(getattr(OPS, packet), overload or "default")
    for tensors in ([torch.ones(3), torch.ones(2, 2)], [torch.ones(3, requires_grad=True)]):
        torch.library.opcheck(op, (tensors, *arguments))


# Modes and transforms


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that pass by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "esper_alloc":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cuda", "cpu", "meta"])
def test_fake_tensors_are_marked_without_error(device):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(3, device=device)
        esper_alloc.record_use(x)
        esper_alloc.record_use(x, stream())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        esper_alloc.record_use([x, torch.nn.Parameter(torch.ones(1))], stream())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fake_tensors_of_unknown_size_are_marked(device):
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        size = fake.shape_env.create_unbacked_symint()  # comparing it would be an error
        x = torch.empty(size, 3, device=device)
        with Seen() as seen:
            esper_alloc.record_use([x, x[:, 0]], stream())
    assert seen.names.count("esper_alloc.record_use.default") == (2 if device == "cuda" else 0)


def test_vmap_and_grad_mark_what_is_below():
    seen = []

    def f(x):
        OPS.record_use.default([x], 0, -1, False)
        seen.append(x)
        return (x * 2).sum()

    x = torch.arange(6.0).reshape(2, 3)
    with Seen() as mode:
        torch.testing.assert_close(torch.vmap(f)(x), x.sum(1) * 2)
        torch.vmap(torch.vmap(f))(x)
        torch.testing.assert_close(torch.func.grad(f)(x), torch.full((2, 3), 2.0))
        torch.vmap(torch.func.grad(f))(x)
        torch.testing.assert_close(torch.func.functionalize(f)(x), f(x))
    assert mode.names.count("esper_alloc.record_use.default") == 6
    assert torch._C._functorch.is_batchedtensor(seen[0])


class Wrapped(torch.Tensor):
    """A wrapper that does not say what it holds."""

    @staticmethod
    def __new__(cls, knows):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), device="cuda")

    def __init__(self, knows):
        self.knows = knows
        self.seen = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        wrapped = args[0][0] if isinstance(args[0], list) else args[0]
        wrapped.seen.append(str(func))
        if wrapped.knows not in str(func):
            raise NotImplementedError(func)


def test_wrappers_see_the_operator_and_older_ones_record_stream():
    knowing, old, deaf = map(Wrapped, ("esper_alloc.record_use", "aten.record_stream", "nothing"))
    esper_alloc.record_use([knowing, old, deaf], stream())
    assert knowing.seen == ["esper_alloc.record_use.default"]
    assert old.seen == ["esper_alloc.record_use.default", "aten.record_stream.default"]
    assert deaf.seen == old.seen


@pytest.mark.slow
def test_sharded_and_wrapped_tensors_mark_what_is_inside():
    program = """
import torch, torch.distributed as dist
import esper_alloc
from esper_alloc.uses import containers
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
inner = torch.ones(4, 4)
sharded = DTensor.from_local(inner, init_device_mesh("cpu", (2,)), [Shard(0)])
found = []
containers.find_tensors([sharded, TwoTensor(inner, inner)], found)
esper_alloc.record_use([sharded, TwoTensor(inner, inner)])
torch.ops.esper_alloc.record_use.default([sharded], 0, -1, False)
containers._HOST = ("meta",)
graphs = []

def f(x):
    y = x * 2
    esper_alloc.record_use(y)
    return y + 1

for value, count in ((sharded, 1), (TwoTensor(inner, inner), 2)):
    keep = aot_autograd(fw_compiler=lambda module, inputs: graphs.append(module) or module)
    with torch.no_grad():
        torch.compile(f, fullgraph=True, backend=keep)(value)
    names = [str(node.target) for node in graphs[-1].graph.nodes]
    assert names.count("esper_alloc.record_use.default") == count, names
"""
    output_of("-c", program, cwd=ROOT)


# Teaching PyTorch


@pytest.mark.slow
def test_nothing_of_the_compiler_is_loaded_before_it_is_needed():
    program = """
import sys, torch, esper_alloc
esper_alloc.record_use(torch.ones(1))
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
import torch._dynamo
from esper_alloc.uses import use
from torch._dynamo.trace_rules import _polyfilled_function_ids as known
assert id(use.record_use) in known
"""
    output_of("-c", program, cwd=ROOT)


@pytest.mark.slow
def test_inductor_learns_of_marks_after_it_was_imported():
    """What it kept on the disk by other rules is not taken."""
    program = """
import torch, esper_alloc
from torch._inductor import compile_fx
from torch._inductor.fx_passes import joint_graph
torch.compiler.config.cache_key_tag = "mine"
esper_alloc.record_use
mark = torch.ops.esper_alloc.record_use.default
assert ("call_function", mark) in joint_graph.patterns.patterns
assert mark in torch._inductor.lowering.lowerings
assert torch.compiler.config.cache_key_tag.startswith("mine esper_alloc ")
"""
    output_of("-c", program, cwd=ROOT)


def test_a_torch_that_cannot_be_taught_is_said_in_one_warning(monkeypatch):
    monkeypatch.setattr(teaching, "_said", False)

    def teach(module):
        raise AttributeError("no such thing")

    with pytest.warns(RuntimeWarning, match="cannot teach inductor of torch") as seen:
        teaching._teach("inductor", teach, torch)
        teaching._teach("Dynamo", teach, torch)  # there are several parts to teach
    assert len(seen) == 1


@pytest.mark.slow
def test_untaught_dynamo_runs_marks_eagerly():
    """Outside fullgraph the call is a break in the graph, and nothing is lost."""
    program = """
import warnings, torch
from esper_alloc.uses import teaching
def refuse(*args):
    raise AttributeError("no such thing")
for name in ("_teach_dynamo", "_teach_dynamo_method", "_teach_dynamo_subclasses"):
    setattr(teaching, name, refuse)
import esper_alloc
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import torch._dynamo

    def f(x):
        y = x + 1
        esper_alloc.record_use([y, 3])
        return y * 2

    graphs = []
    backend = lambda module, inputs: graphs.append(module) or module
    assert torch.equal(torch.compile(f, backend=backend)(torch.ones(2)), torch.full((2,), 4.0))
assert len(graphs) == 2, graphs
assert len([w for w in seen if "cannot teach" in str(w.message)]) == 1, [str(w.message) for w in seen]
"""
    output_of("-c", program, cwd=ROOT)
