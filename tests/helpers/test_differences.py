"""What esper-lite's users would notice when they change their imports, and must not.

What they may notice stands in docs/differences.md.
"""

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from esper_alloc import (  # noqa: E402
    RewardNormalizer,
    RunningMeanStd,
    SharedGPUGatherBatchIterator,
    ValueNormalizer,
    clear_gpu_dataset_cache,
)
from esper_alloc.helpers import kernels  # noqa: E402
from esper_alloc.helpers.gather import cifar, cifar_batches  # noqa: E402
from esper_alloc.helpers.normalize.statistics import Statistics  # noqa: E402
from esper_alloc.helpers.validation import process_fused_val_batch  # noqa: E402

ROUTES = ["compiled", "plain"] if kernels.load() is not None else ["plain"]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the kernels, or by PyTorch's own operations."""
    if request.param == "plain":
        monkeypatch.setattr(Statistics, "_compiled", None)
    return str(request.param)


# --- 1, 2: the orders of samples


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Any:
    """64 images of CIFAR-10, whose label is their number."""

    def read(*_: Any) -> Any:
        return torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8), torch.arange(64)

    clear_gpu_dataset_cache()
    monkeypatch.setattr(cifar, "read", read)
    yield
    clear_gpu_dataset_cache()


def iterator(**others: Any) -> Any:
    arguments = {
        "batch_size_per_env": 4, "n_envs": 2, "env_devices": ["cpu", "cpu"], "shuffle": True,
        "seed": 5,
    }  # fmt: skip
    return SharedGPUGatherBatchIterator(**{**arguments, **others})


def test_devices_share_one_permutation_whose_first_is_theirs(images: Any) -> None:
    batches = iterator()
    assert batches.order == "global"
    theirs = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
    for epoch in range(2):
        seen = torch.cat([targets for batch in batches for _, targets in batch]).tolist()
        assert batches._global_perm is not None and seen == batches._global_perm.tolist()
        assert (seen == theirs) == (epoch == 0)
    page = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
    assert "esper-lite's generator goes on" in " ".join(page.read_text(encoding="utf-8").split())


# --- 3, 4, 6: the normalisers


@pytest.mark.parametrize("make", [lambda: RunningMeanStd(2), ValueNormalizer, RewardNormalizer])
def test_what_was_read_stays(route: str, make: Any) -> None:
    normalizer = make()
    normalizer.update(torch.randn(40, 2))
    names = [name for name in ("mean", "var", "m2", "count") if hasattr(normalizer, name)]
    read = {name: getattr(normalizer, name) for name in names}
    kept = {name: float(value.sum()) for name, value in read.items()}
    addresses = [buffer.data_ptr() for buffer in normalizer.buffers()]
    normalizer.update(torch.randn(40, 2) + 5)
    for name in names:
        assert float(read[name].sum()) == kept[name] != float(getattr(normalizer, name).sum())
    assert addresses == [buffer.data_ptr() for buffer in normalizer.buffers()]


def test_rewards_that_are_numbers_give_numbers(route: str) -> None:
    numbers, tensors = RewardNormalizer(), RewardNormalizer()
    assert numbers.state_dict() == {"mean": 0.0, "m2": 0.0, "count": 0}
    for reward in (1.0, 2, 6.5):
        assert type(numbers.update_and_normalize(reward)) is float
        assert isinstance(tensors.update_and_normalize(torch.tensor([reward])), torch.Tensor)
    state = json.loads(json.dumps(numbers.state_dict()))
    assert [type(state[name]) for name in ("mean", "m2", "count")] == [float, float, int]
    assert round(numbers.mean, 3) == 3.167 and numbers.count == state["count"] == 3
    assert all(isinstance(value, torch.Tensor) for value in tensors.state_dict().values())
    assert isinstance(tensors.mean, torch.Tensor)
    for saved in (state, tensors.state_dict()):
        for loading in (RewardNormalizer(), tensors):
            loading.load_state_dict(saved)
            assert type(loading.count) is type(saved["count"])
            for name in ("mean", "m2", "count"):
                assert float(getattr(loading, name)) == pytest.approx(state[name])
            assert loading.normalize_only(4.0) == pytest.approx(numbers.normalize_only(4.0))
    # In a model's state everything is a tensor.
    model = torch.nn.ModuleDict({"reward": numbers})
    assert all(isinstance(value, torch.Tensor) for value in model.state_dict().values())
    model.load_state_dict(model.state_dict())
    assert type(numbers.count) is int
    assert all(value.is_meta for value in RewardNormalizer(device="meta").state_dict().values())
    numbers.update(torch.tensor([1.0]))
    assert isinstance(numbers.m2, torch.Tensor)
    numbers.reset()
    assert numbers.count == 0 and type(numbers.count) is int


def test_loading_keeps_the_constructors_epsilon_and_momentum() -> None:
    saved = RunningMeanStd(2, epsilon=1e-2, momentum=0.5)
    saved.update(torch.randn(9, 2))
    loading = RunningMeanStd(2, epsilon=1e-3, momentum=0.9)
    loading.load_state_dict(saved.state_dict())
    assert (loading.epsilon, loading.momentum) == (1e-3, 0.9)
    assert torch.equal(loading._moments, saved._moments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_keep_their_dtype(route: str, dtype: torch.dtype) -> None:
    value = ValueNormalizer()
    for _ in range(2):  # during the first 32 samples, and after them
        x = torch.randn(40).to(dtype)
        methods = [value.normalize, value.denormalize, value.update_and_normalize, value]
        assert {method(x).dtype for method in methods} == {dtype}
    scaled = (x.double() / value.std.double()).to(dtype)
    torch.testing.assert_close(value.normalize(x), scaled)


def test_integers_are_values(route: str) -> None:
    x = torch.tensor([[2**40 + 1, 2], [2**40 + 3, 4], [2**40 + 5, 6]])
    rms = RunningMeanStd(2)
    exact = RunningMeanStd(2)
    y = rms.update_and_normalize(x)
    exact.update(x.double())
    assert torch.equal(rms._moments, exact._moments)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact.normalize(x.double()), atol=1e-6, rtol=1e-6)
    for one in (ValueNormalizer(), RewardNormalizer()):
        one.update(torch.arange(40))
        assert float(one.mean) == 19.5


def test_shapes_broadcast(route: str) -> None:
    x = torch.randn(7)
    one, each = RunningMeanStd((1,)), RunningMeanStd((1,))
    y = one.update_and_normalize(x)
    each.update(x[:, None])
    torch.testing.assert_close(one._moments, each._moments)
    assert one.mean.shape == (1,) and int(one.count) == 7
    torch.testing.assert_close(y, each.normalize(x[:, None])[:, 0])
    weights = torch.rand(7)
    one.update(x, weights=weights, mask=x > 0)
    each.update(x[:, None], weights=weights, mask=x > 0)
    torch.testing.assert_close(one._moments, each._moments)
    images = RunningMeanStd((3, 1, 1))
    images.update(torch.randn(50, 3, 1, 1) + 4)
    x = torch.randn(2, 3, 8, 8)
    wanted = (x - images.mean) / (images.var + 1e-4).sqrt()
    torch.testing.assert_close(images.normalize(x, clip=math.inf), wanted)
    torch.testing.assert_close(images.denormalize(wanted), x, atol=1e-5, rtol=1e-5)
    # The statistics keep their shape, where esper-lite's take that of the values.
    before = images._moments.clone()
    for method in (images.update, images.update_and_normalize):
        for odd in (x, torch.zeros(())):
            with pytest.raises(ValueError, match="its last dimensions must be"):
                method(odd)
    assert torch.equal(images._moments, before)


def test_bounds_that_esper_lite_accepts(route: str) -> None:
    rms = RunningMeanStd(2, momentum=1.0)
    y = rms.update_and_normalize(torch.randn(5, 2), clip=0)
    assert y.abs().sum() == 0
    assert rms.mean.tolist() == [0.0, 0.0] and rms.var.tolist() == [1.0, 1.0]
    assert int(rms.count) == 5
    assert RewardNormalizer(clip=0.0).update_and_normalize(3.0) == 0.0


@pytest.mark.parametrize("make", [lambda: RunningMeanStd(()), ValueNormalizer, RewardNormalizer])
def test_keys_that_nobody_knows_are_ignored_with_a_warning(make: Any) -> None:
    normalizer = make()
    state = {**normalizer.state_dict(), "count": 7, "warmup": 3}
    with pytest.warns(UserWarning, match="which are ignored: warmup") as warned:
        normalizer.load_state_dict(state)
    assert warned[0].filename == __file__
    assert int(normalizer.count) == 7
    with pytest.raises(RuntimeError, match="Unexpected key"):  # PyTorch's rule for a model
        torch.nn.ModuleDict({"norm": normalizer}).load_state_dict(
            {f"norm.{name}": torch.as_tensor(value) for name, value in state.items()}
        )


# --- 5: fused validation


class Model(torch.nn.Module):
    def fused_forward(self, inputs: Any, overrides: Any) -> Any:
        return inputs * overrides["scale"]


@pytest.mark.parametrize("loss_is_scalar", [False, True])
@pytest.mark.parametrize("outer", [torch.enable_grad, torch.inference_mode])
def test_results_of_validation_are_plain_tensors(outer: Any, loss_is_scalar: bool) -> None:
    def score(outputs: Any, targets: Any, *_: Any, **__: Any) -> Any:
        loss = (outputs - targets).square()
        return loss.mean() if loss_is_scalar else loss, outputs > targets, targets.numel()

    with outer():
        loss, correct, total = process_fused_val_batch(
            types.SimpleNamespace(model=Model(), env_device="cpu", stream=None),
            torch.randn(6),
            torch.randn(6),
            None,
            {"scale": torch.tensor([1.0, 2.0]).repeat_interleave(6)},
            2,
            task_spec=types.SimpleNamespace(task_type="regression"),
            loss_and_correct_fn=score,
        )
    assert total == 6
    assert not loss.is_inference() and not correct.is_inference()
    loss[0] += 1
    correct += 1
    factor = torch.ones(2, requires_grad=True)
    (loss * factor).sum().backward()
    assert torch.equal(factor.grad, loss)


# --- 7: the cache, and rewards beyond measure


def test_the_cache_is_cleared_by_augmentation(images: Any) -> None:
    for mode, kept in (("base", "precompute"), ("precompute", "base")):
        iterator()
        iterator(cifar_precompute_aug=True)
        assert clear_gpu_dataset_cache(augment_mode=mode) == 1
        assert clear_gpu_dataset_cache(augment_mode=mode) == 0
        assert clear_gpu_dataset_cache(augment_mode=kept, device="cpu") == 1
    with pytest.raises(ValueError, match='augment_mode must be "base" or "precompute"'):
        clear_gpu_dataset_cache(augment_mode="none")


def test_images_augmented_with_another_seed_are_evicted(images: Any) -> None:
    iterator()
    iterator(is_train=False)
    iterator(cifar_precompute_aug=True, data_root="/elsewhere")
    first = iterator(cifar_precompute_aug=True)
    held = len(cifar_batches._cache._entries)
    iterator(cifar_precompute_aug=True, seed=6)
    assert len(cifar_batches._cache._entries) == held == 4
    seeds = {key.augmented for key in cifar_batches._cache._entries if key.path != "/elsewhere"}
    assert seeds == {None, 6}
    assert sum(1 for _ in first) == len(first)  # who has it keeps it


@pytest.mark.parametrize("huge", [1e200, -1e200, 1e155])
def test_a_huge_reward_leaves_the_variance_a_number(route: str, huge: float) -> None:
    rewards = [1.0, 2.0, huge, 4.0]
    numbers, tensors = RewardNormalizer(), RewardNormalizer()
    results = [numbers.update_and_normalize(reward) for reward in rewards]
    tensors.update(torch.tensor(rewards, dtype=torch.float64))
    weighted = RunningMeanStd(())
    weighted.update(torch.tensor(rewards, dtype=torch.float64), weights=torch.ones(4))
    for one in (numbers, tensors, weighted):
        assert bool(torch.isfinite(one._moments).all()), one
        assert int(one.count) == 3
    assert results[2] == math.copysign(10.0, huge)
    assert numbers.mean == pytest.approx(7 / 3) and numbers.normalize_only(1.0) < 1.0
