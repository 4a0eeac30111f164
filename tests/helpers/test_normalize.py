"""The normalisers: mathematics against float64 NumPy, state, devices, compilation.

Everything runs by the compiled kernels' CPU side and by plain PyTorch operations,
which must agree. There is no second device here but `meta`: it takes part where
only the devices' names matter. tests/gpu/test_normalize_gpu.py is about CUDA.
"""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import math
import pickle
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from documents import blocks
from processes import ROOT, run_two_ranks

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings, strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from esper_alloc import RewardNormalizer, RunningMeanStd, ValueNormalizer  # noqa: E402
from esper_alloc.helpers import kernels  # noqa: E402
from esper_alloc.helpers.normalize import moments  # noqa: E402
from esper_alloc.helpers.normalize.statistics import Statistics  # noqa: E402

COMPILED = kernels.load()
ROUTES = ["compiled", "plain"] if COMPILED is not None else ["plain"]


@pytest.fixture(params=ROUTES, autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By the kernels, or by PyTorch's own operations."""
    if request.param == "plain":
        monkeypatch.setattr(Statistics, "_compiled", None)
    torch._dynamo.reset()
    yield request.param


def all_of(*batches: Any) -> Any:
    return np.concatenate([np.asarray(batch, dtype=np.float64) for batch in batches])


def with_prior(samples: Any, epsilon: float = 1e-4) -> tuple[Any, Any]:
    """Mean and variance, float64, of samples and of a 0 with variance 1 that weighs
    epsilon: what RunningMeanStd begins with."""
    n = samples.shape[0]
    mean = samples.sum(0) / (n + epsilon)
    spread = ((samples - mean) ** 2).sum(0) + epsilon * (1.0 + mean**2)
    return mean, spread / (n + epsilon)


def seen(rows: int, features: int) -> Any:
    """A normaliser that has seen so many rows."""
    rms = RunningMeanStd(features)
    rms.update(torch.randn(rows, features) * 3 + 1)
    return rms


def state_of(normalizer: Any) -> list[Any]:
    return [tensor.clone() for tensor in normalizer._buffers.values()]


def unchanged(normalizer: Any, before: list[Any]) -> bool:
    after = normalizer._buffers.values()
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@contextlib.contextmanager
def refused(normalizer: Any, error: Any, words: str) -> Iterator[None]:
    """What is done inside is an error, and changes no statistics."""
    before = state_of(normalizer)
    with pytest.raises(error, match=words):
        yield
    assert unchanged(normalizer, before)


def close(ours: Any, reference: Any, relative: float = 1e-10, absolute: float = 1e-12) -> None:
    np.testing.assert_allclose(
        ours.double().numpy(), reference, rtol=relative, atol=absolute, equal_nan=True
    )


# --- mathematics against float64 ---------------------------------------------------

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@st.composite
def batches(draw: Any) -> list[Any]:
    """Batches of one shape, of any scale and offset, some of few samples or none."""
    shape = draw(st.sampled_from([(), (1,), (3,), (4,), (2, 3)]))
    seed = draw(st.integers(0, 2**32 - 1))
    scale = 10.0 ** draw(st.integers(-6, 6))
    offset = draw(st.sampled_from([0.0, 1.0, -1e3, 1e6])) * scale
    random = np.random.default_rng(seed)
    return [random.normal(offset, scale, (n, *shape)) for n in draw(SIZES)]


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([torch.float32, torch.float64]))
def test_moments_are_those_of_all_samples_at_once(found: list[Any], dtype: Any) -> None:
    rms = RunningMeanStd(found[0].shape[1:])
    given_ = [torch.tensor(batch, dtype=dtype) for batch in found]
    for batch in given_:
        rms.update(batch)
    everything = all_of(*(batch.double().numpy() for batch in given_))
    assert int(rms.count) == everything.shape[0]
    if everything.shape[0]:
        mean, variance = with_prior(everything)
        # An offset of 1e6 deviations costs the variance six of sixteen digits, and
        # squared differences of means six more, in any float64 arithmetic.
        spread = np.abs(everything).max() ** 2
        close(rms._moments[0], mean, absolute=1e-13 * np.abs(everything).max())
        close(rms._moments[1], variance, 1e-9, 1e-15 * spread)


@settings(max_examples=60, deadline=None)
@given(batches(), st.floats(0.0, 0.999))
def test_momentum_is_esper_lites_formula(found: list[Any], momentum: float) -> None:
    shape = found[0].shape[1:]
    rms = RunningMeanStd(shape, momentum=momentum)
    mean, variance = np.zeros(shape), np.ones(shape)
    for batch in found:
        rms.update(torch.tensor(batch, dtype=torch.float64))
        if batch.shape[0]:
            delta = mean - batch.mean(0)
            mean = momentum * mean + (1 - momentum) * batch.mean(0)
            variance = (
                momentum * variance
                + (1 - momentum) * batch.var(0)
                + momentum * (1 - momentum) * delta**2
            )
    largest = max((np.abs(batch).max() for batch in found if batch.size), default=0.0)
    close(rms._moments[0], mean, absolute=1e-13 * largest)
    close(rms._moments[1], variance, 1e-9, 1e-14 * largest**2)
    assert int(rms.count) == sum(batch.shape[0] for batch in found)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(), (3,), (2, 2)]),
    st.integers(1, 30),
    st.sampled_from(["none", "rows", "each"]),
    st.sampled_from(["none", "rows", "each"]),
    st.booleans(),
)
def test_masks_and_weights(
    seed: int, shape: tuple[int, ...], rows: int, masked: str, weighted: str, holes: bool
) -> None:
    random = np.random.default_rng(seed)
    x = random.normal(5.0, 3.0, (rows, *shape))
    if holes:
        x[random.random(x.shape) < 0.2] = random.choice([np.nan, np.inf, -np.inf])
    sizes = {"rows": (rows,), "each": x.shape}
    mask = random.random(sizes[masked]) < 0.7 if masked != "none" else None
    # Some that do not count: negative, zero, not finite.
    weights = random.uniform(-0.5, 3.0, sizes[weighted]) if weighted != "none" else None
    if weights is not None:
        weights[random.random(weights.shape) < 0.1] = np.nan

    counts = np.isfinite(x)
    widen = (slice(None),) + (None,) * len(shape)
    if mask is not None:
        counts &= mask if masked == "each" else mask[widen]
    weight = np.ones(x.shape)
    if weights is not None:
        weight = np.broadcast_to(weights if weighted == "each" else weights[widen], x.shape)
    weight = np.where(counts & (weight > 0), weight, 0.0)
    total = weight.sum(0) + 1e-4
    values = np.where(weight > 0, x, 0.0)
    mean = (weight * values).sum(0) / total
    spread = (weight * np.where(weight > 0, values - mean, 0.0) ** 2).sum(0)
    variance = (spread + 1e-4 * (1.0 + mean**2)) / total

    rms = RunningMeanStd(shape)
    given_mask = None if mask is None else torch.tensor(mask)
    given_weights = None if weights is None else torch.tensor(weights)
    y = rms.update_and_normalize(torch.tensor(x), math.inf, mask=given_mask, weights=given_weights)
    close(rms._moments[0], mean)
    close(rms._moments[1], variance)
    close(rms._moments[2], total)
    assert int(rms.count) == int((weight > 0).reshape(rows, -1).any(1).sum())
    with np.errstate(invalid="ignore"):
        close(y, (x - mean) / np.sqrt(variance + 1e-4), 1e-9)


def test_constant_and_outlying_columns() -> None:
    """What shifted sums and sums of squares are worst at."""
    rms = RunningMeanStd(4)
    x = torch.zeros(1000, 4, dtype=torch.float64)
    x[:, 0] = 1e8  # no spread at all
    x[0, 1] = 1e8  # the first one is the outlier
    x[:, 2] = 1e8 + torch.arange(1000, dtype=torch.float64) % 2  # a spread of 0.25, far from 0
    x[-1, 3] = 1e8
    rms.update(x)
    mean, variance = with_prior(x.numpy())
    close(rms._moments[0], mean, 1e-14)
    close(rms._moments[1], variance, 1e-7)
    other = RunningMeanStd(4, epsilon=0.0)
    other.update(x)
    assert float(other._moments[1, 0]) == 0.0
    assert float(other._moments[1, 2]) == pytest.approx(0.25, rel=1e-7)


def test_normalize_is_the_documented_formula() -> None:
    rms = RunningMeanStd(3)
    x = torch.randn(50, 3, dtype=torch.float64) * 7 + 1e3
    rms.update(x)
    mean, variance = with_prior(x.numpy())
    exact = (x.numpy() - mean) / np.sqrt(variance + 1e-4)
    close(rms.normalize(x, clip=1.5), exact.clip(-1.5, 1.5))
    close(rms.denormalize(rms.normalize(x)), x.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_type_of_value(dtype: Any) -> None:
    x = (torch.randn(300, 5) * 2 + 3).to(dtype)
    rms = RunningMeanStd(5)
    y = rms.update_and_normalize(x)
    assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    mean, variance = with_prior(x.double().numpy())
    close(rms._moments[:2], np.stack([mean, variance]))
    close(y, ((x.double().numpy() - mean) / np.sqrt(variance + 1e-4)), 1e-5, 1e-5)


def test_layouts_and_leading_dimensions() -> None:
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    wanted, _ = with_prior(x.reshape(-1, 3).numpy())
    for view in (x, x.transpose(0, 1), x.flip(0), x.expand(1, 6, 5, 3)):
        rms = RunningMeanStd((3,))
        y = rms.update_and_normalize(view)
        close(rms._moments[0], wanted)
        assert y.shape == view.shape and y.is_contiguous()
        torch.testing.assert_close(y, rms.normalize(view.contiguous()))
    single = RunningMeanStd((3,))
    single.update(x[0, 0])
    assert int(single.count) == 1
    close(single._moments[0], x[0, 0].numpy() / 1.0001)


def test_threads_do_not_change_a_bit(route: str) -> None:
    if route == "plain":
        pytest.skip("PyTorch's own sums depend on the threads")
    x = torch.randn(30000, 7)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            rms = RunningMeanStd(7)
            rms.update(x)
            results.append(rms._moments.clone())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_counts_are_exact_beyond_float32() -> None:
    rms = RunningMeanStd(1)
    x = torch.zeros(1, 1)
    rms.load_state_dict({"mean": x[0], "var": x[0] + 1, "count": torch.tensor(2**24)})
    for _ in range(3):
        rms.update(x)
    assert int(rms.count) == 2**24 + 3
    rms.load_state_dict({"mean": x[0], "var": x[0] + 1, "count": torch.tensor(10**9 - 1)})
    rms.update(x)
    assert int(rms.count) == 10**9
    assert float(rms._moments[2]) == 10**9 + 1e-4


# --- bad input ----------------------------------------------------------------------

BAD = [
    (lambda: torch.zeros(4, 2), ValueError, "its last dimensions must be the normaliser's shape"),
    (lambda: torch.zeros(2, 3, 4), ValueError, r"shape \(3,\) was given .* shape \(2, 3, 4\)"),
    (lambda: torch.zeros(4, 3, dtype=torch.bool), TypeError, "not torch.bool"),
    (lambda: torch.zeros(4, 3, dtype=torch.complex64), TypeError, "not torch.complex64"),
    (lambda: torch.zeros(4, 3).to_sparse(), TypeError, "torch.sparse_coo"),
    (lambda: torch.nested.nested_tensor([torch.zeros(4, 3)]), TypeError, "nested"),
    (lambda: [[1.0, 2.0, 3.0]], TypeError, "takes a tensor, not list"),
    (lambda: 1.0, TypeError, "takes a tensor, not float"),
    (lambda: torch.zeros(64), ValueError, r"was given .* shape \(64,\)"),
]


@pytest.mark.parametrize("make, error, words", BAD, ids=[entry[2] for entry in BAD])
@pytest.mark.parametrize("method", ["update", "normalize", "update_and_normalize", "denormalize"])
def test_bad_values_are_refused(method: str, make: Any, error: Any, words: str) -> None:
    rms = seen(5, 3)
    with refused(rms, error, words):
        getattr(rms, method)(make())


SELECTIONS = [
    ({"mask": torch.ones(5)}, TypeError, "mask must be of booleans"),
    ({"mask": [True]}, TypeError, "mask must be a tensor, not list"),
    ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, r"give one for each row, \(5,\)"),
    ({"weights": torch.ones(5, dtype=torch.int64)}, TypeError, "weights must be floating-point"),
    ({"weights": torch.ones(3, 5)}, ValueError, r"or one for each value, \(5, 3\)"),
    ({"weights": torch.ones(5, device="meta")}, ValueError, "weights is on meta"),
]


@pytest.mark.parametrize("given_, error, words", SELECTIONS, ids=[entry[2] for entry in SELECTIONS])
@pytest.mark.parametrize("method", ["update", "update_and_normalize"])
def test_bad_masks_and_weights_are_refused(
    method: str, given_: dict[str, Any], error: Any, words: str
) -> None:
    rms = RunningMeanStd(3)
    with refused(rms, error, words):
        getattr(rms, method)(torch.randn(5, 3), **given_)


@pytest.mark.parametrize("method", ["update", "update_and_normalize"])
def test_what_is_refused_moves_nothing(method: str) -> None:
    rms = RunningMeanStd(3)
    x = torch.zeros(5, 3, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given_ in (
            {"mask": torch.ones(4, dtype=torch.bool, device="meta")},
            {"weights": torch.ones(5)},
        ):
            with pytest.raises(ValueError, match="mask has shape|weights is on cpu"):
                getattr(rms, method)(x, **given_)
        with pytest.raises(ValueError, match="its last dimensions"):
            getattr(rms, method)(torch.zeros(5, 4, device="meta"))
    assert rms.device.type == "cpu"


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        *[({name: value}, ValueError, name) for name, value in
          [("epsilon", -1.0), ("epsilon", math.nan), ("epsilon", "small"), ("momentum", 1.1),
           ("momentum", -0.1), ("momentum", "0.9")]],
        ({"strict_device": "no"}, TypeError, "strict_device must be True or False"),
        ({"shape": 1.5}, TypeError, "shape must be an integer or a tuple of integers, not 1.5"),
        ({"shape": (2, 1.5)}, TypeError, "shape must be an integer or a tuple"),
        ({"shape": "3"}, TypeError, "shape must be an integer or a tuple"),
        ({"shape": (2, -1)}, ValueError, r"the sizes in shape must be 0 or more, not \(2, -1\)"),
        ({"shape": -1}, ValueError, "the sizes in shape must be 0 or more"),
    ],
)  # fmt: skip
def test_bad_constructor_arguments(arguments: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        RunningMeanStd(**{"shape": 3, **arguments})
    if "shape" not in arguments:
        rms = RunningMeanStd(3)
        with pytest.raises(error, match=words):
            setattr(rms, *next(iter(arguments.items())))
        assert (rms.epsilon, rms.momentum, rms.strict_device) == (1e-4, None, False)


@pytest.mark.parametrize(
    "clip", [-1.0, math.nan, None, "5", [5.0], 1j, torch.tensor([1.0, 2.0])], ids=str
)
def test_bad_clips(clip: Any) -> None:
    rms = RunningMeanStd(3)
    for method in (rms.normalize, rms.update_and_normalize):
        with refused(rms, ValueError, "clip must be 0 or more"):
            method(torch.zeros(2, 3), clip)
    reward = RewardNormalizer()
    for call in (lambda: RewardNormalizer(clip=clip), lambda: setattr(reward, "clip", clip)):
        with pytest.raises(ValueError, match="clip must be 0 or more"):
            call()


def test_empty_batches_change_nothing() -> None:
    rms = seen(5, 3)
    before = state_of(rms)
    rms.update(torch.zeros(0, 3))
    assert rms.update_and_normalize(torch.zeros(2, 0, 3)).shape == (2, 0, 3)
    assert rms.normalize(torch.zeros(0, 3)).shape == (0, 3)
    rms.update(torch.randn(4, 3), mask=torch.zeros(4, dtype=torch.bool))
    rms.update(torch.full((4, 3), math.nan))
    assert unchanged(rms, before)
    nothing = RunningMeanStd((0,))
    nothing.update(torch.zeros(5, 0))
    assert nothing.normalize(torch.zeros(5, 0)).shape == (5, 0)


# --- train, eval, freeze ------------------------------------------------------------------

METHODS = ("update", "update_and_normalize", "forward")


@pytest.mark.parametrize(
    "make, shape",
    [(lambda: RunningMeanStd(3), (5, 3)), (ValueNormalizer, 40), (RewardNormalizer, 5)],
)
def test_eval_and_freeze_hold_everywhere(make: Any, shape: Any) -> None:
    normalizer = make()
    x = torch.randn(shape) + 2
    normalizer.update(x)
    before = state_of(normalizer)
    for stop, go in [(normalizer.eval, normalizer.train), (normalizer.freeze, normalizer.unfreeze)]:
        stop()
        for method in METHODS:
            getattr(normalizer, method)(x)
        normalizer(x)
        if isinstance(normalizer, RewardNormalizer):
            normalizer.update_and_normalize(3.0)
            normalizer.update(3.0)
        assert unchanged(normalizer, before)
        go()
    for method in METHODS:
        getattr(normalizer, method)(x)
        assert not unchanged(normalizer, before)
        before = state_of(normalizer)


# --- state ---------------------------------------------------------------------------------


def test_addresses_stay() -> None:
    rms = RunningMeanStd(3)
    before = [tensor.data_ptr() for tensor in rms._buffers.values()]
    saved = rms.state_dict()
    for _ in range(3):
        rms.update_and_normalize(torch.randn(4, 3))
    rms.merge(RunningMeanStd(3))
    rms.load_state_dict(saved)
    rms.load_state_dict(saved, assign=True)
    rms.mean = torch.ones(3)
    rms.count = 5
    rms.half()
    rms.to(torch.float64)
    rms.to("cpu")
    rms.reset()
    assert [tensor.data_ptr() for tensor in rms._buffers.values()] == before
    dtypes = [one.dtype for one in (rms.mean, rms._moments, rms.count)]
    assert dtypes == [torch.float32, torch.float64, torch.int64]


def test_attributes_are_esper_lites() -> None:
    rms = RunningMeanStd(shape=(3,), epsilon=1e-3, device="cpu", momentum=0.9)
    assert (rms.epsilon, rms.momentum, rms.device) == (1e-3, 0.9, torch.device("cpu"))
    torch.testing.assert_close(rms.mean, torch.zeros(3))  # float32, as esper-lite's tests want
    torch.testing.assert_close(rms.var, torch.ones(3))
    assert rms.count.dtype == torch.int64 and int(rms.count) == 0
    assert rms.to("cpu") is rms
    assert RunningMeanStd(4).mean.shape == (4,)
    assert "momentum=0.9" in repr(rms)
    assert RunningMeanStd(np.int64(4)).mean.shape == (4,)
    for kind, first in (
        (RunningMeanStd, ["shape", "epsilon", "device", "momentum"]),
        (RewardNormalizer, ["clip", "epsilon"]),
        (ValueNormalizer, ["epsilon", "device", "momentum"]),
    ):
        assert list(inspect.signature(kind).parameters)[: len(first)] == first


def test_updates_in_inference_mode_do_not_get_in_the_way() -> None:
    """With esper-lite's, a reset after such an update fails."""
    x = torch.randn(5, 3)
    with torch.inference_mode():
        made_inside = RunningMeanStd(3)
        made_inside.update(x)
        made_inside.to("cpu")
    rms = RunningMeanStd(3)
    with torch.inference_mode():
        rms.update(x)
        y = rms.normalize(x)
        rms.reset()
        rms.update(x)
    assert y.is_inference()
    for one in (rms, made_inside):
        one.update(x.requires_grad_(True))
        one.mean = one.mean
        one.reset()
        assert int(one.count) == 0 and float(one.var.sum()) == 3.0


def test_reset_goes_back_to_the_start() -> None:
    for one in (RunningMeanStd(3), ValueNormalizer(), RewardNormalizer()):
        before = state_of(one)
        one.update(torch.randn(40, 3))
        assert not unchanged(one, before)
        one.reset()
        assert unchanged(one, before)


def test_assigned_and_written_statistics_are_believed() -> None:
    x = torch.randn(10, 2, dtype=torch.float64)
    for write in (
        lambda rms: (
            setattr(rms, "mean", torch.full((2,), 5.0)),
            setattr(rms, "var", torch.full((2,), 4.0)),
        ),
        lambda rms: [x.fill_(v) for x, v in zip(rms.buffers(), (5.0, 4.0))],  # as DDP writes
    ):
        rms = RunningMeanStd(2)
        rms.update(torch.randn(100, 2))
        write(rms)
        close(rms.normalize(x), (x.numpy() - 5.0) / math.sqrt(4.0 + 1e-4), 1e-12)
        rms.update(x)
        weight = 100.0001
        wanted = (5.0 * weight + x.numpy().sum(0)) / (weight + 10)
        close(rms._moments[0], wanted)
    rms = RunningMeanStd(2)
    rms.count = 1000
    rms.update(torch.ones(1000, 2))
    assert int(rms.count) == 2000 and float(rms.mean[0]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="mean has shape"):
        rms.mean = torch.zeros(3)


@pytest.mark.parametrize(
    "name, value, error, words",
    [
        ("count", -5, ValueError, "count must be at least 0"),
        ("count", math.nan, ValueError, "count must be at least 0"),
        ("count", torch.tensor(math.inf), ValueError, "count must be at least 0"),
        ("count", 1e30, ValueError, r"below 2\*\*63"),
        ("count", 2**63, ValueError, r"below 2\*\*63"),
        ("count", torch.zeros(2), ValueError, "count must be one number"),
        ("count", None, TypeError, "count must be numbers, not None"),
        ("mean", "zero", TypeError, "mean must be numbers, not 'zero'"),
        ("var", torch.ones(3) * 1j, ValueError, "var must be real numbers"),
        ("var", [1.0, -1.0, 1.0], ValueError, "values that a var cannot have"),
    ],
)
def test_what_is_no_statistic_is_not_assigned(
    name: str, value: Any, error: Any, words: str
) -> None:
    rms = seen(5, 3)
    with refused(rms, error, words):
        setattr(rms, name, value)


def test_rewards_statistics_can_be_assigned() -> None:
    """They are plain numbers in esper-lite."""
    saved = {"mean": 2.0, "m2": 36.0, "count": 10}
    for names in itertools.permutations(saved):  # esper-lite's trainer assigns the count last
        reward = RewardNormalizer()
        for name in names:
            setattr(reward, name, saved[name])
        assert {name: getattr(reward, name) for name in saved} == saved
        assert reward.normalize_only(4.0) == pytest.approx(2.0)
    kept = reward.mean
    reward.update(2.0)
    assert float(reward.m2) == pytest.approx(36.0) and int(reward.count) == 11
    reward.update(100.0)
    assert float(kept) == 2.0  # what was read is a number of its own
    reward.mean, reward.m2 = 2.0, 36.0
    reward.count = 37
    assert float(reward.m2) == pytest.approx(36.0)
    assert reward.normalize_only(4.0) == pytest.approx(4.0)
    with refused(reward, ValueError, "values that a m2 cannot have"):
        reward.m2 = -1.0
    fresh = RewardNormalizer()
    for forget in (
        fresh.reset,
        lambda: fresh.load_state_dict({"mean": 0.0, "m2": 0.0, "count": 0}),
    ):
        fresh.m2 = 36.0
        forget()
        assert float(fresh.m2) == 0.0


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_keeps_everything(nested: bool) -> None:
    rms = RunningMeanStd(3, epsilon=1e-3, momentum=0.9)
    rms.update(torch.randn(500, 3) * 1e3 + 7)
    other = RunningMeanStd(3, epsilon=1e-3, momentum=0.9)
    source, target = (nn.Sequential(x) if nested else x for x in (rms, other))
    target.load_state_dict(saved_and_loaded({"model": source.state_dict()})["model"])
    assert unchanged(other, [*state_of(rms)[:4], rms._moments, rms.count])
    x = torch.randn(9, 3)
    assert torch.equal(rms.update_and_normalize(x), other.update_and_normalize(x))
    assert torch.equal(rms._moments, other._moments)


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_of_weighted_rewards_keeps_everything(nested: bool) -> None:
    reward, other = RewardNormalizer(), RewardNormalizer()
    reward.update(torch.tensor([1.0, 2.0, 3.0, 7.0]), weights=torch.tensor([0.5, 0.5, 0.5, 3.0]))
    source, target = (nn.Sequential(x) if nested else x for x in (reward, other))
    target.load_state_dict(saved_and_loaded({"model": source.state_dict()})["model"])
    assert torch.equal(other._moments, reward._moments) and float(other.m2) == float(reward.m2)
    state = reward.state_dict()
    state["count"] = torch.tensor(8)  # m2 stays
    other.load_state_dict(state)
    assert float(other.m2) == pytest.approx(float(reward.m2)) and int(other.count) == 8


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_is_loaded_onto_meta(nested: bool) -> None:
    rms, other = RunningMeanStd(4), RunningMeanStd(4, device="meta")
    rms.update(torch.randn(100, 4) * 3 + 5)
    source, target = (nn.Sequential(x) if nested else x for x in (rms, other))
    with pytest.warns(UserWarning, match="on meta has no data, and did not take over") as seen:
        target.load_state_dict(source.state_dict())
    assert seen[0].filename == __file__ and other.device.type == "meta"
    bad = source.state_dict()
    bad["0.var" if nested else "var"] = torch.full((4,), -1.0)
    with pytest.raises(RuntimeError, match="values that a var cannot have"):
        target.load_state_dict(bad, assign=True)
    assert other.device.type == "meta"
    target.load_state_dict(source.state_dict(), assign=True)
    assert other.device.type == "cpu"
    assert unchanged(other, [*state_of(rms)[:4], rms._moments, rms.count])


def test_a_traced_model_computes() -> None:
    rms = seen(50, 3)
    model = nn.Sequential(rms, nn.Linear(3, 2)).eval()
    x = torch.randn(4, 3)
    traced = torch.jit.trace(model, torch.zeros(4, 3))
    assert torch.equal(traced(x), model(x))
    training = torch.jit.trace(copy.deepcopy(rms).train(), torch.zeros(4, 3), check_trace=False)
    expected = copy.deepcopy(rms).train()
    expected(torch.zeros(4, 3))
    found, wanted = training(x), expected(x)
    assert torch.allclose(found, wanted)
    assert int(dict(training.named_buffers())["count"]) == int(expected.count) == 58


def test_images_formats_are_not_for_statistics() -> None:
    model = nn.Sequential(RunningMeanStd((3, 8, 8)), nn.Conv2d(3, 4, 3))
    x = torch.randn(2, 3, 8, 8)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for _ in range(2):
        assert torch.allclose(model(x), other(x), atol=1e-5)
    assert torch.equal(model[0]._moments, other[0]._moments)


def test_torchs_default_device_is_not_for_numbers() -> None:
    rms, other = RunningMeanStd(2), RunningMeanStd(2)
    rms.update(torch.randn(9, 2))
    with torch.device("meta"):
        other.load_state_dict(rms.state_dict())
        other.count = 5
        other.mean = [1.0, 2.0]
        reward = RewardNormalizer(device="cpu")
        reward.load_state_dict({"mean": 2.0, "m2": 36.0, "count": 10})
    assert other.mean.tolist() == [1, 2] and int(other.count) == 5
    assert reward.normalize_only(4.0) == pytest.approx(2.0)


def test_rewards_that_are_refused_or_not_taken_in_leave_numbers() -> None:
    reward = RewardNormalizer()
    reward.update(1.0)
    for method in (reward.update, reward.update_and_normalize):
        with pytest.raises(TypeError):
            method(torch.tensor(True))
        reward.eval()
        method(torch.tensor(1.0))
        reward.train().freeze()
        method(torch.tensor(1.0))
        reward.unfreeze()
        assert isinstance(reward.mean, float) and isinstance(reward.state_dict()["m2"], float)


def test_copies_made_in_inference_mode_can_be_updated() -> None:
    rms = seen(9, 2)
    with torch.inference_mode():
        copies = [copy.deepcopy(rms), pickle.loads(pickle.dumps(rms))]
    for one in copies:
        one.update(torch.randn(9, 2))
        assert int(one.count) == 18


def test_a_checkpoint_keeps_what_float32_cannot_hold() -> None:
    rms = seen(64, 4)
    rms.update(torch.full((1, 4), 1e25))  # the variance is above the largest float32
    state = rms.state_dict()
    assert torch.isinf(state["var"]).all()
    other = RunningMeanStd(4)
    other.load_state_dict(saved_and_loaded({"state": state})["state"])
    assert torch.equal(rms._moments, other._moments)
    state._metadata[""].pop("extra_state")
    with pytest.raises(RuntimeError, match="values that a var cannot have"):
        RunningMeanStd(4).load_state_dict(state)


def test_a_clip_beyond_float32_clips_nothing() -> None:
    rms = RunningMeanStd(1)
    x = torch.tensor([[1e30]], requires_grad=True)
    assert torch.equal(rms.normalize(x, 1e300), rms.normalize(x, math.inf))


def test_statistics_come_back_from_meta_at_their_start() -> None:
    rms = RunningMeanStd(2)
    with pytest.warns(UserWarning, match="moves them"):
        rms(torch.zeros(3, 2, device="meta"))
    with pytest.warns(UserWarning, match="moves them"):
        rms.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert rms.count == 2 and rms.mean.tolist() == pytest.approx([2.0, 3.0], abs=1e-3)


def test_the_keys_are_esper_lites() -> None:
    assert list(RunningMeanStd(5).state_dict()) == ["mean", "var", "count"]
    assert list(ValueNormalizer().state_dict()) == ["mean", "var", "count"]
    assert list(RewardNormalizer().state_dict()) == ["mean", "m2", "count"]
    inside = nn.Sequential(RunningMeanStd(2)).state_dict()
    assert list(inside) == ["0.mean", "0.var", "0.count", "0._extra_state"]
    assert all(isinstance(value, torch.Tensor) for value in inside.values())


def test_a_state_is_a_snapshot() -> None:
    rms = RunningMeanStd(3)
    state = rms.state_dict()
    rms.update(torch.ones(5, 3))
    assert float(state["mean"].sum()) == 0.0 and int(state["count"]) == 0
    assert rms.state_dict(keep_vars=True)["mean"] is rms._buffers["mean"]


def test_esper_lites_files_load() -> None:
    n = 2**20
    state = {
        "mean": torch.tensor([1.0, 2.0]),
        "var": torch.tensor([3.0, 4.0]),
        "count": torch.tensor(n + 1e-4, dtype=torch.float32),
    }
    rms = RunningMeanStd(2)
    rms.load_state_dict(saved_and_loaded(state))
    assert (rms.mean.tolist(), rms.var.tolist(), int(rms.count)) == ([1.0, 2.0], [3.0, 4.0], n)
    assert float(rms._moments[2, 0]) == float(state["count"])
    value = ValueNormalizer()
    value.load_state_dict(
        {"mean": torch.tensor(1.0), "var": torch.tensor(4.0), "count": torch.tensor(40.0)}
    )
    assert value.get_scale() == pytest.approx(math.sqrt(4.0001))


def test_statistics_of_others_load() -> None:
    sb3 = SimpleNamespace(mean=np.array([1.0, 2.0]), var=np.array([3.0, 4.0]), count=500.0001)
    rms = RunningMeanStd(2)
    rms.load_statistics(sb3)
    assert (rms.mean.tolist(), int(rms.count)) == ([1.0, 2.0], 500)
    assert float(rms._moments[2, 0]) == 500.0001
    rms.reset()
    rms.load_statistics({"mean": [1.0, 2.0], "var": [3.0, 4.0], "count": 7})
    assert int(rms.count) == 7

    returns = SimpleNamespace(mean=np.array(1.0), var=np.array(4.0), count=500.0001)
    for one in (ValueNormalizer(), RewardNormalizer(), RunningMeanStd(())):
        one.load_statistics(returns)
        assert int(one.count) == 500 and float(one._moments[1]) == 4.0
        one.load_statistics({"running_mean": 2.0, "running_var": 9.0, "count": 100, "other": 1})
        assert int(one.count) == 100 and float(one._moments[1]) == 9.0
    reward = RewardNormalizer()
    reward.load_statistics(returns)
    assert float(reward.normalize_only(1.0)) == pytest.approx(0.5, rel=1e-2)

    for odd in ({"mean": [1.0, 2.0], "count": 7}, {"mean": [1.0], "var": [1.0], "count": 7}, {}):
        with refused(rms, RuntimeError, "Missing key|has shape"):
            rms.load_statistics(odd)

    games = {
        "net.norm.running_mean": torch.tensor([5.0, 6.0], dtype=torch.float64),
        "net.norm.running_var": torch.tensor([7.0, 8.0], dtype=torch.float64),
        "net.norm.count": torch.tensor(9, dtype=torch.int64),
    }
    model = nn.Module()
    model.net = nn.Module()
    model.net.norm = RunningMeanStd(2)
    model.load_state_dict(games)
    assert model.net.norm.mean.tolist() == [5.0, 6.0] and int(model.net.norm.count) == 9
    assert float(model.net.norm._moments[2, 0]) == 9.0


BAD_STATES = [
    ({"mean": torch.zeros(2)}, r"mean has shape \(2,\), and the normaliser \(3,\)"),
    ({"var": torch.ones(3, 1)}, "var has shape"),
    ({"var": -torch.ones(3)}, "var has values that a var cannot have"),
    ({"mean": torch.full((3,), math.nan)}, "mean has values that a mean cannot have"),
    ({"count": torch.zeros(2)}, "count must be one number"),
    ({"count": torch.tensor(-1)}, "count must be at least 0"),
    ({"count": torch.tensor(math.nan)}, "count must be at least 0"),
    ({"count": 1e30}, "count must be at least 0"),
    ({"mean": None, "var": None, "count": None}, "Missing key"),
    ({"var": "one"}, "var must be numbers"),
    ({"mean": torch.zeros(3, device="meta")}, "mean must be real numbers"),
    ({"_extra_state": torch.zeros(3)}, "extra state is not one that this version"),
    ({"mean": torch.zeros(4), "_extra_state": torch.zeros(16)}, r"mean has shape \(4,\)"),
    ({"_extra_state": {"epsilon": 1.0}}, "extra state is not one that this version"),
    ({"_extra_state": torch.tensor([1, 0, 0.9, 0] + [1.0] * 8 + [-1.0])}, "cannot be moments"),
    ({"count": None}, 'Missing key.*"count"'),
]


@pytest.mark.parametrize("change, words", BAD_STATES, ids=[entry[1] for entry in BAD_STATES])
def test_bad_states_are_refused(change: dict[str, Any], words: str) -> None:
    rms = seen(5, 3)
    state = {"mean": torch.zeros(3), "var": torch.ones(3), "count": torch.tensor(5), **change}
    state = {key: value for key, value in state.items() if value is not None}
    with refused(rms, RuntimeError, words):
        rms.load_state_dict(state)


# --- merge -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 6))
def test_merge_is_as_if_one_had_seen_all(found: list[Any], cut: int) -> None:
    shape = found[0].shape[1:]
    one, other, all_in_one = (RunningMeanStd(shape) for _ in range(3))
    for i, batch in enumerate(found):
        x = torch.tensor(batch)
        (one if i < cut else other).update(x)
        all_in_one.update(x)
    kept = state_of(other)
    one.merge(other)
    largest = max((np.abs(batch).max() for batch in found if batch.size), default=0.0)
    close(one._moments[0], all_in_one._moments[0].numpy(), absolute=1e-12 * largest)
    # The prior of 1e-4 at 0 is taken out of the second and is far from its samples.
    close(one._moments[1], all_in_one._moments[1].numpy(), 1e-8, 1e-13 * largest**2)
    assert int(one.count) == int(all_in_one.count) and unchanged(other, kept)


def test_merge_refuses_what_does_not_fit() -> None:
    rms = RunningMeanStd(3)
    for other, error, words in [
        (RunningMeanStd(4), ValueError, "cannot merge shape"),
        (RunningMeanStd(3, momentum=0.9), ValueError, "with a momentum cannot be merged"),
        (ValueNormalizer(), TypeError, "merge takes a RunningMeanStd"),
    ]:
        with pytest.raises(error, match=words):
            rms.merge(other)


# --- ranks -----------------------------------------------------------------------------------

RANK = """
import sys
import torch, torch.distributed as dist
from esper_alloc import RunningMeanStd
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
data = torch.randn(3, 2, 700, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
data = data * 3 + torch.arange(2)[None, :, None, None] * 50  # ranks see different things
ours, one = RunningMeanStd(4), RunningMeanStd(4)
for step in range(3):
    few = 100 + 300 * rank  # and not equally many
    ours.update(data[step, rank, :few])
    one.update(torch.cat([data[step, 0, :100], data[step, 1, :400]]))
    ours.all_reduce()
    torch.testing.assert_close(ours._moments, one._moments, rtol=1e-12, atol=1e-12)
    assert int(ours.count) == int(one.count) == 500 * (step + 1)
ours.all_reduce()  # nothing new: nothing changes
torch.testing.assert_close(ours._moments, one._moments, rtol=1e-12, atol=1e-12)
both = [torch.zeros_like(ours._moments) for _ in range(2)]
dist.all_gather(both, ours._moments)
assert torch.equal(both[0], both[1]), "ranks drift"
ours.mean = torch.full((4,), 5.0)  # what everybody wrote is not undone, nor counted as samples
ours._buffers["var"].fill_(2.0)
ours.all_reduce()
assert ours.mean.tolist() == [5.0] * 4 and ours.var.tolist() == [2.0] * 4
assert int(ours.count) == 1500
ours.count = 100
ours.update(data[0, rank, :50])
ours.all_reduce()
assert int(ours.count) == 200
wanted = (5.0 * 100.0001 + data[0, :, :50].sum((0, 1))) / 200.0001
torch.testing.assert_close(ours._moments[0], wanted)
average = RunningMeanStd(4, momentum=0.5)
average.update(data[0, rank])
average.all_reduce()
expected = [RunningMeanStd(4, momentum=0.5) for _ in range(2)]
for i, each in enumerate(expected):
    each.update(data[0, i])
mean = (expected[0]._moments[0] + expected[1]._moments[0]) / 2
torch.testing.assert_close(average._moments[0], mean)
before = average._moments.clone()
average.all_reduce()
torch.testing.assert_close(average._moments, before)
assert int(average.count) == 1400
dist.destroy_process_group()
print("rank", rank, "done")
"""


@pytest.mark.slow
def test_two_ranks_are_as_one(route: str) -> None:
    if route == "plain" and COMPILED is not None:
        pytest.skip("what ranks exchange is the same by both routes")
    run_two_ranks(RANK, OMP_NUM_THREADS="1")


def test_ranks_need_a_process_group() -> None:
    rms = RunningMeanStd(2)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        rms.all_reduce()


# --- devices ---------------------------------------------------------------------------------

MOVES = [
    (kind, shape, method)
    for kind, shape, methods in (
        (RunningMeanStd, (3,), "update normalize denormalize update_and_normalize __call__"),
        (ValueNormalizer, (), "update normalize denormalize __call__"),
        (RewardNormalizer, (), "update update_and_normalize normalize_only __call__"),
    )
    for method in methods.split()
]


@pytest.mark.parametrize("kind, shape, method", MOVES)
def test_values_elsewhere_are_a_warning_on_the_users_line(
    kind: Any, shape: tuple[int, ...], method: str
) -> None:
    normalizer = kind(*shape)
    x = torch.zeros(4, *shape, device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        getattr(normalizer, method)(x)
        getattr(normalizer, method)(x)  # has its statistics there now
    (warning,) = [one for one in caught if "statistics" in str(one.message)]
    assert warning.category is UserWarning
    assert (warning.filename, warning.lineno) == (__file__, line)
    text = str(warning.message)
    assert "on cpu and was given values on meta" in text and "device='meta'" in text
    assert normalizer.device.type == "meta"


@pytest.mark.parametrize("kind, shape, method", MOVES)
def test_strict_device_raises(kind: Any, shape: tuple[int, ...], method: str) -> None:
    normalizer = kind(*shape, strict_device=True)
    with refused(normalizer, RuntimeError, "with strict_device=True it does not move them"):
        getattr(normalizer, method)(torch.zeros(4, *shape, device="meta"))


def test_statistics_are_not_lost_to_values_that_hold_nothing() -> None:
    rms = seen(8, 3)
    for mode in (rms.eval(), rms.train()):
        with refused(rms, RuntimeError, "values on meta, which has no data"):
            mode(torch.zeros(4, 3, device="meta"))
        assert rms.device.type == "cpu"
    assigned = RunningMeanStd(3)
    assigned.var = torch.full((3,), 2.0)
    with pytest.raises(RuntimeError, match="would be lost"):
        assigned.normalize(torch.zeros(4, 3, device="meta"))


def test_a_device_without_an_index_is_the_device() -> None:
    """Devices are compared, not their names."""
    rms = RunningMeanStd(3, device="cpu:0", strict_device=True)
    rms.update(torch.randn(4, 3))
    rms.to(torch.device("cpu", 0)).update(torch.randn(4, 3, device="cpu"))
    assert int(rms.count) == 8


# --- gradients ---------------------------------------------------------------------------------


def test_gradients_pass_and_statistics_have_none() -> None:
    rms = seen(50, 3)
    x = (torch.randn(4, 3, dtype=torch.float64) * 3).requires_grad_()
    rms.eval()
    assert torch.autograd.gradcheck(rms.normalize, (x,))
    assert torch.autograd.gradcheck(rms.denormalize, (x,))
    rms.train()
    y = rms(x)
    assert y.requires_grad and not any(one.requires_grad for one in rms.buffers())
    y.sum().backward()
    torch.testing.assert_close(x.grad, 1 / (rms._moments[1] + 1e-4).sqrt().expand(4, 3))
    with torch.no_grad():
        torch.testing.assert_close(rms.normalize(x), rms.normalize(x.detach()))


def test_forward_derivatives_pass() -> None:
    from torch.autograd import forward_ad

    rms = seen(50, 3)
    x, tangent = (torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    scale = (rms._moments[1] + 1e-4).sqrt()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        found = forward_ad.unpack_dual(rms.normalize(dual)).tangent
        torch.testing.assert_close(found, tangent / scale)
        found = forward_ad.unpack_dual(rms.denormalize(dual)).tangent
        torch.testing.assert_close(found, tangent * scale)
        stepped = forward_ad.unpack_dual(rms(dual)).tangent
        assert int(rms.count) == 54
        torch.testing.assert_close(stepped, tangent / (rms._moments[1] + 1e-4).sqrt())
    _, found = torch.func.jvp(rms.eval().normalize, (x,), (tangent,))
    torch.testing.assert_close(found, stepped)


def test_operators_refuse_a_gradient() -> None:
    if Statistics._compiled is None:
        pytest.skip("there are no operators")
    rms = RunningMeanStd(3)
    x = torch.randn(4, 3, requires_grad=True)
    y = torch.ops.esper_alloc.normalizer_apply(
        rms._moments, rms.mean, rms.var, x, 0.0, 1e-4, 10.0, 0, False
    )
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


# --- operators ----------------------------------------------------------------------------------


def operator_calls() -> list[tuple[str, Any]]:
    x, mask, weights = torch.randn(20, 4), torch.rand(20) > 0.3, torch.rand(20, 4)
    rms = RunningMeanStd(4)
    state = [rms._moments, rms.mean, rms.var]
    return [
        ("normalizer_update_", (*state, rms.count, x, None, None, -1.0, 0.0)),
        ("normalizer_update_", (*state, rms.count, x, mask, weights, 0.9, 0.0)),
        ("normalizer_apply", (*state, x, 0.0, 1e-4, 10.0, 0, False)),
        ("normalizer_apply", (*state, x.half(), 32.0, 1e-4, math.inf, 1, True)),
        ("normalizer_step_", (*state, rms.count, x, None, None, -1.0, 0.0, 1e-4, 5.0, 0)),
        ("normalizer_step_", (*state, rms.count, x.double(), mask, None, 0.9, 0.0, 1e-4, 5.0, 0)),
    ]


@pytest.mark.parametrize("number", range(6))
def test_operators_keep_torchs_rules_and_are_the_plain_operations(number: int, route: str) -> None:
    if route == "plain":
        pytest.skip("there are no operators")
    name, arguments = operator_calls()[number]
    torch.library.opcheck(getattr(torch.ops.esper_alloc, name).default, arguments)
    arguments = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    theirs = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    ours = getattr(torch.ops.esper_alloc, name)(*arguments)
    torch.testing.assert_close(ours, getattr(moments, name)(*theirs))
    torch.testing.assert_close(arguments[0], theirs[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(arguments[1:4], theirs[1:4])


def test_operators_check_what_they_get(route: str) -> None:
    if route == "plain":
        pytest.skip("there are no operators")
    rms = RunningMeanStd(4)
    apply = torch.ops.esper_alloc.normalizer_apply
    for moments_, x, words in [
        (rms._moments[:2], torch.zeros(2, 4), "3 x features, float64"),
        (rms._moments.float(), torch.zeros(2, 4), "3 x features, float64"),
        (rms._moments, torch.zeros(2, 3), "must end with the normaliser's shape"),
        (rms._moments, torch.zeros(2, 4, dtype=torch.int32), "not Int"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            apply(moments_, rms.mean, rms.var, x, 0.0, 1e-4, 10.0, 0, False)


def test_modes_and_subclasses_go_the_long_way() -> None:
    """Straight calls must not bypass what watches operations."""
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    rms = RunningMeanStd(3)
    with Watch():
        rms.update_and_normalize(torch.randn(4, 3))
    assert seen, "nothing was seen"
    if Statistics._compiled is not None:
        assert any("normalizer_step_" in one for one in seen)
    assert int(rms.count) == 4
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.randn(4, 3))
        assert rms.normalize(fake).shape == (4, 3)

    class Mine(torch.Tensor):
        pass

    wrapped = torch.randn(4, 3).as_subclass(Mine)
    torch.testing.assert_close(
        rms.normalize(wrapped).as_subclass(torch.Tensor),
        rms.normalize(wrapped.as_subclass(torch.Tensor)),
    )
    with torch.device("cpu"):  # a mode of its own kind
        rms.update(torch.randn(4, 3))
    assert int(rms.count) == 8


# --- compilation ----------------------------------------------------------------------------------


class Policy(nn.Module):
    """A policy network whose observations are normalised."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rms = RunningMeanStd(4, **options)
        self.body = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.body(self.rms(x * 2) + 1)


class Elsewhere(nn.Module):
    """Has no parameters: its values may be on any device."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rms = RunningMeanStd(4, **options)

    def forward(self, x: Any) -> Any:
        x = x * 2
        y = self.rms.update_and_normalize(x)  # the user's line
        return y + 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiles_whole_and_once(backend: str) -> None:
    model, twin = Policy(), Policy()
    twin.load_state_dict(model.state_dict())
    before = [tensor.data_ptr() for tensor in model.rms._buffers.values()]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(4):
        x = torch.randn(32, 4) * 3 + 1
        torch.testing.assert_close(compiled(x), twin(x))
    assert counter.frame_count == 1
    assert int(model.rms.count) == 128
    torch.testing.assert_close(model.rms._moments, twin.rms._moments)
    assert [tensor.data_ptr() for tensor in model.rms._buffers.values()] == before
    for rows in (16, 8, 24):  # once more for batches of any size
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), twin(x))
    assert counter.frame_count == 2
    model.eval()
    twin.eval()
    x = torch.randn(32, 4)
    torch.testing.assert_close(compiled(x), twin(x))
    assert int(model.rms.count) == 128 + 48


def test_compiles_the_siblings() -> None:
    value, reward = ValueNormalizer(), RewardNormalizer()

    def both(x: Any) -> Any:
        value.update(x)
        return value.normalize(x), value.denormalize(x), reward.update_and_normalize(x)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    other_value, other_reward = ValueNormalizer(), RewardNormalizer()
    for _ in range(3):
        x = torch.randn(40)
        a, b, c = compiled(x)
        other_value.update(x)
        torch.testing.assert_close(a, other_value.normalize(x))
        torch.testing.assert_close(b, other_value.denormalize(x))
        torch.testing.assert_close(c, other_reward.update_and_normalize(x))


def test_a_mismatch_breaks_a_graph_once() -> None:
    model = Elsewhere()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    x = torch.zeros(8, 4, device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(x)
    (warning,) = [one for one in caught if "statistics" in str(one.message)]
    source, first = inspect.getsourcelines(Elsewhere.forward)
    wanted = first + next(i for i, text in enumerate(source) if "the user's line" in text)
    assert (warning.filename, warning.lineno) == (__file__, wanted)
    assert counter.frame_count == 2  # before the break, and after it
    assert model.rms.device.type == "meta"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*statistics")
        compiled(x)
        assert counter.frame_count == 3  # whole
        compiled(x)
        assert counter.frame_count == 3


def test_a_mismatch_is_our_message_where_graphs_must_be_whole() -> None:
    model = Elsewhere()
    words = "statistics on cpu and was given values on meta.*Create it with device='meta'"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(8, 4, device="meta"))
    assert model.rms.device.type == "cpu" and int(model.rms.count) == 0


@pytest.mark.parametrize("fullgraph", [False, True])
def test_strict_device_raises_in_a_compiled_region(fullgraph: bool) -> None:
    compiled = torch.compile(Elsewhere(strict_device=True), backend="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match="with strict_device=True it does not move them"):
        compiled(torch.zeros(8, 4, device="meta"))


# --- rewards and values ---------------------------------------------------------------------------


def test_rewards_are_esper_lites() -> None:
    rewards = np.random.default_rng(0).normal(3.0, 20.0, 200)
    ours = RewardNormalizer(clip=5.0)
    for i, reward in enumerate(rewards):
        wanted = reward
        if i:
            wanted = reward / max(1e-8, rewards[: i + 1].std(ddof=1))
        result = ours.update_and_normalize(float(reward))
        assert type(result) is float
        assert result == pytest.approx(min(max(wanted, -5.0), 5.0), rel=1e-9)
        assert ours.normalize_only(float(reward)) == pytest.approx(result)
    assert float(ours.mean) == pytest.approx(rewards.mean())
    assert float(ours.m2) == pytest.approx(((rewards - rewards.mean()) ** 2).sum())
    assert int(ours.count) == 200
    batch = RewardNormalizer(clip=5.0)
    scaled = batch.update_and_normalize(torch.tensor(rewards))
    close(scaled, (rewards / rewards.std(ddof=1)).clip(-5, 5))
    close(batch._moments, ours._moments.numpy())
    close(
        batch.denormalize(scaled[:1]),
        (rewards[:1] / rewards.std(ddof=1)).clip(-5, 5) * rewards.std(ddof=1),
    )


def test_odd_rewards() -> None:
    ours = RewardNormalizer()
    assert ours.update_and_normalize(100.0) == 10.0  # one only: clipped, not scaled
    assert math.isnan(ours.update_and_normalize(math.nan))
    assert ours.update_and_normalize(math.inf) == 10.0
    assert int(ours.count) == 1
    ours.update(100)
    assert ours.normalize_only(np.float32(1e-9)) == pytest.approx(0.1)  # by epsilon, not by 0
    with pytest.raises(TypeError, match="a reward must be a number or a tensor, not str"):
        ours.update_and_normalize("1.0")  # type: ignore[arg-type]


@pytest.mark.parametrize("momentum", [0.99, 0.5, None])
def test_values_are_esper_lites(momentum: float | None) -> None:
    ours = ValueNormalizer(momentum=momentum)
    mean, variance, count = 0.0, 1.0, 0
    random = np.random.default_rng(0)
    for n in (10, 21, 5, 40, 3, 60):
        batch = random.normal(7.0, 3.0, n)
        ours.update(torch.tensor(batch))
        share = 1 - momentum if momentum is not None and count >= 32 else n / (count + n)
        delta = batch.mean() - mean
        mean += share * delta
        variance = (1 - share) * variance + share * batch.var() + share * (1 - share) * delta**2
        count += n
        assert int(ours.count) == count
        close(ours._moments[:2], np.array([mean, variance]))
        assert ours.has_valid_stats == (count >= 32)
        scale = math.sqrt(variance + 1e-4) if count >= 32 else 1.0
        assert ours.get_scale() == pytest.approx(scale)
        x = torch.randn(2, 3, dtype=torch.float64)
        close(ours.normalize(x), x.numpy() / scale)
        close(ours.denormalize(x), x.numpy() * scale)
    assert float(ours.std) == pytest.approx(math.sqrt(variance + 1e-4))


# --- documents -------------------------------------------------------------------------------------


def test_documented_examples_run(route: str) -> None:
    examples = blocks(ROOT / "docs" / "normalize.md")
    assert len(examples) == 5
    names: dict[str, Any] = {}
    for block in examples:
        exec(compile(block, "docs/normalize.md", "exec"), names)


# --- without kernels ------------------------------------------------------------------------------


def test_missing_kernels_are_said_once_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_loaded", lambda: (None, "there is no nvcc"))
    for name in ("usable", "_say_once"):
        anew = functools.cache(getattr(kernels, name).__wrapped__)
        monkeypatch.setattr(kernels, name, anew)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not kernels.usable(0) and not kernels.usable(1) and not kernels.usable(0)
    (warning,) = caught
    assert warning.filename == __file__
    for words in ("there is no nvcc", "pip install --no-build-isolation", "nvcc on PATH"):
        assert words in str(warning.message)


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"HAS_KERNELS": False, "WHAT_IS_MISSING": ["the kernels: no nvcc. Do this"]},
         "no nvcc. Do this"),
        ({"HAS_KERNELS": False, "WHAT_IS_MISSING": []}, "the PyTorch part was not built either"),
        ({"HAS_KERNELS": True, "BUILT_FOR": {"1.0": "9.0"}, "WHAT_IS_MISSING": []},
         "the build that has them was built for torch 1.0, and this is torch 2."),
    ],
)  # fmt: skip
def test_why_there_are_no_kernels(
    facts: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "esper_alloc._build", SimpleNamespace(**facts))
    module, why = kernels._loaded.__wrapped__()
    assert module is None and words in why
