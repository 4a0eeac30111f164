"""Tensor.record_use: installed on request, and taken away again."""

import inspect
import os

import pytest
import test_use
from processes import ROOT, python

torch = pytest.importorskip("torch")

import esper_alloc  # noqa: E402
from esper_alloc.uses import tensor_method  # noqa: E402

record_use = test_use.record_use


@pytest.fixture(autouse=True)
def removed_afterwards(record_use):
    yield
    esper_alloc.uninstall_tensor_method()
    assert not hasattr(torch.Tensor, "record_use")


def test_it_is_there_after_installing_only():
    assert not hasattr(torch.Tensor, "record_use")
    esper_alloc.install_tensor_method()
    method = torch.Tensor.record_use
    esper_alloc.install_tensor_method()
    assert torch.Tensor.record_use is method
    assert torch.nn.Parameter.record_use is method
    esper_alloc.uninstall_tensor_method()
    assert not hasattr(torch.Tensor, "record_use")
    esper_alloc.uninstall_tensor_method()


def test_it_takes_what_the_function_takes():
    esper_alloc.install_tensor_method()
    x = torch.ones(3)
    stream = torch.Stream(stream_id=3, device_index=0, device_type=1)
    assert x.record_use() is None
    assert x.record_use(stream) is None
    assert x.record_use(stream=stream, event=None) is None
    assert torch.nn.Parameter(x).record_use(stream) is None
    assert x.to_sparse().record_use() is None
    signature = inspect.signature(torch.Tensor.record_use)
    assert [*signature.parameters] == ["self", "stream", "event"]
    assert signature.parameters["event"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: x.record_use("side"), "stream must be"),
        (lambda x: x.record_use(event=3), "event must be"),
        (lambda x: x.record_use(None, None), "positional argument"),
        (lambda x: x.record_use(streams=None), "unexpected"),
        (lambda x: x.record_use(tensors=x), "unexpected"),
        (lambda x: type(x).record_use(), "argument"),
    ],
)
def test_bad_calls_are_type_errors(call, message):
    esper_alloc.install_tensor_method()
    with pytest.raises(TypeError, match=message):
        call(torch.ones(1))


def test_a_method_of_somebody_else_stays(monkeypatch):
    def theirs(self):
        return "theirs"

    monkeypatch.setattr(torch.Tensor, "record_use", theirs, raising=False)
    with pytest.raises(RuntimeError, match="has a method record_use of its own"):
        esper_alloc.install_tensor_method()
    esper_alloc.uninstall_tensor_method()
    assert torch.ones(1).record_use() == "theirs"
    monkeypatch.undo()


def test_mypy_knows_the_method_by_the_plugin(tmp_path):
    pytest.importorskip("mypy")
    # Of torch just what the plugin looks at: reading all of it takes a while.
    (tmp_path / "torch" / "_C").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.pyi").write_text(
        "from torch._tensor import Tensor as Tensor\nfrom torch._C import Stream as Stream\n"
    )
    (tmp_path / "torch" / "_C" / "__init__.pyi").write_text(
        "class TensorBase: ...\nclass Stream: ...\nclass Event: ...\nclass _CudaEventBase: ...\n"
    )
    (tmp_path / "torch" / "_tensor.pyi").write_text(
        "import torch\nclass Tensor(torch._C.TensorBase): ...\n"
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\nplugins = esper_alloc.mypy_plugin\n")
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "x, s, e = torch.Tensor(), torch.Stream(), torch._C._CudaEventBase()\n"
        "x.record_use()\n"
        "x.record_use(s, event=e)\n"
        "x.record_use(3)\n"
        "x.record_use(s, e)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(tmp_path)}
    done = python("-m", "mypy", "program.py", cwd=tmp_path, env=env)
    lines = [line for line in done.stdout.splitlines() if "error" in line]
    assert [line.split(":")[1] for line in lines[:-1]] == ["5", "6"], done.stdout


def test_uninstalling_leaves_a_method_that_replaced_it(monkeypatch):
    esper_alloc.install_tensor_method()

    def theirs(self):
        return "theirs"

    torch.Tensor.record_use = theirs
    esper_alloc.uninstall_tensor_method()
    assert torch.Tensor.record_use is theirs
    del torch.Tensor.record_use
    assert tensor_method._installed == []
