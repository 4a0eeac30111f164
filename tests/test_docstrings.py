"""Every public name has an example in its docstring, and the examples run.

Those of helpers run on the CPU, the others on the simulated device, and those that must come before
CUDA is used in processes of their own.
"""

import contextlib
import ctypes
import os
import re
import sys
import textwrap
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from processes import output_of
from pytest import MonkeyPatch

import esper_alloc

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "shim"), str(TESTS / "helpers")]

NAMES = [name for name in esper_alloc.__all__ if name != "__version__"]
BEFORE_CUDA = ("UnavailableError", "allocator", "enable", "pluggable_allocator")
HELPERS = [
    name
    for name in NAMES
    if name in ("CloneCounts", "cudagraph_outputs")
    or esper_alloc._LATER.get(name, "").startswith("helpers.")
]
#: As tools/docstrings.py finds it.
CODE = re.compile(r"^( *)(.*?) ?::\n\n((?:\1    .*\n|\n)+)", re.M)


def examples(name: str) -> list[str]:
    text = getattr(esper_alloc, name).__doc__ or ""
    # The first line has no indentation; record_use's signature may stand before it.
    return [textwrap.dedent(one[3]) for one in CODE.finditer(text + "\n")]


def stand_ins(device: str) -> dict[str, Any]:
    """What examples take from the program around them."""
    import torch

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def model(x: Any) -> Any:
        return x * 2

    images, labels = torch.rand(8, 3, 32, 32), torch.arange(8)
    given: dict[str, Any] = dict.fromkeys(["train_step", "generate", "launch_kernel"], nothing)
    given.update(
        {name: getattr(esper_alloc, name) for name in NAMES},
        **{"esper_alloc": esper_alloc, "torch": torch, "ctypes": ctypes, "threading": threading},
        warnings=warnings,
        **dict.fromkeys(["compiled", "f", "compiled_image", "compiled_direction"], model),
        **{"x": torch.ones(8, device=device), "angles": torch.ones(3), "images": images},
        labels=labels,
        **{"inputs": images, "targets": labels, "overrides": torch.ones(2), "env_stream": None},
        **{"predicted": torch.ones(64), "returns": torch.ones(64), "streams": [None, None]},
        warp=types.SimpleNamespace(ScopedCapture=contextlib.nullcontext),
        **{"simulate": nothing, "cross_entropy": torch.nn.functional.cross_entropy},
        model=types.SimpleNamespace(fused_forward=lambda inputs, _: inputs.flatten(1)),
    )
    if device == "cpu":
        given["batches"] = esper_alloc.GatherBatchIterator(
            images, labels, batch_size_per_env=2, n_envs=2, env_devices=["cpu"] * 2, seed=1
        )
    else:
        given["side"] = torch.cuda.Stream()
        with esper_alloc.tag("weights"):
            given["weights"] = torch.ones(8, device=device)
    return given


def run(name: str, device: str) -> None:
    for number, example in enumerate(examples(name)):
        code = compile(example, f"<example {number} of {name}>", "exec")
        names = stand_ins(device)
        try:
            exec(code, names)
        finally:
            if device == "cuda":
                esper_alloc.wake()


@pytest.mark.parametrize("name", NAMES)
def test_there_is_an_example(name: str) -> None:
    pytest.importorskip("torch")
    assert examples(name)


@pytest.mark.parametrize("name", HELPERS)
def test_examples_of_helpers_run(name: str, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import published_cifar

    published_cifar.use_stub(monkeypatch)
    published_cifar.write_cifar(tmp_path / "data", "cifar10")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found = [re.sub(r'"cuda(:\d)?"', '"cpu"', one) for one in examples(name)]
    monkeypatch.setitem(globals(), "examples", lambda _: found)
    run(name, "cpu")


def test_examples_run_on_the_simulated_device(library: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None or torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA, and no GPU")
    import build

    wanted = [name for name in NAMES if name not in (*BEFORE_CUDA, *HELPERS)]
    program = f"""
import simulated
import json, os, sys, traceback
os.chdir({str(tmp_path)!r})
sys.path.insert(0, {str(TESTS)!r})
import test_docstrings
wrong = {{}}
for name in {wanted!r}:
    try:
        test_docstrings.run(name, "cuda")
    except Exception:
        wrong[name] = traceback.format_exc()
print()
print(json.dumps(wrong))
"""
    wrong = build.answer(library, program, SIM_MAPS_PAGES="1")
    assert not wrong, "\n".join(wrong.values())
    assert len(wanted) > 15


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", BEFORE_CUDA)
def test_examples_run_that_come_before_cuda(name: str) -> None:
    pytest.importorskip("torch")
    try:
        esper_alloc.allocator()
    except esper_alloc.UnavailableError as error:
        pytest.skip(str(error))
    (example,) = examples(name)
    program = "import esper_alloc, torch\n" + example + "assert esper_alloc.is_enabled()\n"
    env = {
        **os.environ,
        "ESPER_ALLOC": "",
        "PYTHONPATH": str(Path(esper_alloc.__file__).parents[1]),
    }
    assert output_of("-c", program, env=env) == ""
