"""The ends of processes of tests/gpu/test_exits.py, as far as they need no kernel, on the
simulated device."""

import sys
from pathlib import Path

import pytest
from on_sim import build

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "gpu" / "programs"))

import exits  # noqa: E402

NAMES = [name for name, one in exits.SCENARIOS.items() if "gpu" not in one.needs]


@pytest.fixture(scope="module")
def ends(library: Path) -> dict[tuple[str, str], exits.End]:
    jobs = [(exits.OURS, name) for name in NAMES]
    # PyTorch's own allocator is asked where it may say something itself.
    jobs += [(exits.NATIVE, name) for name in NAMES if not exits.SCENARIOS[name].silent]
    return exits.run_all(jobs, build.environment(library), workers=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_ends_as_it_should(ends: dict[tuple[str, str], exits.End], name: str) -> None:
    wrong = exits.judge(name, ends[exits.OURS, name], ends.get((exits.NATIVE, name)))
    assert wrong is None, wrong


def test_of_a_noisy_end_only_complaints_of_an_allocator_or_cuda_count() -> None:
    name = "an_iterator_that_is_not_finished"
    quiet = exits.End(0, "done", [])

    def wrong_with(line: str) -> str | None:
        return exits.judge(name, exits.End(0, "done", [line]), quiet)

    assert wrong_with("Exception in thread Thread-# (_pin_memory_loop)") is None
    assert "it said" in str(wrong_with("esper_alloc: block # was freed twice"))
    assert "it said" in str(wrong_with("torch.AcceleratorError: CUDA error: out of memory"))
    assert exits.judge(name, exits.End(1, "done", []), quiet) == "it ended with 1, not 0"
