"""fused_validation_batch on the CPU: values, shapes, what is marked, errors.

The streams are in tests/gpu/test_fused_validation.py.
"""

import collections
import types

import pytest
from documents import blocks
from processes import ROOT

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from esper_alloc.helpers import validation  # noqa: E402
from esper_alloc.helpers.validation import (  # noqa: E402
    FusedValidation,
    fused_validation_batch,
    process_fused_val_batch,
)

B, K, CLASSES = 6, 4, 5


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(B, *(shape or (8,)), generator=generator)
    return inputs, torch.randint(CLASSES, (B,), generator=generator)


class Model(torch.nn.Module):
    """A model in which a configuration scales the hidden units of its elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(8, 16)
        self.dropout = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(16, CLASSES)

    def fused_forward(self, x: torch.Tensor, overrides: dict) -> torch.Tensor:
        return self.last(self.dropout(self.first(x)) * overrides["slot"])


def overrides_of(alphas: torch.Tensor) -> dict:
    return {"slot": alphas.repeat_interleave(B)[:, None]}


def loss_and_correct(outputs, targets, criterion, *, task_type, elementwise):
    assert task_type == "classification" and elementwise
    return criterion(outputs, targets), outputs.argmax(1) == targets, len(targets)


# Values

ALPHAS = torch.tensor([1.0, 0.0, 0.5, -2.0])


def assert_scored_as_alone(found, model, inputs, targets) -> None:
    """Of a model whose configurations differ by ALPHAS."""
    assert found.total == B
    for k, alpha in enumerate(ALPHAS):
        logits = model.fused_forward(inputs, {"slot": alpha})
        torch.testing.assert_close(found.loss[k], functional.cross_entropy(logits, targets))
        assert int(found.correct[k]) == int((logits.argmax(1) == targets).sum())


def test_each_configuration_scores_as_it_does_alone() -> None:
    model = Model().eval()
    inputs, targets = batch()

    def evaluate(x, y):
        logits = model.fused_forward(x, overrides_of(ALPHAS))
        loss = functional.cross_entropy(logits, y, reduction="none")
        return loss, logits.argmax(1) == y, len(y)

    found = fused_validation_batch(inputs, targets, K, evaluate=evaluate)
    assert found.loss.shape == found.correct.shape == (K,)
    assert found.correct.dtype == torch.int64
    assert_scored_as_alone(found, model, inputs, targets)


def test_evaluate_gets_the_batch_once_for_each_configuration() -> None:
    inputs, targets = batch(3, 2)
    seen = {}

    def evaluate(x, y):
        assert torch.is_inference_mode_enabled()
        seen.update(x=x, y=y)
        return x.sum(), y, len(y)

    fused_validation_batch(inputs.half(), targets.int(), K, evaluate=evaluate)
    assert seen["x"].dtype == torch.float16 and seen["y"].dtype == torch.int32
    assert torch.equal(seen["x"], inputs.half().repeat(K, 1, 1))
    assert torch.equal(seen["y"], targets.int().repeat(K))


@pytest.mark.parametrize(
    "inputs, kept",
    [
        (torch.arange(B * 48.0).view(B, 3, 4, 4), torch.channels_last),
        (torch.arange(B * 96.0).view(B, 3, 2, 4, 4), torch.channels_last_3d),
        (torch.arange(B * 48.0).view(B, 3, 4, 4), torch.contiguous_format),
        (torch.arange(2 * B * 8.0).view(2 * B, 8)[::2], None),
        (torch.arange(8.0).expand(B, 8), None),
        (torch.arange(B * 8.0).view(8, B).t(), None),
    ],
    ids=["channels_last", "channels_last_3d", "contiguous", "strided", "expanded", "transposed"],
)
def test_any_strides_do_and_the_memory_format_is_kept(inputs, kept) -> None:
    if kept:
        inputs = inputs.contiguous(memory_format=kept)

    def evaluate(x, y):
        assert x.is_contiguous(memory_format=kept or torch.contiguous_format)
        assert torch.equal(x, torch.cat([inputs] * K))
        return x.mean(), y, K * B

    fused_validation_batch(inputs, torch.zeros(B), K, evaluate=evaluate)


def test_batches_may_be_containers() -> None:
    inputs, targets = batch()
    Pair = collections.namedtuple("Pair", "left right")
    part = {"image": inputs, "rest": [Pair(targets, (inputs,))]}

    def evaluate(x, y):
        assert torch.equal(x["image"], inputs.repeat(K, 1))
        assert torch.equal(x["rest"][0].left, targets.repeat(K))
        assert torch.equal(x["rest"][0].right[0], inputs.repeat(K, 1))
        assert isinstance(y, list)
        return x["image"].mean(), y[0], K * B

    assert fused_validation_batch(part, [targets], K, evaluate=evaluate).total == B


def test_sequences_are_counted_by_token() -> None:
    tokens = torch.arange(B * 7).view(B, 7)

    def evaluate(x, y):
        loss = torch.arange(K * B * 7.0)  # flat, as cross_entropy of tokens is
        return loss, x == y, x.numel()

    loss, correct, total = fused_validation_batch(tokens, tokens, K, evaluate=evaluate)
    assert total == B * 7
    assert correct.tolist() == [B * 7] * K
    assert torch.equal(loss, torch.arange(K * B * 7.0).view(K, -1).mean(1))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_loss_stands_for_every_configuration(shape) -> None:
    inputs, targets = batch()

    def evaluate(x, y):
        return torch.full(shape, 2.5), y == y, len(y)

    loss, correct, _ = fused_validation_batch(inputs, targets, K, evaluate=evaluate)
    assert loss.tolist() == [2.5] * K and correct.tolist() == [B] * K


def test_a_single_configuration_and_a_single_element() -> None:
    def evaluate(x, y):
        return x.sum(1), x.sum(1) == y, len(y)

    found = fused_validation_batch(torch.ones(1, 3), torch.full((1,), 3.0), 1, evaluate=evaluate)
    assert isinstance(found, FusedValidation)
    assert found.loss.tolist() == [3.0] and found.correct.tolist() == [1] and found.total == 1


def test_the_total_never_divides_by_zero() -> None:
    inputs, targets = batch()
    found = fused_validation_batch(inputs, targets, K, evaluate=lambda x, y: (x.mean(), y == y, 0))
    assert found.total == 1


@pytest.mark.parametrize("dtype, n", [(torch.bfloat16, 301), (torch.float16, 70_000)])
def test_half_precision_is_counted_in_single(dtype, n) -> None:
    x = torch.zeros(n)
    found = fused_validation_batch(x, x, 1, evaluate=lambda a, b: (a, (b == 0).to(dtype), n))
    assert found.correct.tolist() == [n] and found.correct.dtype == torch.float32


# The signature of esper-lite


def env(model) -> types.SimpleNamespace:
    return types.SimpleNamespace(model=model, env_device="cpu", stream=None)


SPEC = types.SimpleNamespace(task_type="classification")


@pytest.mark.parametrize("name", ["loss_and_correct_fn", "compiled_loss_and_correct"])
def test_esper_lite_signature(name) -> None:
    model = Model().train()
    inputs, targets = batch()
    found = process_fused_val_batch(
        env(model), inputs, targets, torch.nn.CrossEntropyLoss(reduction="none"),
        overrides_of(ALPHAS), K, task_spec=SPEC, **{name: loss_and_correct},
    )  # fmt: skip
    assert not model.training
    assert_scored_as_alone(found, model, inputs, targets)


def test_esper_lite_signature_wants_one_function() -> None:
    arguments = (env(Model()), *batch(), None, {}, K)
    with pytest.raises(TypeError, match="exactly one of loss_and_correct_fn"):
        process_fused_val_batch(*arguments, task_spec=SPEC)
    with pytest.raises(TypeError, match="got 2"):
        process_fused_val_batch(
            *arguments, task_spec=SPEC, loss_and_correct_fn=print, compiled_loss_and_correct=print
        )


# What is marked


@pytest.fixture
def scopes(monkeypatch):
    """What the scope was told: its tensors, and when it was entered and left."""
    log: list = []

    class Scope:
        def __init__(self, *tensors, stream=None):
            log.append(("made", tensors, stream))

        def __enter__(self):
            log.append("entered")
            return self

        def __exit__(self, *_):
            log.append("left")

        def take(self, *tensors):
            log.append(("took", tensors))

    monkeypatch.setattr(validation, "using", Scope)
    monkeypatch.setattr(validation, "check_stream", lambda _: None)
    monkeypatch.setattr(validation, "_device", lambda *_: torch.device("cpu"))
    return log


def test_everything_that_comes_from_elsewhere_is_marked_after_the_last_read(scopes) -> None:
    inputs, targets = batch()
    override = torch.ones(3)

    def evaluate(x, y):
        scopes.append("evaluated")
        return x.mean(), y, K * B

    found = fused_validation_batch(
        inputs, targets, K, "stream", evaluate=evaluate, reads=[override], take=True
    )
    (made, tensors, stream), *rest, (took, results) = scopes
    assert (made, stream, took) == ("made", "stream", "took")
    assert tensors[0] is inputs and tensors[1] is targets and tensors[2] == [override]
    assert rest == ["entered", "evaluated", "left"]
    assert results[0] is found.loss and results[1] is found.correct


def test_it_is_marked_when_evaluate_fails_too(scopes) -> None:
    def evaluate(x, y):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fused_validation_batch(*batch(), K, "stream", evaluate=evaluate)
    assert scopes[-1] == "left"


def test_the_overrides_of_esper_lite_are_marked(scopes) -> None:
    model, overrides = Model(), overrides_of(torch.ones(K))
    process_fused_val_batch(
        env(model), *batch(), torch.nn.CrossEntropyLoss(reduction="none"), overrides, K,
        task_spec=SPEC, loss_and_correct_fn=loss_and_correct,
    )  # fmt: skip
    assert scopes[0][1][2] is overrides


# Errors


def never(*_):
    raise AssertionError("evaluated in spite of a bad argument")


def test_bad_batches() -> None:
    x, y = batch()
    for inputs, targets, error, message in (
        (x.tolist()[0], y, TypeError, "inputs must be tensors"),
        (x, "y", TypeError, "targets must be tensors"),
        (x, None, TypeError, "targets must be tensors"),
        ([], y, ValueError, "inputs contain no tensor"),
        (x, torch.tensor(1), ValueError, "targets contain a tensor without dimensions"),
        (
            x,
            y[1:],
            ValueError,
            r"differ in their first dimension, the batch: 6 \(inputs\), 5 \(targets\)",
        ),
        ({"a": x, "b": x[2:]}, y, ValueError, "differ in their first dimension"),
        (x[:0], y[:0], ValueError, "the batch is empty"),
        (x.to_sparse(), y, TypeError, "inputs contain a tensor of torch.sparse_coo"),
        (torch.nested.nested_tensor([x, x]), y, TypeError, "inputs contain a nested tensor"),
    ):
        with pytest.raises(error, match=message):
            fused_validation_batch(inputs, targets, K, evaluate=never)


STREAM = torch.Stream(stream_id=3, device_index=1, device_type=1)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"num_configs": 0}, ValueError, "num_configs is 0"),
        ({"num_configs": -1}, ValueError, "num_configs is -1"),
        *[({"num_configs": bad}, TypeError, "num_configs must be an integer")
          for bad in (1.5, "4", None)],
        ({"evaluate": None}, TypeError, "evaluate must be callable"),
        *[({"reads": bad}, TypeError, "reads: expected a tensor, or a container")
          for bad in (3, "scales", object())],
        *[({"stream": bad}, TypeError, "stream must be a torch.cuda.Stream") for bad in (7, "side")],
        ({"take": "no"}, TypeError, "take must be"),
        *[({"device": bad}, error, 'device must be a torch.device, a name such as "cuda:0"')
          for bad, error in (("nonsense", ValueError), (-1, ValueError), ([], TypeError))],
        ({"stream": STREAM, "device": "cuda:0"}, ValueError, "stream belongs to cuda:1"),
        ({"stream": STREAM, "device": "cpu"}, ValueError,
         "device is cpu and stream belongs to cuda:1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_runs(given, error, message) -> None:
    arguments = {"num_configs": K, "evaluate": never, **given}
    with pytest.raises(error, match=message):
        fused_validation_batch(*batch(), **arguments)


@pytest.mark.parametrize(
    "returned, error, message",
    [
        (torch.ones(K), TypeError, r"must return \(loss, correct, total\)"),
        ((1.0, torch.ones(K * B), 1), TypeError, "return loss as a tensor, not float"),
        ((torch.ones(()), 3, 1), TypeError, "return correct as a tensor, not int"),
        ((torch.ones(()), torch.ones(()), 1), ValueError, r"correct of shape \[\], which"),
        ((torch.ones(()), torch.ones(K * B + 1), 1), ValueError, "into 4 configurations"),
        ((torch.ones(K + 1), torch.ones(K), 1), ValueError, "loss of shape"),
        ((torch.ones(0), torch.ones(K), 1), ValueError, "loss of shape"),
        ((torch.ones(()), torch.ones(K), 1.5), TypeError, "return total as an integer, not 1.5"),
        ((torch.ones(()), torch.ones(K), None), TypeError, "return total as an integer, not None"),
        ((torch.ones(()), torch.ones(K), -K), ValueError, "returned a total of -"),
        ((torch.ones(()), torch.ones(K * B), K * B + K), ValueError, "together"),
        ((torch.ones(()), torch.ones(K * B), B + 1), ValueError, "a total of 7 for 24 elements"),
        ((torch.ones(K).long(), torch.ones(K), 1), TypeError,
         "floating-point loss, not torch.int64"),
    ],
)  # fmt: skip
def test_bad_results(returned, error, message) -> None:
    with pytest.raises(error, match=message):
        fused_validation_batch(*batch(), K, evaluate=lambda x, y: returned)


def test_streams_of_the_cpu_do_nothing() -> None:
    found = fused_validation_batch(
        *batch(), K, torch.cpu.Stream(), evaluate=lambda x, y: (x.mean(), y == y, len(y)), take=True
    )
    assert found.correct.tolist() == [B] * K


# The documented example


def test_the_documented_example_runs() -> None:
    page = ROOT / "docs" / "validation.md"
    (example,) = [one for one in blocks(page) if "# runs anywhere" in one]
    names: dict = {}
    exec(compile(example, str(page), "exec"), names)
    assert names["total"] == 32 and names["loss"].shape == (4,)
