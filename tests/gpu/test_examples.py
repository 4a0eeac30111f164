"""The examples, each in a fresh process as a user would start it."""

import json
import re
from pathlib import Path

import pytest
from helper import ROOT, run_fresh

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def example(name: str, *arguments: str, **env: str) -> str:
    path = str(ROOT / "examples" / name)
    return run_fresh(path, *arguments, env={**DETERMINISTIC, **env})


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern!r} in\n{text}"
    return int(found.group(1))


def test_prefetching_holds_a_few_batches() -> None:
    printed = example("prefetch.py")
    assert number(r"(\d+) elements were read wrong", printed) == 0
    # Three batches on the copy stream, two products and some masks beside them: of 64 MiB
    # or less each, and not as many as the host is ahead of the GPU. The two masks of a
    # step are 16 MiB each. The allowance may be pending besides.
    assert number(r"(\d+) MiB reserved", printed) <= 8 * 64 + 2 * 16 + 128


def test_prefetching_under_pytorchs_own_allocator() -> None:
    printed = example("prefetch.py", "--native")
    assert number(r"(\d+) elements were read wrong", printed) == 0


def test_offloading_keeps_gradients_and_saves_memory() -> None:
    printed = example("offload_activations.py")
    assert "the gradients are equal" in printed
    plain = number(r"at the peak (\d+) MiB", printed)
    offloaded = number(r"with offloading (\d+) MiB", printed)
    assert offloaded < 0.8 * plain, printed


def test_one_line_does_what_the_recipe_does() -> None:
    printed = example("reduce_scatter.py")
    assert "WRONG" not in printed
    by_hand = number(r"by_hand +(\d+) MiB.* equal", printed)
    by_record_use = number(r"by_record_use +(\d+) MiB.* equal", printed)
    assert by_hand <= 3 * 64
    assert 0 < by_record_use <= by_hand + 128  # the allowance


def test_the_extension_protects_what_it_reads(tmp_path: Path) -> None:
    printed = example("cpp_extension/run.py", "--folder", str(tmp_path))
    assert number(r"(\d+) elements wrong", printed) == 0
    # Sixteen tensors, but the next one waits for the last one's memory.
    assert number(r"(\d+) MiB reserved", printed) <= 4 * 64


def losses(*arguments: str) -> list[str]:
    printed = example("fsdp2.py", *arguments)
    found = [line.split()[1:] for line in printed.splitlines() if line.startswith("losses ")]
    assert len(found) == 1, printed
    return found[0]


@pytest.fixture(scope="module")
def native() -> list[str]:
    return losses("--native")


@pytest.mark.two_gpus
@pytest.mark.parametrize(
    "variant", [(), ("--record-use",), ("--automatic",)], ids=["own", "record_use", "automatic"]
)
def test_fsdp2_gives_natives_losses(variant: tuple[str, ...], native: list[str]) -> None:
    assert len(set(native)) > 5, "the losses hardly vary: little would be compared"
    assert losses(*variant) == native


@pytest.mark.two_gpus
def test_fsdp2_under_torchrun(native: list[str]) -> None:
    path = str(ROOT / "examples" / "fsdp2.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run_fresh(*torchrun, path, env=DETERMINISTIC)
    assert f"losses {' '.join(native)}" in printed


def test_a_trainer_and_an_engine_take_turns(tmp_path: Path) -> None:
    printed = example("ppo_sleep.py", "--samples", str(tmp_path / "samples.json"))
    samples = json.loads((tmp_path / "samples.json").read_text())
    for asleep, awake in (("engine", "trainer"), ("trainer", "engine")):
        assert any(one[asleep] == 0 < one[awake] for one in samples)
    assert number(r"mean reward (\d+) percent", printed) >= 90, printed
