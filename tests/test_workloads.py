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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_varlen", "llama_decode", "ppo"])
def test_a_job_repeats_bit_for_bit(workloads, name):
    first, second = outputs(workloads, name, 1), outputs(workloads, name, 1)
    assert first == second
    assert len(set(first)) > 1 and all(one == one for one in first)


def test_strict_jobs_have_nothing_that_is_refused(workloads):
    """As far as the CPU can tell."""
    torch.use_deterministic_algorithms(True)
    try:
        outputs(workloads, "llama_varlen", 1)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
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
        assert job.schedule and job.steps >= job.small_steps > 1


# --- the measuring side of jobs.py, limits.py and startup.py, on a CPU ---------------


class Card:
    """Stands for torch.cuda: a card with a limit on what a batch may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.limit = float("inf")
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [], raising=False)
        for name, answer in (
            ("synchronize", None),
            ("empty_cache", None),
            ("mem_get_info", (60 << 30, 140 << 30)),
            ("set_per_process_memory_fraction", None),
            ("memory_stats", {"requested_bytes.all.peak": 3 << 30, "num_alloc_retries": 0}),
            ("max_memory_allocated", 4 << 30),
            ("max_memory_reserved", 5 << 30),
            ("memory_reserved", 2 << 30),
            ("get_device_name", "a card"),
            ("init", None),
        ):
            monkeypatch.setattr(torch.cuda, name, self.function(name, answer))

    def function(self, name, answer):
        def call(*arguments):
            self.calls.append(name)
            return answer

        return call


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def script(monkeypatch: pytest.MonkeyPatch, workloads, name: str):
    for other in ("jobs", "neighbour", "limits", "startup"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    module = __import__(name)
    if hasattr(module, "prepare"):
        monkeypatch.setattr(module, "prepare", lambda *how: torch.manual_seed(0))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_varlen", "llama_decode", "ppo"])
def test_a_measured_job_gives_every_figure(monkeypatch, workloads, card, name):
    jobs = script(monkeypatch, workloads, "jobs")
    monkeypatch.setattr(jobs, "nvidia_smi_used_mib", lambda: 81925.0)
    passes = jobs.measure("native", name, True)
    assert next(passes) == {} and not card.calls  # imported, and nothing more
    smi = iter([1000.0, 1000.0 + 2048 + 700])  # before, when others have 1000 MiB, and after
    monkeypatch.setattr(jobs, "nvidia_smi_used_mib", lambda: next(smi))
    found = next(passes)
    assert len(found["outputs"]) == workloads.JOBS[name].small_steps
    assert found["beyond_reserved_mib"] == 80 * 1024 - 2048 - 1000
    assert found["smi_beyond_reserved_mib"] == 700
    assert found["retries"] == 0 and found["machine"]["gpu"] == "a card"
    again = next(passes)
    assert again["step_ms"] > 0 and "machine" not in again and "beyond_reserved_mib" not in again
    assert name == "llama_decode" or again["outputs"] != found["outputs"]  # training goes on
    repeated = jobs.measure("native", name, True)
    next(repeated)
    monkeypatch.setattr(jobs, "nvidia_smi_used_mib", lambda: None)
    first = next(repeated)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 1})
    with pytest.raises(RuntimeError, match="memory ran out beside the other workers"):
        next(repeated)
    assert first["outputs"] == found["outputs"] and "smi_beyond_reserved_mib" not in first


def test_a_job_is_made_deterministic(monkeypatch, workloads, card):
    jobs = __import__("jobs")
    monkeypatch.setattr(jobs, "use_allocator", lambda name: card.calls.append(name))
    before = torch.utils.deterministic.fill_uninitialized_memory
    try:
        jobs.prepare("native", strict=True)
        assert card.calls == ["native"]
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        jobs.prepare("native")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        torch.utils.deterministic.fill_uninitialized_memory = before


def test_a_history_is_recorded(monkeypatch, workloads, card, tmp_path):
    jobs = script(monkeypatch, workloads, "jobs")
    said = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *a, **k: said.append(("on", a, k))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: said.append(path))
    monkeypatch.setattr(
        torch.cuda, "memory_snapshot", lambda: [{"is_expandable": True}, {"is_expandable": False}]
    )
    found = jobs.record("native", "ppo", True, "here")
    assert found["segments"] == "mapped"
    assert said == [("on", ("all",), {"context": None, "stacks": "python"}), "here"]
    assert found["peak_reserved_mib"] == 5 * 1024


@pytest.mark.slow
def test_the_largest_batch_is_bisected(monkeypatch, workloads, card):
    limits = script(monkeypatch, workloads, "limits")
    monkeypatch.setattr(limits, "MOST", 16)
    works = limits.trial

    def trial(name, batch, small):
        if batch > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        works(name, min(batch, 2), True)

    monkeypatch.setattr(limits, "trial", trial)
    found = limits.measure("native", "batch", "llama_varlen", False)
    assert found["batch"] == 5 and found["tries"] == 6  # 1, 2, 4, 8, 6, 5
    assert card.calls.count("empty_cache") == 6
    assert card.calls.count("set_per_process_memory_fraction") == 1


def test_other_errors_than_lack_of_memory_are_not_hidden(monkeypatch, workloads):
    limits = script(monkeypatch, workloads, "limits")
    with pytest.raises(ValueError):
        limits.survives(lambda: int("x"))


def test_a_job_with_the_limit_in_use(monkeypatch, workloads, card):
    limits = script(monkeypatch, workloads, "limits")
    asked = []
    monkeypatch.setattr(limits, "take", asked.append)
    found = limits.run_under_pressure("tight", "ppo", True)
    assert asked[0] == int((20 << 30) * 0.99) - (3 << 30)
    assert found["failed"] == 0 and found["step_ms"] > 0 and found["retries"] == 0
    assert found["peak_mib"] == 3 * 1024


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_beside_a_neighbour(monkeypatch, workloads, card, fails):
    limits = script(monkeypatch, workloads, "limits")
    left = []

    class Client:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            left.append("ended")

        def leave(self, size):
            left.append(size)
            if fails and len(left) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. More.\nMuch more.")

    monkeypatch.setattr(limits, "Client", Client)
    found = limits.run_under_pressure("neighbour", "ppo", True)
    rooms = [int(part * (3 << 30)) - (2 << 30) + (64 << 20) for part in (1.1, 1.05)]
    assert left == [*rooms, "ended"]
    assert found["failed"] == int(fails)
    assert found["why"] == ("CUDA out of memory. More." if fails else None)
    assert (found["step_ms"] is None) == fails
    assert "set_per_process_memory_fraction" not in card.calls


def test_startup_measures_each_step(monkeypatch, workloads, card):
    startup = script(monkeypatch, workloads, "startup")
    monkeypatch.setattr(torch, "empty", lambda size, device: torch.zeros(size))
    found = startup.measure_first("native")
    assert set(found) == {
        "machine", "context_ms", "idle_mib", "first_ms", "first_allocation_us", "after_mib",
    }  # fmt: skip
    assert found["idle_mib"] == 80 * 1024
    assert list(startup.measure_import("native")) == ["torch_ms"]
    import esper_alloc

    monkeypatch.setattr(esper_alloc, "enable", lambda: card.calls.append("enabled"))
    monkeypatch.setattr(esper_alloc, "is_enabled", lambda: True)
    found = startup.measure_import("esper_alloc")
    assert found["torch_ms"] <= found["import_ms"] <= found["enabled_ms"]
    assert card.calls.count("enabled") == 1
    startup.measure_first("esper_alloc")
    assert card.calls.count("enabled") == 2
