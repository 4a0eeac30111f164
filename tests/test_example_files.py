"""The examples load, know their arguments, and say so where there is no GPU.

What they do is tested on a GPU: tests/gpu/test_examples.py.
"""

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from processes import ROOT, output_of
from pytest import CaptureFixture, MonkeyPatch

torch = pytest.importorskip("torch")

EXAMPLES = sorted(
    str(path.relative_to(ROOT / "examples"))
    for path in (ROOT / "examples").rglob("*.py")
    if path.name != "side_stream.py"  # runs when it is loaded: tests/test_docs.py
)

#: Arguments that an example refuses, and what it says.
REFUSED = {
    "colocated_step.py": (["--steps", "0"], "must be at least 1"),
    "prefetch.py": (["--batches", "0"], "--batches must be at least 1"),
    "fsdp2.py": (["--native", "--automatic"], "not allowed with argument"),
    "cpp_extension/run.py": (["--folder", "/nonexistent"], "there is no such folder"),
}


def load(name: str) -> ModuleType:
    path = ROOT / "examples" / name
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, monkeypatch: MonkeyPatch, *arguments: str) -> object:
    """Calls an example's main(); what it gave sys.exit()."""
    module = load(name)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as exit:
        module.main()
    return exit.value.code


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_says_how_to_start_it(
    name: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    assert run(name, monkeypatch, "--help") == 0
    assert f"python examples/{name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_bad_arguments_are_refused(
    name: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    assert run(name, monkeypatch, "--no-such-option") == 2
    if name in REFUSED:
        arguments, message = REFUSED[name]
        assert run(name, monkeypatch, *arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name",
    [name for name in EXAMPLES if name not in ("cifar_envs.py", "train_gpt2.py", "simulator.py")],
)  # these three run on the CPU
def test_without_a_gpu_it_says_so(name: str, monkeypatch: MonkeyPatch) -> None:
    assert str(run(name, monkeypatch)).startswith("this example needs ")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documents_list_it(name: str) -> None:
    place = str(Path(name).parent) if "/" in name else name
    assert f"(../examples/{place})" in (ROOT / "docs" / "start.md").read_text()


@pytest.mark.slow
def test_the_extension_compiles_and_finds_the_one_core(tmp_path: Path) -> None:
    build = pytest.importorskip("esper_alloc._build")
    if torch.version.cuda is None or not build.BUILT_FOR:
        pytest.skip("needs a torch with CUDA, and CUDA's headers")
    if shutil.which("ninja") is None:
        pytest.skip("needs ninja, which PyTorch's extensions are built with")
    script = ROOT / "examples" / "cpp_extension" / "run.py"
    # The library that the extension is linked to is the module that Python imports.
    code = (
        f"import runpy, sys; sys.argv = [{str(script)!r}, '--build', '--folder', {str(tmp_path)!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
        "import esper_alloc._core\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({word for word in maps if '/_core.' in word}))\n"
    )
    said = output_of("-c", code, cwd=ROOT)
    built, cores = said.strip().splitlines()[-2:]
    assert built == f"built {tmp_path}/esper_alloc_example.so"
    assert cores == "1"


class Side:
    """An engine or trainer that says whether it is awake. Nobody works or loads asleep."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.awake, self.model = said, False, torch.nn.Linear(2, 2)
        self.room = False

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        assert self.awake
        return [[4, 5] for _ in prompts]

    def train(self, tokens: object, rewards: object) -> float:
        assert self.awake
        return 0.5

    def load(self, weights: dict[str, object]) -> None:
        assert weights.keys() == {"weight", "bias"}
        self.said.append("load")

    def fits(self) -> bool:
        return self.room

    def sleep(self) -> None:
        self.awake = False
        self.said.append("sleeps")

    def wake(self, what: str = "") -> None:
        self.awake = what != "weights"
        self.said.append(what or "trainer")


@pytest.mark.parametrize("awake", [False, True])
@pytest.mark.parametrize("room", [False, True])
def test_a_trainer_and_an_engine_take_turns(
    awake: bool, room: bool, monkeypatch: MonkeyPatch
) -> None:
    module, said = load("colocated_step.py"), list[str]()
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    engine, trainer = Side(said), Side(said)
    engine.awake, trainer.awake, trainer.room = True, awake, room
    both: list[bool] = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        yield
        both.append(engine.awake and trainer.awake)

    assert module.step(engine, trainer, [[1, 2], [3, 4]], phase, awake) == 0.5
    assert any(both) == awake
    turn = ["trainer", "sleeps"] if room else ["sleeps", "trainer"]
    assert said == (["load"] if awake else [*turn, "weights", "load", "sleeps", "kv_cache"])
    assert (engine.awake, trainer.awake) == (True, awake)


def test_room_for_a_trainer_that_sleeps_is_its_bytes_and_a_gib(monkeypatch: MonkeyPatch) -> None:
    module, model = load("colocated_step.py"), torch.nn.Linear(256, 1024, bias=False)
    trainer = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0, 0.9))
    for copies in (1, 2):  # without momentum, and with it
        needed = copies * sum(one.nbytes for one in model.parameters())
        for free, fits in ((needed + module.GIB, False), (needed + module.GIB + 1, True)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 40))
            assert module.Trainer.fits(trainer) == fits
        model(torch.ones(1, 256)).sum().backward()
        trainer.optimizer.step()


def test_weights_arrive_as_they_were_sent(monkeypatch: MonkeyPatch) -> None:
    module = load("colocated_step.py")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        "torch.multiprocessing.reductions.reduce_tensor", lambda x: (torch.clone, (x,))
    )
    monkeypatch.setattr(module, "BUCKET", 24)  # the second bucket ends with the last tensor
    sent = {"one": torch.randn(2, 3), "two": torch.randn(1), "three": torch.randn(1, 4, 2)}
    some = list(module.buckets(sent))
    assert [list(one) for one in some] == [["one"], ["two", "three"]]
    arrived = {name: x for one in some for name, x in module.opened(module.shared(one))}
    assert list(arrived) == list(sent)
    for name, x in sent.items():
        torch.testing.assert_close(arrived[name], x, rtol=0, atol=0)
