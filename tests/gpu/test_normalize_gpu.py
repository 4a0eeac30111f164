"""The normalisers on a GPU: results, launches, graphs, compilation, devices, ranks.

The reference is float64 on the CPU, by the plain operations of esper_alloc.helpers.normalize.moments,
which tests/helpers/test_normalize.py compares with NumPy. The kernels' arithmetic is tested on the CPU:
tests/helpers/test_normalize_kernel.py.
"""

import inspect
import itertools
import warnings
from typing import Any

import pytest
from processes import run_two_ranks

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from esper_alloc import RewardNormalizer, RunningMeanStd, ValueNormalizer  # noqa: E402
from esper_alloc.helpers import kernels  # noqa: E402
from esper_alloc.helpers.normalize import moments  # noqa: E402

SHAPES = [
    (1, 1),
    (2, 3),
    (64, 64),
    (1024, 128),
    (2048, 64),  # the largest whose columns are one block's
    (2049, 64),  # the smallest that is one cooperative launch
    (70_000, 64),  # more rows than stay in registers
    (65536, 64),
    (65536, 3),
    (200_000, 1),
    (5000, 513),
    (4100, 9000),  # more columns than blocks that run at once
    (33, 4099),
]


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    assert kernels.usable(0), "the kernels do not run here, and everything would be tested but them"
    torch._dynamo.reset()


def reference(rms: RunningMeanStd, x: Any, mask: Any = None, weights: Any = None) -> Any:
    """The state after an update, computed on the CPU: moments, count."""
    state = [
        tensor.detach().cpu().clone() for tensor in (rms._moments, rms.mean, rms.var, rms.count)
    ]
    moments.normalizer_update_(
        *state,
        x.cpu(),
        None if mask is None else mask.cpu(),
        None if weights is None else weights.cpu(),
        -1.0 if rms.momentum is None else rms.momentum,
        rms._warm_up,
    )
    return state[0], state[3]


def check_step(rms: RunningMeanStd, x: Any, mask: Any = None, weights: Any = None) -> None:
    wanted, count = reference(rms, x, mask, weights)
    y = rms.update_and_normalize(x, mask=mask, weights=weights)
    torch.testing.assert_close(rms._moments.cpu(), wanted, rtol=1e-10, atol=1e-12)
    assert torch.equal(rms.mean, rms._moments[0].float())
    assert torch.equal(rms.var, rms._moments[1].float())
    assert int(rms.count) == int(count)
    exact = (x.double() - rms._moments[0]) / (rms._moments[1] + rms.epsilon).sqrt()
    torch.testing.assert_close(
        y.double(), exact.clamp(-10, 10), rtol=1e-5, atol=2e-6, equal_nan=True
    )
    assert torch.equal(y, rms.normalize(x)) or bool(x.isnan().any())


TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@pytest.mark.parametrize("shape, dtype", zip(SHAPES, itertools.cycle(TYPES)), ids=str)
def test_every_size_and_type(shape: tuple[int, int], dtype: Any) -> None:
    rms = RunningMeanStd(shape[1], device="cuda")
    for scale, offset in ((1.0, 0.0), (3.0, 50.0)):
        check_step(rms, (torch.randn(shape, device="cuda") * scale + offset).to(dtype))


def test_results_are_the_same_bits_each_time() -> None:
    for shape in ((1024, 128), (70_000, 64)):
        x = torch.randn(shape, device="cuda")
        states = []
        for _ in range(5):
            rms = RunningMeanStd(shape[1], device="cuda")
            y = rms.update_and_normalize(x)
            states.append((rms._moments, y))
        for state, y in states[1:]:
            assert torch.equal(state, states[0][0]) and torch.equal(y, states[0][1])


# --- what it costs ---------------------------------------------------------------------


def every_call(device: str = "cuda") -> list[Any]:
    """Everything that must neither wait nor fail in a graph; with inputs of its own."""
    rms = RunningMeanStd(64, device=device)
    value, reward = ValueNormalizer(device=device), RewardNormalizer(device=device)
    small, large = torch.randn(64, 64, device=device), torch.randn(9000, 64, device=device)
    mask, weights = torch.rand(64, device=device) > 0.5, torch.rand(64, 64, device=device)
    return [
        lambda: rms.update(small), lambda: rms.update(large),
        lambda: rms.update(small, mask=mask, weights=weights), lambda: rms.normalize(small),
        lambda: rms.denormalize(small), lambda: rms.update_and_normalize(small),
        lambda: rms.update_and_normalize(large),
        lambda: rms.merge(RunningMeanStd(64, device=device)), lambda: rms.reset(),
        lambda: value.update(small), lambda: value.normalize(small),
        lambda: value.denormalize(small), lambda: value.std,
        lambda: reward.update_and_normalize(small), lambda: reward.normalize_only(small),
    ]  # fmt: skip


def test_nothing_waits_for_the_device() -> None:
    calls = every_call()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(64, 64), (1024, 128), (65536, 64)], ids=str)
def test_one_launch_and_no_memory_but_the_result(shape: tuple[int, int]) -> None:
    from torch.profiler import ProfilerActivity, profile

    rms = RunningMeanStd(shape[1], device="cuda")
    x = torch.randn(shape, device="cuda")
    y = rms.update_and_normalize(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            y = rms.update_and_normalize(x)
        torch.cuda.synchronize()
    launched = [
        event.name
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(launched) == 5 and all("update_kernel" in name for name in launched), launched
    assert sum(event.name == "esper_alloc::normalizer_step_" for event in profiled.events()) == 5

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    y = rms.update_and_normalize(x)
    # The parts of a cooperative launch are the second.
    assert allocations() - before == (1 if shape[0] <= 2048 else 2)
    live = torch.cuda.memory_allocated()
    for _ in range(10):
        y = rms.update_and_normalize(x)
    assert torch.cuda.memory_allocated() == live
    del y


def test_cooperative_launches_beside_each_other() -> None:
    """Two grids with barriers must not wait for each other's blocks."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    normalizers = [RunningMeanStd(64, device="cuda") for _ in streams]
    x = torch.randn(65536, 64, device="cuda")
    normalizers[0].update(x)
    normalizers[0].reset()
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, rms in zip(streams, normalizers):
            with torch.cuda.stream(stream):
                rms.update_and_normalize(x)
    torch.cuda.synchronize()
    for rms in normalizers:
        assert torch.equal(rms._moments, normalizers[0]._moments)
        assert int(rms.count) == 50 * 65536


# --- CUDA graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (9000, 64), (300, 5)], ids=str)
def test_replays_update(shape: tuple[int, int]) -> None:
    rms, eager = (RunningMeanStd(shape[1], device="cuda") for _ in range(2))
    x = torch.zeros(shape, device="cuda")
    mask = torch.ones(shape[0], dtype=torch.bool, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rms.update_and_normalize(x)
        rms.update(x, mask=mask)
    torch.cuda.current_stream().wait_stream(side)
    rms.reset()
    addresses = [tensor.data_ptr() for tensor in rms._buffers.values()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms.update_and_normalize(x)
        rms.update(x, mask=mask)
    assert int(rms.count) == 0  # a capture runs nothing
    for i in range(5):
        x.copy_(torch.randn(shape, device="cuda") + i)
        mask.copy_(torch.rand(shape[0], device="cuda") > 0.5)
        graph.replay()
        wanted = eager.update_and_normalize(x)
        eager.update(x, mask=mask)
        assert torch.equal(y, wanted)
        assert torch.equal(rms._moments, eager._moments) and torch.equal(rms.count, eager.count)
    assert [tensor.data_ptr() for tensor in rms._buffers.values()] == addresses


def test_statistics_cannot_move_into_a_graph() -> None:
    rms, x = RunningMeanStd(4), torch.zeros(8, 4, device="cuda")
    RunningMeanStd(4, device="cuda").update(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be moved while a graph is captured"):
        with torch.cuda.graph(graph):
            rms.update(x)
    assert rms.device.type == "cpu" and int(rms.count) == 0


# --- operators, compilation --------------------------------------------------------------------


class Policy(nn.Module):
    """A policy network whose observations are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.rms = RunningMeanStd(64)
        self.body = nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        return self.body(self.rms(x * 2) + 1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_policy(mode: str) -> None:
    from torch._dynamo.utils import counters

    model, twin = Policy().cuda(), Policy().cuda()
    twin.load_state_dict(model.state_dict())
    addresses = [tensor.data_ptr() for tensor in model.rms._buffers.values()]
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for i in range(8):
        x = torch.randn(512, 64, device="cuda") + i
        with torch.no_grad():
            y = compiled(x).clone()
            torch.testing.assert_close(y, twin(x), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    # reduce-overhead must not fall back because statistics are written.
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert int(model.rms.count) == 8 * 512
    torch.testing.assert_close(model.rms._moments, twin.rms._moments)
    assert [tensor.data_ptr() for tensor in model.rms._buffers.values()] == addresses


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["update", "normalize", "update_and_normalize", "__call__"])
def test_migration_warns_and_changes_no_result(method: str) -> None:
    x = torch.randn(500, 4, device="cuda") * 3 + 5
    moved, right = RunningMeanStd(4), RunningMeanStd(4, device="cuda")
    moved.update(x[:100].cpu())
    right.update(x[:100])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        ours = getattr(moved, method)(x)
        getattr(moved, method)(x)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert "statistics on cpu and was given values on cuda:0" in str(warning.message)
    theirs = getattr(right, method)(x)
    getattr(right, method)(x)
    if ours is not None:
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(moved._moments, right._moments, rtol=1e-12, atol=1e-14)
    assert torch.equal(moved.count, right.count) and moved.device == x.device


def test_models_take_their_statistics_along() -> None:
    model = nn.Sequential(RunningMeanStd(4), nn.Linear(4, 2))
    model(torch.randn(50, 4) * 3 + 1e3)
    exact = model[0]._moments.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.to("cuda", torch.bfloat16)
        assert model[0]._moments.dtype == torch.float64
        model[0](torch.randn(5, 4, device="cuda"))
        model[0].load_state_dict({"mean": exact[0], "var": exact[1], "count": 50})
        model.cpu()
    assert torch.equal(model[0].mean, exact[0].float())


# --- several GPUs ------------------------------------------------------------------------------------

several = pytest.mark.two_gpus


@several
def test_another_device_than_the_current_one() -> None:
    x = torch.randn(9000, 64, device="cuda:1")
    rms = RunningMeanStd(64, device="cuda:1")
    check_step(rms, x)
    check_step(rms, x[:100])
    assert torch.cuda.current_device() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rms.update(x.to("cuda:0"))
    assert "cuda:1 and was given values on cuda:0" in str(caught[0].message)


RANK = """
import sys
import torch, torch.distributed as dist
from esper_alloc import RunningMeanStd
rank, port = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
data = torch.randn(3, 2, 9000, 64, generator=torch.Generator().manual_seed(3))
data = (data * 3 + torch.arange(2)[None, :, None, None] * 50).cuda()
ours, one = (RunningMeanStd(64, device="cuda") for _ in range(2))
ours.all_reduce()
torch.cuda.synchronize()
for step in range(3):
    few = 5000 + 4000 * rank
    ours.update(data[step, rank, :few])
    one.update(torch.cat([data[step, 0, :5000], data[step, 1, :9000]]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    ours.all_reduce()
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(ours._moments, one._moments, rtol=1e-12, atol=1e-12)
    assert int(ours.count) == int(one.count) == 14000 * (step + 1)
both = [torch.zeros_like(ours._moments) for _ in range(2)]
dist.all_gather(both, ours._moments)
assert torch.equal(both[0], both[1]), "ranks drift"
dist.destroy_process_group()
print("rank", rank, "done")
"""


@several
def test_two_ranks_are_as_one() -> None:
    run_two_ranks(RANK)
