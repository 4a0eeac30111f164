"""The auditor on a GPU finds nothing in correct programs and in the examples."""

import pytest
from helper import ROOT, run_fresh, run_python
from scenario import NATIVE, OURS, run_program


@pytest.mark.parametrize("allocator", [OURS, NATIVE])
@pytest.mark.parametrize(
    "name", ["prefetching", "compiled", "captured", "checkpointed", "branches", "sharded"]
)
def test_a_correct_program_has_no_finding(name: str, allocator: str) -> None:
    found = run_program("audit", allocator, name)
    assert found["complete"]
    assert found["findings"] == 0, found["text"]


@pytest.mark.parametrize(
    "command",
    [
        "offload_activations.py", "prefetch.py", "side_stream.py", "train_gpt2.py --steps 10",
        "ppo_sleep.py --rounds 4", "cifar_envs.py", "reduce_scatter.py",
    ],
)  # fmt: skip
def test_an_example_has_no_finding(command: str) -> None:
    """Through the command, whose exit code would say so."""
    name, *options = command.split()
    arguments = ["audit", str(ROOT / "examples" / name), *options]
    run_python(
        "import sys\n"
        "from esper_alloc.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "assert code == 0, code\n"
    )


@pytest.mark.two_gpus
def test_sharded_training_on_two_gpus_has_no_finding() -> None:
    """As docs/auditor.md starts it: each rank under an audit of its own."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_fresh(*torchrun, "-m", "esper_alloc", "audit", str(ROOT / "examples" / "fsdp2.py"))
