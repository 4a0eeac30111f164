"""The gather iterator on the CPU: plans, batches, rings, resuming, CIFAR's files.

Everything here works without a GPU and without the compiled kernels.
"""

import contextlib
import dataclasses
import math
import os
import pickle
import signal
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from documents import blocks
from processes import ROOT, output_of

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings, strategies as st  # noqa: E402
from published_cifar import STUB, use_stub, write_cifar  # noqa: E402

from esper_alloc import (  # noqa: E402
    GatherBatchIterator,
    ImageTransform,
    SharedGPUGatherBatchIterator,
    clear_gpu_dataset_cache,
)
from esper_alloc.helpers.gather import (  # noqa: E402
    batch as gather_batch,
    cifar,
    cifar_batches,
    iterator as iteration,
)
from esper_alloc.helpers.gather.batch import GatherBatch  # noqa: E402
from esper_alloc.helpers.gather.plan import GAMMA, Layout, device_index, epoch_seed, mix, plan_epoch  # noqa: E402
from esper_alloc.helpers.gather.transform import crop_and_flip  # noqa: E402

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")


def permutation(length: int, seed: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


# Plans: device names, no devices

NAMES = ["cpu", "cuda", "cuda:0", "cuda:1", "cuda:7"]
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6)
seeds = st.integers(-(2**63), 2**64 - 1)


@st.composite
def layouts(draw, order=None, drop_last=None, world=3):
    world_size = draw(st.integers(1, world))
    return Layout(
        length=draw(st.integers(0, 60)),
        env_devices=tuple(draw(names)),
        batch_size_per_env=draw(st.integers(1, 7)),
        order=order or draw(st.sampled_from(["per_device", "global"])),
        drop_last=draw(st.booleans()) if drop_last is None else drop_last,
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
    )


def ranks(layout: Layout) -> list[Layout]:
    return [dataclasses.replace(layout, rank=rank) for rank in range(layout.world_size)]


def taken(layout: Layout, plan) -> list[list[list[int]]]:
    """By batch, by environment."""
    return [[x.tolist() for x in plan.indices(batch)] for batch in range(layout.batches)]


@given(layout=layouts(order="per_device", world=1), seed=seeds, epoch=st.integers(0, 5))
def test_per_device_each_device_goes_through_its_own_permutation(layout, seed, epoch) -> None:
    plan = plan_epoch(layout, seed, epoch)
    assert plan.permutation is None
    for device, envs in layout.environments.items():
        own = epoch_seed(seed + 1009 * device_index(device), epoch)
        expected = permutation(layout.length, own)
        step = layout.batch_size_per_env * len(envs)
        for number, batch in enumerate(taken(layout, plan)):
            chunk = torch.tensor(expected[number * step : (number + 1) * step])
            split = [part.tolist() for part in torch.tensor_split(chunk, len(envs))]
            assert [batch[env] for env in envs] == split


@given(layout=layouts(order="global"), seed=seeds, epoch=st.integers(0, 5))
def test_global_there_is_one_permutation_and_no_sample_comes_twice(layout, seed, epoch) -> None:
    plans = [plan_epoch(one, seed, epoch) for one in ranks(layout)]
    expected = permutation(layout.length, epoch_seed(seed, epoch))
    envs = len(layout.env_devices) * layout.world_size
    step = layout.batch_size_per_env * envs
    for number in range(layout.batches):
        chunk = torch.tensor(expected[number * step : (number + 1) * step])
        got = [x.tolist() for plan in plans for x in plan.indices(number)]
        assert got == [part.tolist() for part in torch.tensor_split(chunk, envs)]
    everything = [x for plan in plans for step in taken(plan.layout, plan) for e in step for x in e]
    assert len(everything) == len(set(everything))
    if not layout.drop_last:
        assert sorted(everything) == list(range(layout.length))
    assert plans[0].permutation.tolist() == expected


def test_other_epochs_come_from_the_documented_mix() -> None:
    def documented(x: int) -> int:
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 % 2**64
        x ^= x >> 27
        x = x * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    assert GAMMA == 0x9E3779B97F4A7C15
    # The first outputs of splitmix64 from state 0.
    assert [mix(k * GAMMA) for k in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for seed in (0, 1, -5, 2**64 - 1):
        for epoch in (1, 2, 1000):
            assert epoch_seed(seed, epoch) == documented((seed + epoch * GAMMA) % 2**64)
    orders = {tuple(permutation(50, epoch_seed(3, epoch))) for epoch in range(100)}
    assert len(orders) == 100


@given(layout=layouts(order="per_device"), seed=seeds, epoch=st.integers(0, 3))
def test_ranks_share_an_epoch_without_duplicates(layout, seed, epoch) -> None:
    """On every device of every rank: what one rank has, no other rank has."""
    plans = [plan_epoch(one, seed, epoch) for one in ranks(layout)]
    assert len({plan.layout.batches for plan in plans}) == 1
    parts = []
    for plan in plans:
        everybody = [set(plan.layout.shard)] if not plan.shares else []
        for share in plan.shares:
            order = share.order.tolist()
            assert len(order) == len(set(order)) == len(plan.layout.shard)
            everybody.append(set(order))
        assert all(part == everybody[0] for part in everybody)
        parts.append(everybody[0])
    assert sum(map(len, parts)) == layout.length
    assert set().union(*parts) == set(range(layout.length))


@given(layout=layouts())
def test_not_shuffled_samples_come_in_order(layout) -> None:
    assert plan_epoch(layout, 5, 0, False).permutation is None
    plans = [plan_epoch(one, 5, 3, False) for one in ranks(layout)]
    if layout.order == "global":
        parts = [p for n in range(layout.batches) for plan in plans for p in plan.indices(n)]
        got = [x for part in parts for x in part.tolist()]
        assert got == list(range(len(got)))
        return
    for plan in plans:
        for envs in layout.environments.values():
            got = [x for batch in taken(plan.layout, plan) for env in envs for x in batch[env]]
            start = plan.layout.shard.start
            assert got == list(range(start, start + len(got)))


@pytest.mark.parametrize("drop_last, batches", [(True, 2), (False, 3)])
def test_length_is_the_least_over_devices(drop_last, batches) -> None:
    uneven = ("cuda:0", "cuda:0", "cuda:0", "cuda:1")
    assert Layout(40, uneven, 5, "per_device", drop_last).batches == batches
    assert Layout(40, uneven, 5, "global", drop_last).batches == 2


def test_names_of_one_device_are_one_device() -> None:
    layout = Layout(10, ("cuda", "cuda:0", "cuda:00", "cuda:1"), 1)
    assert layout.environments == {"cuda:0": (0, 1, 2), "cuda:1": (3,)}
    assert [device_index(name) for name in ("cpu", "cuda", "cuda:3")] == [0, 0, 3]


@pytest.mark.parametrize(
    "name", ["mps", "cuda:", "cuda:-1", "cuda:x", "CPU", "cpu:0", "", "cuda:1 "]
)
def test_other_device_names_are_refused(name) -> None:
    with pytest.raises(ValueError, match="cpu, cuda or cuda:N"):
        Layout(10, ("cpu", name), 1)
    with pytest.raises(ValueError, match="cpu, cuda or cuda:N"):
        iterator(n_envs=1, env_devices=[name])


def test_plans_need_arguments_in_range() -> None:
    layout = Layout(10, ("cpu",), 1)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="64 bits"):
            plan_epoch(layout, seed, 0)
        with pytest.raises(ValueError, match="64 bits"):
            iterator(seed=seed)
    with pytest.raises(TypeError, match="integer"):
        plan_epoch(layout, 1.5, 0)
    with pytest.raises(ValueError, match="epoch"):
        plan_epoch(layout, 0, -1)
    for wrong in (
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"order": "random"},
        {"env_devices": ()},
    ):
        with pytest.raises(ValueError):
            Layout(**{"length": 10, "env_devices": ("cpu",), "batch_size_per_env": 1, **wrong})


# Batches


def data(length: int = 50):
    inputs = torch.arange(length * 6, dtype=torch.float32).view(length, 2, 3)
    return inputs, torch.arange(length)


def iterator_of(inputs, targets, **arguments):
    given = {"batch_size_per_env": 4, "n_envs": 2, "seed": 7, **arguments}
    if "env_devices" not in given:
        given["env_devices"] = ["cpu"] * given["n_envs"]
    return GatherBatchIterator(inputs, targets, **given)


def iterator(length: int = 50, **arguments):
    return iterator_of(*data(length), **arguments)


def targets_of(batches) -> list[list[list[int]]]:
    return [[targets.tolist() for _, targets in batch] for batch in batches]


def test_empty_data_and_batches_larger_than_the_data() -> None:
    for drop_last in (True, False):
        assert list(iterator(0, drop_last=drop_last)) == []
    assert list(iterator(5, drop_last=True, shuffle=False)) == []
    assert targets_of(iterator(5, drop_last=False, shuffle=False)) == [[[0, 1, 2], [3, 4]]]
    assert targets_of(iterator(1, drop_last=False, n_envs=3, shuffle=False)) == [[[0]]]


def test_every_batch_has_storages_of_its_own() -> None:
    batches = iterator(n_envs=3, shuffle=False)
    kept = list(batches)
    tensors = [x for batch in kept for pair in batch for x in pair]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    assert all(x._base is None and x.untyped_storage().nbytes() == x.nbytes for x in tensors)
    before = [x.clone() for x in tensors]
    tensors[0].add_(1)
    tensors[0].requires_grad_().sum().backward()
    assert all(torch.equal(x, y) for x, y in zip(tensors[1:], before[1:]))
    inputs, _ = data()
    assert torch.equal(next(iter(iterator(shuffle=False)))[0][0], inputs[:4])


def test_batches_are_ordinary_tensors_in_every_mode() -> None:
    batches = iterator(reuse=1)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            batch = next(iter(batches))
        (x, _), *_ = batch
        assert not x.is_inference() and not x.requires_grad and x.is_leaf
        batch.done()
    inputs, targets = data()
    assert not next(iter(iterator_of(inputs.requires_grad_(), targets)))[0][0].requires_grad


def test_dicts_of_tensors() -> None:
    inputs, targets = data()
    pairs = iterator_of(
        {"image": inputs, "number": targets}, {"a": targets, "b": inputs[:, 0]},
        transform={"image": ImageTransform(dtype=torch.float16)},
    )  # fmt: skip
    for batch in pairs:
        for x, y in batch:
            assert list(x) == ["image", "number"] and list(y) == ["a", "b"]
            assert torch.equal(x["number"], y["a"])
            assert torch.equal(x["image"], inputs[x["number"]].half())
            assert torch.equal(y["b"], inputs[y["a"], 0])
        with batch.for_stream(1) as (x, y):
            assert torch.equal(x["number"], y["a"])


def test_bad_arguments_are_refused() -> None:
    inputs, targets = data()
    good = {"n_envs": 1, "env_devices": ["cpu"]}

    def refused(error, match, *columns, **arguments):
        with pytest.raises(error, match=match):
            iterator_of(*(columns or (inputs, targets)), **{**good, **arguments})

    refused(ValueError, "batch_size_per_env must be >= 1", batch_size_per_env=0)
    refused(ValueError, "n_envs must be >= 1", n_envs=0, env_devices=[])
    for name in ("batch_size_per_env", "n_envs", "reuse", "rank", "world_size"):
        for value in (1.5, "1", None):
            refused(TypeError, f"{name} must be an integer, not {value!r}", **{name: value})
    for devices in (None, "cpu", {"cpu"}):
        refused(TypeError, "env_devices must be a list", env_devices=devices)
    refused(ValueError, "env_devices has 1 entries for n_envs = 2", n_envs=2)
    for device in (0, True, 1.5, None, b"cpu"):
        refused(TypeError, f"env_devices takes names.*not {device!r} ", env_devices=[device])
    refused(ValueError, "device must be cpu, cuda or cuda:N", env_devices=["gpu"])
    refused(ValueError, "different lengths: inputs 50, targets 49", inputs, targets[1:])
    refused(ValueError, r"inputs\['b'\] 50", {"a": inputs[1:], "b": inputs}, targets)
    refused(ValueError, "no dimension", torch.tensor(1), targets)
    refused(TypeError, "tensor or a dict", [1, 2], targets)
    refused(TypeError, "empty dict", {}, targets)
    refused(TypeError, "dense tensor, not torch.sparse_coo", inputs.to_sparse(), targets)
    refused(TypeError, "not a nested one", torch.nested.nested_tensor([inputs, inputs]), targets)
    refused(ValueError, "only cpu and cuda", inputs.to("meta"), targets)
    refused(ValueError, "reuse", reuse=-1)
    for name in ("shuffle", "drop_last"):
        refused(TypeError, f"{name} must be", **{name: "False"})
    for transform, match in (
        (ImageTransform(), "transform must be a dict"),
        ({"c": ImageTransform()}, "'c', which is not one of the inputs"),
    ):
        refused(ValueError, match, {"a": inputs}, targets, transform=transform)
    refused(TypeError, "ImageTransform", transform=3)
    refused(ValueError, "images of shape", transform=ImageTransform(crop=1))
    refused(ValueError, "dimension 1", transform=ImageTransform(mean=[0] * 3, std=[1] * 3))
    refused(
        TypeError, "int64", targets[:, None], targets, transform=ImageTransform(dtype=torch.half)
    )
    if not torch.cuda.is_available():
        refused(ValueError, "names cuda:0, but PyTorch finds 0", env_devices=["cuda"])


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"dtype": torch.float64}, "dtype must be"),
        ({"mean": [1.0]}, "together"),
        ({"mean": [1.0], "std": [1.0, 2.0]}, "mean has 1 channels and std has 2"),
        ({"mean": [1.0], "std": [0.0]}, "std must be"),
        ({"mean": [1.0], "std": [1e-50]}, "std must be"),
        ({"mean": [math.inf], "std": [1.0]}, "mean must be"),
        ({"mean": [1e39], "std": [1.0]}, "mean must be finite as float32"),
        ({"mean": [1.0], "std": [1e39]}, "std must be"),
        *[({"mean": wrong, "std": wrong}, "mean must have a number for each channel")
          for wrong in (0.5, "55", (None,), [torch.ones(2)])],
        ({"crop": -1}, "crop must be"),
        ({"crop": 1.5}, "crop must be an integer"),
        ({"flip": "0.5"}, "flip must be a number"),
        *[({"channels_last": wrong}, "channels_last must be True or False")
          for wrong in ("yes", 1, torch.tensor([1, 2]))],
        ({"crop": 1001}, "crop must be"),
        ({"flip": 1.5}, "flip must be"),
    ],
)  # fmt: skip
def test_bad_transforms_are_refused(arguments, match) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        ImageTransform(**arguments)


def test_small_numpy_integers_do_not_overflow() -> None:
    np = pytest.importorskip("numpy")
    x = torch.arange(200)
    made = iterator_of(
        x, x, batch_size_per_env=np.uint8(200), n_envs=np.int8(2), env_devices=["cpu"] * 2
    )
    assert len(made) == 0


def test_conjugated_data_are_copied_as_what_they_mean() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    (batch,) = iterator_of(x, x, batch_size_per_env=2, n_envs=1, shuffle=False)
    assert batch[0][0].tolist() == [1 - 2j, 3 + 4j] and not batch[0][0].is_conj()


def test_a_new_iterator_sees_what_was_written_since() -> None:
    def first(source: torch.Tensor) -> float:
        made = iterator_of(source, y, n_envs=1)
        keep.append(made)  # alive, so that its copy is
        return float(next(iter(made))[0][0].max())

    keep: list[object] = []
    y = torch.arange(4096)
    x = torch.zeros(6, 4096).t()  # not dense, so it is copied
    with torch.inference_mode():
        inferred = torch.zeros(6, 4096).t()
    for source in (x, inferred):
        assert first(source) == 0.0
        with torch.inference_mode():
            source.fill_(7.0)
        assert first(source) == 7.0
    for value in range(1, 9):
        x.data = torch.zeros(6, 4096).t()  # leaves an address, which the next one may get
        x.data = torch.full((6, 4096), float(value)).t()
        assert first(x) == value


def test_next_needs_iter_first() -> None:
    batches = iterator()
    with pytest.raises(RuntimeError, match="Iterator not initialized - call __iter__ first"):
        next(batches)
    list(batches)
    with pytest.raises(StopIteration):
        next(batches)


@given(
    devices=st.lists(st.sampled_from(["cuda:0", "cuda:1", "cuda"]), min_size=1, max_size=5),
    length=st.integers(0, 40),
    order=st.sampled_from(["per_device", "global"]),
    drop_last=st.booleans(),
    reuse=st.integers(0, 2),
    rank=st.integers(0, 1),
)
def test_uneven_devices_on_paper(devices, length, order, drop_last, reuse, rank) -> None:
    """Several devices whose work is done on the CPU: who gets what stays the same."""

    class OnCpu(iteration.Worker):
        def __init__(self, device, *arguments) -> None:
            super().__init__(torch.device("cpu"), *arguments)

    inputs, targets = data(length)
    layout = Layout(length, tuple(devices), 3, order, drop_last, rank, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iteration, "Worker", OnCpu)
        patch.setattr(iteration, "check_device_exists", lambda name: None)
        batches = iterator_of(
            inputs, targets, batch_size_per_env=3, n_envs=len(devices), env_devices=devices,
            order=order, drop_last=drop_last, reuse=reuse, rank=rank, world_size=2,
        )  # fmt: skip
    for epoch in range(2):
        plan = plan_epoch(layout, 7, epoch)
        steps = iter(batches)
        for number in range(layout.batches):
            wanted = [part for part in plan.indices(number) if len(part)]
            sizes = layout.sizes(number)
            if any(sizes[sizes.index(0) :] if 0 in sizes else []):
                before = batches.state_dict()
                with pytest.raises(RuntimeError, match="Non-contiguous"):
                    next(steps)
                assert batches.state_dict() == before
                break
            batch = next(steps)
            assert len(batch) == len(wanted)
            for (x, y), part in zip(batch, wanted):
                assert torch.equal(x, inputs[part]) and torch.equal(y, targets[part])
            batch.done()
        else:
            assert next(steps, None) is None


def test_data_is_copied_once_for_all_iterators() -> None:
    inputs = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)  # not dense
    targets = torch.arange(4)
    first, second = (iterator_of(inputs, targets) for _ in range(2))
    columns = [one._workers[0]._resident for one in (first, second)]
    assert columns[0] is columns[1]
    assert columns[0].tensors[1].data_ptr() == targets.data_ptr()  # in place already
    inputs[0] = 9
    third = iterator_of(inputs, targets)
    assert third._workers[0]._resident is not columns[0]


# Epochs and resuming


@given(
    stop=st.integers(0, 30),
    order=st.sampled_from(["per_device", "global"]),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=seeds,
)
def test_resuming_gives_the_remaining_batches(stop, order, drop_last, shuffle, seed) -> None:
    arguments = {"seed": seed, "order": order, "drop_last": drop_last, "shuffle": shuffle}
    whole = iterator(**arguments)
    expected = [targets_of(whole) for _ in range(30 // len(whole) + 2)]
    half = iterator(**arguments)
    taken_so_far = 0
    while taken_so_far < stop:
        for _ in half:
            taken_so_far += 1
            if taken_so_far == stop:
                break
    state = half.state_dict()
    assert set(state) == {"seed", "epoch", "cursor"}
    assert (state["epoch"], state["cursor"]) == divmod(stop, len(half))
    loaded = iterator(**{**arguments, "seed": 0})
    loaded.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert loaded.state_dict() == state
    assert loaded.epoch == state["epoch"] and loaded.seed == seed
    rest = targets_of(loaded)
    assert rest == expected[state["epoch"]][state["cursor"] :]
    assert targets_of(loaded) == expected[state["epoch"] + 1]


def test_a_state_may_hold_integers_of_any_kind() -> None:
    """As tensors or NumPy's, which is what some files make of numbers."""
    batches = iterator()
    batches.load_state_dict(
        {name: torch.tensor(n) for name, n in zip(("seed", "epoch", "cursor"), (7, 2, 3))}
    )
    assert batches.state_dict() == {"seed": 7, "epoch": 2, "cursor": 3}
    assert all(type(value) is int for value in batches.state_dict().values())


@pytest.mark.parametrize(
    "state, error",
    [
        ({"seed": 1, "epoch": 0}, ValueError),
        ({"seed": 1, "epoch": 0, "cursor": 0, "more": 1}, ValueError),
        ({1: 1, "epoch": 0, "cursor": 0}, ValueError),
        ({"seed": 2**64, "epoch": 0, "cursor": 0}, ValueError),
        ({"seed": 1, "epoch": -1, "cursor": 0}, ValueError),
        ({"seed": 1, "epoch": 0, "cursor": 7}, ValueError),
        ({"seed": 1, "epoch": "0", "cursor": 0}, TypeError),
        ({"seed": None, "epoch": 0, "cursor": 0}, TypeError),
        ({"seed": 1, "epoch": 1.0, "cursor": 0}, TypeError),
        (None, TypeError),
        ([1, 0, 0], TypeError),
    ],
)
def test_a_bad_state_changes_nothing(state, error) -> None:
    batches = iterator()
    assert len(batches) == 6
    first = next(iter(batches))
    before = batches.state_dict()
    with pytest.raises(error):
        batches.load_state_dict(state)
    assert batches.state_dict() == before
    assert targets_of([first]) != targets_of([next(batches)])


# Rings


def test_a_ring_reuses_what_was_marked() -> None:
    batches = iterator(reuse=2)
    addresses = []
    for _ in range(2):
        for batch in batches:
            addresses.append([x.data_ptr() for pair in batch for x in pair])
            for env in range(len(batch)):
                with batch.for_stream(env):
                    pass
    assert all(addresses[i] == addresses[i % 2] for i in range(len(addresses)))
    assert addresses[0] != addresses[1]


def test_a_slot_that_was_not_marked_is_never_overwritten() -> None:
    batches = iterator(reuse=2)
    with pytest.warns(UserWarning, match="reuse=2: a batch was not marked as done") as seen:
        kept = list(batches)
        before = targets_of(kept)
        list(batches)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert targets_of(kept) == before == targets_of(iterator())
    pointers = [y.data_ptr() for batch in kept for _, y in batch]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.filterwarnings("ignore:reuse=1")
def test_a_slot_waits_for_every_environment_and_open_scope() -> None:
    batches = iterator(reuse=1)
    steps = iter(batches)
    first = next(steps)
    expected = targets_of([first])
    with first.for_stream(0):
        pass  # environment 1 is missing
    second = next(steps)
    assert targets_of([first]) == expected
    second.done()
    expected = targets_of([second])
    with second.for_stream(1):  # marked, and in use again
        third = next(steps)
        assert targets_of([second]) == expected
    third.done(env=0)
    third.done(env=1)
    fourth = next(steps)
    assert fourth[0][1].data_ptr() == third[0][1].data_ptr()
    # A late mark of a batch whose slot went to another one does nothing to that one.
    first.done()
    expected = targets_of([fourth])
    next(steps)
    assert targets_of([fourth]) == expected


def test_scopes_mark_when_they_fail() -> None:
    batches = iterator(reuse=1, n_envs=1)
    steps = iter(batches)
    first = next(steps)
    with pytest.raises(ZeroDivisionError), first.for_stream(0):
        1 / 0  # noqa: B018
    assert next(steps)[0][1].data_ptr() == first[0][1].data_ptr()


def test_a_scope_that_is_entered_twice_restores_the_stream(monkeypatch) -> None:
    side, current = types.SimpleNamespace(wait_event=lambda _: None), ["main"]

    @contextlib.contextmanager
    def on(stream):
        before, current[:] = current[:], [stream]
        yield
        current[:] = before

    monkeypatch.setattr(torch.cuda, "stream", on)
    for name, found in (("_stream", side), ("ready_event", "event"), ("done", None)):
        monkeypatch.setattr(GatherBatch, name, mock.Mock(return_value=found))
    scope = next(iter(iterator())).for_stream(0)
    with scope, scope:
        assert current == [side]
    assert current == ["main"]


def test_slots_serve_shorter_batches_too() -> None:
    batches = iterator(length=11, reuse=1, drop_last=False)
    addresses = set()
    for _ in range(3):
        got = []
        for batch in batches:
            got += [t for _, y in batch for t in y.tolist()]
            addresses.add(batch[0][0].data_ptr())
            assert [len(y) for _, y in batch] in ([4, 4], [2, 1])
            batch.done()
        assert sorted(got) == list(range(11))
    assert len(addresses) == 1
    # The first batch that a slot holds may be the shorter one.
    batches = iterator(length=5, reuse=1, drop_last=False)
    for _ in range(2):
        for batch in batches:
            assert [len(y) for _, y in batch] == [3, 2]
            batch.done()


@pytest.mark.filterwarnings("ignore:reuse=1")
@pytest.mark.parametrize("length, size", [(13, 5), (3, 1)])
def test_a_slot_with_room_for_a_shorter_batch_serves_no_full_one(length, size) -> None:
    """Nor one for more environments."""
    batches = iterator(length=length, batch_size_per_env=size, reuse=1, drop_last=False)
    _full, short = batches  # the first one is not done in time, so the other gets new memory
    short.done()
    got = []
    for batch in batches:
        got += [t for _, y in batch for t in y.tolist()]
        batch.done()
    assert sorted(got) == list(range(length))


def test_a_mark_protects_a_slots_memory_too(monkeypatch) -> None:
    """The ring, or a batch that lost its place in it, may be dropped next."""
    stream = type("Stream", (), {"device_index": 0, "stream_id": 3})
    monkeypatch.setattr(GatherBatch, "_stream", lambda *_: stream)
    event = types.SimpleNamespace(record=lambda _: None)
    monkeypatch.setattr(gather_batch, "new_event", lambda: event)
    marked = []
    monkeypatch.setattr(gather_batch, "record_use", lambda *given: marked.append(given))
    for reuse in (0, 2):
        batch = next(iter(iterator(reuse=reuse)))
        batch.done(env=1)
        assert marked.pop() == ([batch[1]], stream)
        batch.done()
        assert marked.pop() == ([batch[0], batch[1]], stream)
    assert not marked


def test_a_batch_that_failed_can_be_asked_for_again(monkeypatch, recwarn) -> None:
    batches = iterator(reuse=1)
    steps = iter(batches)
    expected = targets_of(iterator())
    first = next(steps)
    got = targets_of([first])
    first.done()
    with monkeypatch.context() as broken:
        broken.setattr(iteration.Worker, "gather", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                next(steps)
    second = next(steps)
    assert got + targets_of([second]) == expected[:2]
    assert second[0][1].data_ptr() == first[0][1].data_ptr() and not recwarn.list


def test_an_epoch_that_failed_to_begin_begins_next(monkeypatch) -> None:
    batches, other = iterator(), iterator()
    list(batches)
    list(other)
    with monkeypatch.context() as broken:
        broken.setattr(iteration.Worker, "start", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            iter(batches)
    assert batches.state_dict() == {"seed": batches.seed, "epoch": 1, "cursor": 0}
    assert targets_of(batches) == targets_of(other)


@pytest.mark.parametrize("order", ["per_device", "global"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_torchs_defaults_change_nothing(order, shuffle) -> None:
    images = torch.randint(0, 256, (12, 3, 4, 4), dtype=torch.uint8)
    how = ImageTransform(mean=(0.1, 0.2, 0.3), std=(0.3, 0.7, 0.9), crop=1, flip=0.5)

    def batches() -> list[torch.Tensor]:
        made = iterator_of(
            images, torch.zeros(12, device="cpu"), batch_size_per_env=2, seed=3, order=order,
            shuffle=shuffle, transform=how, world_size=2,
        )  # fmt: skip
        plan_epoch(made._layout, 3, 0, shuffle).indices(0)
        return [x for batch in made for x, _ in batch]

    expected = batches()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = batches()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(found, expected))


def test_a_backward_after_the_slot_was_overwritten_fails() -> None:
    batches = iterator(reuse=1, n_envs=1)
    steps = iter(batches)
    batch = next(steps)
    weight = torch.ones(2, 3, requires_grad=True)
    late = (batch[0][0] * weight).sum()
    batch[0][0].requires_grad_()
    batch.done()
    following = next(steps)
    assert not following[0][0].requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_environments_that_are_not_there_are_errors() -> None:
    batch = next(iter(iterator()))
    for call in (batch.for_stream, batch.ready_event, lambda env: batch.done(env=env)):
        for env in (2, -1):
            with pytest.raises(IndexError, match="no data in this batch of 2"):
                call(env)
    assert batch.ready_event(0) is None and batch.ready is None


def test_what_is_no_environment_or_stream_is_an_error_on_the_cpu_too() -> None:
    batch = next(iter(iterator(reuse=1)))
    for call in (batch.for_stream, batch.ready_event, lambda env: batch.done(env=env)):
        for env in ("a", 0.5):
            with pytest.raises(TypeError, match="env must be the number of an environment"):
                call(env)
    for stream in (7, "x", torch.device("cpu")):
        for call in (lambda x: batch.for_stream(0, x), lambda x: batch.done(x, 0)):
            with pytest.raises(TypeError, match="stream must be a torch.cuda.Stream or None"):
                call(stream)
    with batch.for_stream(0, torch.cpu.current_stream()) as (inputs, _):
        assert len(inputs)
    batch.done(torch.cpu.current_stream())


# Transforms

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def images(length: int = 40, channels: int = 3, height: int = 6, width: int = 5):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        0, 256, (length, channels, height, width), generator=generator, dtype=torch.uint8
    )


def transformed(pictures, transform, **arguments):
    given = {"batch_size_per_env": 5, "seed": 9, **arguments}
    return iterator_of(pictures, torch.arange(len(pictures)), transform=transform, **given)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_normalisation_is_as_documented(dtype) -> None:
    pictures = images()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    expected = pictures.float().div(255).sub(mean).div(std).to(dtype or torch.float32)
    floats = torch.randn(40, 3, 4)
    for batch in transformed(pictures, ImageTransform(mean=MEAN, std=STD, dtype=dtype)):
        for x, y in batch:
            assert torch.equal(x, expected[y])
    how = ImageTransform(mean=MEAN, std=STD, dtype=dtype)
    for batch in transformed(floats, how):
        for x, y in batch:
            assert torch.equal(x, floats[y].sub(mean[..., 0]).div(std[..., 0]).to(x.dtype))


def drawn_by_hand(sample: int, seed: int, crop: int, flip: float) -> tuple[int, int, bool]:
    h = mix(mix(seed) + (sample + 1) * GAMMA)
    places = 2 * crop + 1
    top = ((h % 2**21) * places) >> 21
    left = (((h >> 21) % 2**21) * places) >> 21
    return top, left, (h >> 42) < round(flip * 2**22)


@given(seed=st.integers(0, 2**64 - 1), crop=st.integers(0, 1000), flip=st.floats(0, 1))
def test_crops_and_flips_are_the_documented_hash(seed, crop, flip) -> None:
    samples = [0, 1, 5, 49_999, 2**40]
    drawn = crop_and_flip(
        torch.tensor(samples), seed, crop, ImageTransform(flip=flip).flip_threshold
    )
    got = list(zip(drawn.top.tolist(), drawn.left.tolist(), drawn.flip.tolist()))
    assert got == [drawn_by_hand(sample, seed, crop, flip) for sample in samples]


@pytest.mark.parametrize("crop, flip", [(0, 0.5), (2, 0.0), (2, 0.5), (7, 1.0)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_images_are_cropped_and_flipped(crop, flip, shuffle) -> None:
    pictures = images()
    batches = transformed(pictures, ImageTransform(crop=crop, flip=flip), shuffle=shuffle)
    for epoch in range(2):
        for batch in batches:
            for x, y in batch:
                for image, sample in zip(x, y.tolist()):
                    top, left, flipped = drawn_by_hand(sample, epoch_seed(9, epoch), crop, flip)
                    padded = torch.zeros(3, 6 + 2 * crop, 5 + 2 * crop, dtype=torch.uint8)
                    padded[:, crop : crop + 6, crop : crop + 5] = pictures[sample]
                    window = padded[:, top : top + 6, left : left + 5]
                    assert torch.equal(image, window.flip(2) if flipped else window)


def test_crops_do_not_depend_on_the_split() -> None:
    pictures = images()
    how = ImageTransform(mean=MEAN, std=STD, crop=2, flip=0.5)
    seen = []
    for n_envs, size, reuse in ((1, 40, 0), (4, 5, 0), (3, 7, 2)):
        batches = transformed(
            pictures, how, n_envs=n_envs, batch_size_per_env=size, drop_last=False, reuse=reuse
        )
        found = torch.empty(40, 3, 6, 5)
        for batch in batches:
            for x, y in batch:
                found[y] = x
            batch.done()
        seen.append(found)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_draws_are_even() -> None:
    drawn = crop_and_flip(torch.arange(90_000), 1, 4, ImageTransform(flip=0.5).flip_threshold)
    for places in (drawn.top, drawn.left):
        counts = torch.bincount(places, minlength=9)
        assert counts.numel() == 9 and (counts - 10_000).abs().max() < 500
    assert abs(drawn.flip.float().mean() - 0.5) < 0.01
    for a, b in ((drawn.top, drawn.left), (drawn.top, drawn.flip), (drawn.left, drawn.flip)):
        both = torch.corrcoef(torch.stack([a.float(), b.float()]))[0, 1]
        assert abs(both) < 0.02


@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_memory_formats(from_last, asked) -> None:
    pictures = images()
    if from_last:
        pictures = pictures.contiguous(memory_format=torch.channels_last)
    wanted = (
        torch.channels_last if (from_last if asked is None else asked) else torch.contiguous_format
    )
    for shuffle in (True, False):
        for reuse in (0, 1):
            batches = transformed(
                pictures, ImageTransform(channels_last=asked), shuffle=shuffle, reuse=reuse
            )
            for batch in batches:
                for x, y in batch:
                    assert x.is_contiguous(memory_format=wanted)
                    assert torch.equal(x, pictures[y])
                batch.done()


# CIFAR, from files of our own


@pytest.fixture
def root(tmp_path, monkeypatch):
    use_stub(monkeypatch)
    clear_gpu_dataset_cache()
    yield tmp_path
    clear_gpu_dataset_cache()


def cifar_iterator(root, **arguments):
    given = {"batch_size_per_env": 4, "n_envs": 2, "shuffle": True, "seed": 5, "data_root": root}
    given = {**given, **arguments}
    given.setdefault("env_devices", ["cpu"] * given["n_envs"])
    return SharedGPUGatherBatchIterator(**given)


def normalised(pictures, name="cifar10"):
    about = cifar.CIFAR[name]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (about.mean, about.std))
    return pictures.float().div(255).sub(mean).div(std)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("order", ["per_device", "global"])
def test_cifar_batches(root, name, order) -> None:
    (pictures, labels), (test_pictures, test_labels) = write_cifar(root, name)
    batches = cifar_iterator(root, dataset=name, order=order)
    assert batches.drop_last and len(batches) == len(labels) // 8
    expected = permutation(len(labels), 5)
    for number, batch in enumerate(batches):
        for env, (x, y) in enumerate(batch):
            at = number * 8 + env * 4
            assert y.tolist() == labels[expected[at : at + 4]].tolist()
            assert torch.equal(x, normalised(pictures[expected[at : at + 4]], name))
            assert x.is_contiguous(memory_format=torch.channels_last) and x.dtype == torch.float32
    test = cifar_iterator(root, dataset=name, is_train=False, shuffle=False, order=order)
    assert not test.drop_last and test._global_perm is None
    assert torch.equal(torch.cat([y for batch in test for _, y in batch]), test_labels)
    assert torch.equal(
        torch.cat([x for batch in test for x, _ in batch]), normalised(test_pictures, name)
    )


def test_other_forms_of_cifar(root) -> None:
    (pictures, _), _ = write_cifar(root, "cifar10")
    plain = cifar_iterator(
        root, normalize=False, channels_last=False, shuffle=False, dtype=torch.float16
    )
    x = torch.cat([x for batch in plain for x, _ in batch])
    assert torch.equal(x, pictures[: len(x)].half()) and x.is_contiguous()
    half = cifar_iterator(root, dtype=torch.bfloat16, shuffle=False)
    assert torch.equal(next(iter(half))[0][0], normalised(pictures[:4]).bfloat16())


def test_precomputed_augmentation_is_drawn_once(root) -> None:
    (pictures, _), (test_pictures, _) = write_cifar(root, "cifar10")
    batches = cifar_iterator(root, cifar_precompute_aug=True, shuffle=False)
    epochs = [torch.cat([x for batch in batches for x, _ in batch]) for _ in range(2)]
    assert torch.equal(epochs[0], epochs[1])
    expected = normalised(cifar_batches.augment_once(pictures, 5))
    assert torch.equal(epochs[0], expected[: len(epochs[0])])
    assert not torch.equal(epochs[0], normalised(pictures)[: len(epochs[0])])
    # Around an image is black, normalised.
    black = normalised(torch.zeros(1, 3, 1, 1, dtype=torch.uint8))
    assert (epochs[0][:, :, :1] == black).all(dim=3).all(dim=1).any()
    other = cifar_iterator(root, cifar_precompute_aug=True, shuffle=False, seed=6)
    assert not torch.equal(epochs[0][:4], next(iter(other))[0][0])
    test = cifar_iterator(root, cifar_precompute_aug=True, is_train=False, shuffle=False)
    assert torch.equal(next(iter(test))[0][0], normalised(test_pictures[:4]))
    state = other.state_dict()
    with pytest.raises(ValueError, match="augmented the images with seed 5"):
        batches.load_state_dict(state)


def test_augmentation_is_drawn_anew_each_epoch(root) -> None:
    write_cifar(root, "cifar10")
    batches = cifar_iterator(root, augment=True, shuffle=False)
    first, second = (torch.cat([x for batch in batches for x, _ in batch]) for _ in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="test images are not augmented"):
        cifar_iterator(root, augment=True, is_train=False)


def test_missing_files_are_named(root) -> None:
    for name, file in (
        ("cifar10", "cifar-10-batches-py/data_batch_1"),
        ("cifar100", "cifar-100-python/train"),
    ):
        with pytest.raises(FileNotFoundError) as error:
            cifar_iterator(root, dataset=name)
        assert str(root / file) in str(error.value) and "download=True" in str(error.value)
    assert list(root.iterdir()) == []
    with pytest.raises(ValueError, match="dataset must be one of cifar10, cifar100"):
        cifar_iterator(root, dataset="mnist")
    write_cifar(root, "cifar10")  # loads that failed left nothing behind
    assert len(cifar_iterator(root)) == 7


def test_the_cache_is_filled_once_and_can_be_dropped(root, monkeypatch) -> None:
    write_cifar(root, "cifar10")
    read = mock.Mock(wraps=cifar.read)
    monkeypatch.setattr(cifar, "read", read)
    begin = threading.Barrier(8)

    def make(_):
        begin.wait()
        return cifar_iterator(root)

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make, range(8)))
    assert read.call_count == 1
    assert len({one._workers[0]._resident.tensors[0].data_ptr() for one in made}) == 1
    # The same files by other names.
    os.symlink(root, root / "link")
    cifar_iterator(str(root / "link"))
    monkeypatch.chdir(root)
    cifar_iterator(".")
    assert read.call_count == 1
    cifar_iterator(root, is_train=False)
    cifar_iterator(root, cifar_precompute_aug=True)
    assert read.call_count == 3
    assert clear_gpu_dataset_cache(device="cuda:0") == 0
    assert clear_gpu_dataset_cache(dataset="cifar100") == 0
    assert clear_gpu_dataset_cache(data_root=root.parent) == 0
    for dataset in ("CIFAR10", "mnist", 5, ["cifar10"]):
        with pytest.raises(ValueError, match="dataset must be one of cifar10, cifar100"):
            clear_gpu_dataset_cache(dataset=dataset)
    with pytest.raises(TypeError, match=r"device takes names .*not 0 \(int\)"):
        clear_gpu_dataset_cache(device=0)
    assert clear_gpu_dataset_cache(device="cpu", dataset="cifar10", data_root=root / "link") == 3
    assert clear_gpu_dataset_cache() == 0
    assert targets_of(made[0])  # who has it keeps it
    cifar_iterator(root)
    assert read.call_count == 4


@pytest.mark.parametrize(
    "name", ["is_train", "shuffle", "cifar_precompute_aug", "augment", "normalize", "download"]
)
def test_bools_are_checked_before_files(root, name) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, not str"):
        cifar_iterator(root, **{name: "no"})


def test_a_child_that_is_forked_during_a_load_loads_for_itself() -> None:
    cache, begun, go = cifar_batches._cache, threading.Event(), threading.Event()
    thread = threading.Thread(target=cache.get, args=("key", lambda: (begun.set(), go.wait(30))))
    thread.start()
    assert begun.wait(30)
    if (child := os.fork()) == 0:
        signal.alarm(10)  # ends a child that waits
        os._exit(cache.get("key", lambda: 7))
    go.set()
    thread.join()
    assert cache.drop(lambda key: key == "key") == 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Documents


def on_the_cpu() -> dict[str, str]:
    """An environment without GPUs, in which torchvision is the stub."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{STUB}", "CUDA_VISIBLE_DEVICES": ""}


def test_documented_examples_run(root) -> None:
    """Every Python block of docs/gather.md, one after another, on the CPU."""
    write_cifar(root / "data", "cifar10", count=600)
    examples = blocks(ROOT / "docs" / "gather.md")
    assert len(examples) >= 4
    output_of("-c", "\n".join(examples), cwd=root, env=on_the_cpu())


@pytest.mark.slow
@pytest.mark.parametrize("from_files", [False, True])
def test_the_example_runs(root, from_files) -> None:
    """examples/cifar_envs.py, on the CPU."""
    arguments = ["--batch", "8", "--epochs", "2", "--devices", "cpu", "cpu", "cpu"]
    if from_files:
        write_cifar(root, "cifar10", count=20)
        arguments += ["--data-root", str(root)]
    said = output_of(ROOT / "examples" / "cifar_envs.py", *arguments, env=on_the_cpu())
    assert "epoch 1: 4 batches for 3 environments" in said


def test_constants_are_documented() -> None:
    text = (ROOT / "docs" / "gather.md").read_text()
    for about in cifar.CIFAR.values():
        for values in (about.mean, about.std):
            assert ", ".join(f"{value:.4f}" for value in values) in text
    formulas = "".join(str(one.__doc__) for one in (plan_epoch, epoch_seed, mix))
    for constant in ("0x9E3779B97F4A7C15", "0xBF58476D1CE4E5B9", "0x94D049BB133111EB", "1009"):
        assert constant in formulas
    assert (cifar_batches.CROP, cifar_batches.FLIP) == (4, 0.5)
