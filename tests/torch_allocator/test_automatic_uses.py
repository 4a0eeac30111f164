"""Uses that operators do not show: what is noted of compiled graphs and Triton kernels, and
which streams are announced."""

import types
import warnings
from typing import Any

import pytest
from pytest import MonkeyPatch

torch = pytest.importorskip("torch")

from esper_alloc.torch_allocator import automatic_uses  # noqa: E402


class Compiled:
    """Stands for the compiled half."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.streams = 0

    def note_uses(self, values: Any) -> None:
        self.noted.append(list(values))

    def observe_now(self) -> None:
        self.streams += 1


@pytest.fixture
def compiled() -> Compiled:
    return Compiled()


@pytest.mark.slow
def test_inputs_of_compiled_graphs_are_noted_forward_and_backward(
    compiled: Compiled, monkeypatch: MonkeyPatch
) -> None:
    output_code = pytest.importorskip("torch._inductor.output_code")
    kinds = (output_code.CompiledFxGraph, output_code.CompiledAOTI)
    for kind in kinds:
        monkeypatch.setattr(kind, "__call__", kind.__call__)
    automatic_uses._note_graph_inputs(compiled.note_uses, output_code)
    torch._dynamo.reset()

    @torch.compile
    def step(x: Any, w: Any) -> Any:
        return (x * w).sin().sum()

    x, w = torch.randn(64), torch.randn(64, requires_grad=True)
    loss = step(x, w)
    (forward,) = compiled.noted
    assert {id(x), id(w)} <= set(map(id, forward))
    loss.backward()
    assert len(compiled.noted) == 2 and all(isinstance(x, torch.Tensor) for x in compiled.noted[1])
    assert torch.allclose(w.grad, x * (x * w.detach()).cos())
    torch._dynamo.reset()


def test_arguments_of_triton_kernels_are_noted(compiled: Compiled) -> None:
    class JITFunction:
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return args, grid, warmup, kwargs

    automatic_uses._note_kernel_arguments(
        compiled.note_uses, types.SimpleNamespace(JITFunction=JITFunction)
    )
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    descriptor = types.SimpleNamespace(base=y)
    given = (x, 3, (descriptor, 4), x[:0])
    answer = JITFunction().run(*given, grid=(1,), warmup=False, out=z, BLOCK=4)
    assert answer == (given, (1,), False, {"out": z, "BLOCK": 4})
    (noted,) = compiled.noted
    flat = [part for one in noted for part in (one if isinstance(one, list) else [one])]
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    assert [id(one) for one in tensors] == [id(x), id(y), id(given[3]), id(z)]


def test_the_installed_triton_can_be_seen(compiled: Compiled, monkeypatch: MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    ran = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, **kwargs: ran.append(args))
    automatic_uses._note_kernel_arguments(compiled.note_uses, jit)

    def kernel(x: Any) -> None:
        pass

    x = torch.ones(1)
    try:
        jit.JITFunction(kernel)[(1,)](x)
    except OSError:
        pytest.skip("no source of the kernel")
    assert len(ran) == 1 and compiled.noted[0][0] is x


def test_external_streams_are_announced(compiled: Compiled) -> None:
    class Stream:
        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            made.given = kwargs
            return made

    class ExternalStream(Stream):
        def __new__(cls, pointer: int, device: Any = None) -> Any:
            return super().__new__(cls, device, stream_ptr=pointer)

    automatic_uses._announce_external_streams(
        compiled.observe_now, types.SimpleNamespace(Stream=Stream)
    )
    made: Any = ExternalStream(7, device=0)
    assert type(made) is ExternalStream and made.given == {"stream_ptr": 7}
    assert compiled.streams == 1
    Stream(stream_id=4096, device_index=0, device_type=1)  # as get_stream_from_external() makes it
    assert compiled.streams == 2
    for of_pytorch in ({"stream_id": 3}, {"stream_id": 0}, {}):
        Stream(**of_pytorch)
    assert compiled.streams == 2


def test_a_torch_of_another_make_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match=r"cannot see the uses of compiled graphs of torch"):
        automatic_uses._teach(
            "compiled graphs",
            lambda module: automatic_uses._note_graph_inputs(print, module),
            types.ModuleType("nothing"),
        )


def test_everything_is_installed_once(compiled: Compiled, monkeypatch: MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(automatic_uses, "_installed", False)
    monkeypatch.setattr(automatic_uses, "when_imported", lambda name, then: waits.append(name))
    monkeypatch.setattr(torch.cuda.Stream, "__new__", torch.cuda.Stream.__new__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        automatic_uses.install(compiled)
        automatic_uses.install(compiled)
    assert waits == ["torch._inductor.output_code", "triton.runtime.jit"]
