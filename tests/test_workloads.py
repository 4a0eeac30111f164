"""The jobs of benchmarks/models.py on the CPU: what they compute, and that it repeats."""

import itertools
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
torch = pytest.importorskip("torch")


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "measuring", "models", "jobs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import models

    monkeypatch.setattr(models, "DEVICE", "cpu")
    torch.manual_seed(0)
    return models


#: The jobs that run on a CPU, and those of them whose sizes never repeat.
NEVER_TWICE = ("moe", "resolutions", "serving", "packed")
ON_CPU = ("llama_varlen", "llama_decode", "ppo", *NEVER_TWICE)


def outputs(models, name: str, passes: int) -> list[float]:
    job = models.JOBS[name]
    torch.manual_seed(0)
    step = job.make(True)
    return [float(step(number)) for _ in range(passes) for number in range(job.small_steps)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_a_job_repeats_bit_for_bit(models, name):
    first, second = outputs(models, name, 2), outputs(models, name, 2)
    assert first == second
    assert len(set(first)) > 1 and all(one == one for one in first)


def test_decoding_with_a_cache_gives_what_the_whole_sequence_gives(models):
    torch.manual_seed(0)
    model = models.llama(models.SMALL).eval()
    ids = torch.randint(models.SMALL.vocabulary, (2, 20))
    with torch.inference_mode():
        whole = model(ids)
        caches = {}
        pieces = [model(ids[:, :8], caches)]
        pieces += [model(ids[:, at : at + 1], caches) for at in range(8, 20)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-4)
    assert [tuple(keys.shape) for keys, _ in caches.values()] == [(2, 20, 4, 16)] * 2


# --- the jobs whose sizes never repeat -----------------------------------------------


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The shapes that one operator is given and gives, in order."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.seen = name, []

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        found = function(*arguments, **(more or {}))
        if self.name in str(function):
            self.seen.append((tuple(arguments[0].shape), tuple(found.shape)))
        return found


@pytest.mark.parametrize(
    ("name", "operator"), [("resolutions", "mse_loss."), ("packed", "embedding.")]
)
def test_no_step_has_the_size_of_another(models, name, operator):
    sizes = Sizes(operator)
    with sizes:
        outputs(models, name, 2)
    steps = 2 * models.JOBS[name].small_steps
    assert len(sizes.seen) == len(set(sizes.seen)) == steps


def decoder_of(models):
    return models.decoder(models.SMALL).eval()


def alone(models, model, ids):
    """The logits of one sequence with nothing beside it."""
    lengths = [len(ids)]
    positions = models.positions_of(lengths)
    return model.logits(model(ids, positions, models.each_apart(lengths)))


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(models):
    model, lengths = decoder_of(models), [7, 1, 20, 12]
    ids = torch.randint(256, (40,))
    positions = models.positions_of(lengths)
    row = model.logits(model(ids, positions, models.each_apart(lengths)))
    parts = [alone(models, model, part) for part in ids.split(lengths)]
    assert torch.allclose(row, torch.cat(parts), atol=1e-4)
    assert not torch.allclose(row, alone(models, model, ids), atol=1e-2)


@torch.no_grad()
def test_a_served_request_gets_what_it_would_get_alone(models):
    """Requests that join and leave while others run; each token is the likeliest after the
    sequence so far."""
    model = decoder_of(models)
    prompts = [torch.randint(256, (length,)) for length in (9, 30, 4)]
    requests = [models.Request(prompt, left) for prompt, left in zip(prompts, (3, 6, 4))]
    got = [list(prompt) for prompt in prompts]
    for number in range(6):
        running = [one for one in requests[: 2 + (number > 0)] if one.left]
        for one, token in zip(running, models.serve(model, running)):
            got[requests.index(one)].append(token)
    assert [one.left for one in requests] == [0, 0, 0]
    for ids, prompt, request in zip(got, prompts, requests):
        for end in range(len(prompt), len(ids)):
            assert alone(models, model, torch.stack(ids[:end]))[-1].argmax() == ids[end]
        assert request.seen == len(ids) - 1
        assert {len(k) for k, _ in request.caches.values()} == {request.seen}


def test_served_requests_come_and_go_with_caches_of_their_own(models, monkeypatch):
    steps = []
    serve = models.serve

    def watched(model, requests):
        before = [len(one.latest) for one in requests]
        tokens = serve(model, requests)
        steps.append((before, list(requests)))
        for one in requests:  # no view of the whole step's
            for cached in itertools.chain(*one.caches.values()):
                assert cached.untyped_storage().nbytes() == cached.nbytes
        return tokens

    monkeypatch.setattr(models, "serve", watched)
    outputs(models, "serving", 3)
    assert any(1 in before and max(before) > 1 for before, _ in steps)  # prefill beside decoding
    assert all(1 <= len(before) <= 4 for before, _ in steps)
    requests = {id(one): one for _, running in steps for one in running}.values()
    assert sum(not one.left for one in requests) > 5


def test_experts_give_what_all_of_them_would_give_weighted(models):
    experts = models.Experts(16, 24, 6, 2)
    x = torch.randn(50, 16)
    found = experts(x)
    likes = experts.router(x).softmax(dim=-1)
    kept = torch.zeros_like(likes).scatter(1, likes.topk(2).indices, 1.0) * likes
    dense = sum(kept[:, n, None] * expert(x) for n, expert in enumerate(experts.experts))
    assert torch.allclose(found, dense, atol=1e-5)
    assert sum(experts.loads) == 100 and experts.loads == (kept > 0).sum(dim=0).tolist()
    wanted = torch.autograd.grad(dense.square().sum(), list(experts.parameters()))
    given = torch.autograd.grad(found.square().sum(), list(experts.parameters()))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(given, wanted))


def test_loads_of_experts_differ_from_step_to_step(models, monkeypatch):
    loads = []
    forward = models.Experts.forward

    def watched(self, x):
        found = forward(self, x)
        loads.append(tuple(self.loads))
        return found

    monkeypatch.setattr(models.Experts, "forward", watched)
    outputs(models, "moe", 2)
    assert len(loads) == len(set(loads)) == 2 * 3 * models.SMALL.layers


# --- the measuring side of jobs.py and startup.py, on a CPU ---------------


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


def script(monkeypatch: pytest.MonkeyPatch, models, name: str):
    module = __import__(name)
    if hasattr(module, "prepare"):
        monkeypatch.setattr(module, "prepare", lambda *how: torch.manual_seed(0))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_a_measured_job_gives_every_figure(monkeypatch, models, card, name):
    jobs = script(monkeypatch, models, "jobs")
    passes = jobs.measure("native", name, True)
    assert next(passes) == {} and not card.calls  # imported, and nothing more
    found = next(passes)
    assert len(found["outputs"]) == models.JOBS[name].small_steps
    assert found["retries"] == 0 and found["machine"]["gpu"] == "a card"
    again = next(passes)
    assert again["step_ms"] > 0 and "machine" not in again
    assert name == "llama_decode" or again["outputs"] != found["outputs"]  # training goes on
    repeated = jobs.measure("native", name, True)
    next(repeated)
    first = next(repeated)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 1})
    with pytest.raises(RuntimeError, match="memory ran out beside the other workers"):
        next(repeated)
    assert first["outputs"] == found["outputs"]


def test_a_job_is_made_deterministic(monkeypatch, models, card):
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
