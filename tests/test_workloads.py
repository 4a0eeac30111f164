"""The jobs of benchmarks/workloads.py on the CPU: what they compute, and that it repeats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
torch = pytest.importorskip("torch")


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "train", "workloads"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import workloads

    monkeypatch.setattr(workloads, "DEVICE", "cpu")
    return workloads


def outputs(workloads, name: str, passes: int) -> list[float]:
    job = workloads.JOBS[name]
    torch.manual_seed(0)
    step = job.make(True)
    return [float(step(number)) for _ in range(passes) for number in range(job.small_steps)]


@pytest.mark.parametrize("name", ["llama_varlen", "llama_decode", "ppo"])
def test_a_job_repeats_bit_for_bit(workloads, name):
    first, second = outputs(workloads, name, 1), outputs(workloads, name, 1)
    assert first == second
    assert len(set(first)) > 1 and all(one == one for one in first)


def test_training_learns(workloads):
    torch.manual_seed(0)
    step = workloads.llama_trainer(workloads.SMALL)
    losses = [float(step(2, 64)) for _ in range(60)]
    assert losses[-1] < losses[0] - 1


def test_decoding_with_a_cache_gives_what_the_whole_sequence_gives(workloads):
    torch.manual_seed(0)
    model = workloads.llama(workloads.SMALL).eval()
    ids = torch.randint(workloads.SMALL.vocabulary, (2, 20))
    with torch.inference_mode():
        whole = model(ids)
        caches = [None] * workloads.SMALL.layers
        pieces = [model(ids[:, :8], caches)]
        pieces += [model(ids[:, at : at + 1], caches) for at in range(8, 20)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-4)
    assert [tuple(keys.shape) for keys, _ in caches] == [(2, 4, 20, 16)] * 2


def test_the_schedule_of_lengths_reaches_its_most_and_stays_within(workloads):
    schedule = workloads.varlen_schedule(40, 6, 2048)
    assert schedule == workloads.varlen_schedule(40, 6, 2048)
    assert max(schedule) == (6, 2048)
    assert all(1 <= batch <= 6 and 64 <= length <= 2048 for batch, length in schedule)
    assert len(set(schedule)) > 30


def test_every_job_says_its_schedule(workloads):
    assert set(workloads.JOBS) == {"gpt2", "llama_varlen", "llama_decode", "resnet50", "ppo"}
    for job in workloads.JOBS.values():
        assert job.schedule and job.steps >= job.small_steps > 1 and job.passes > 1
