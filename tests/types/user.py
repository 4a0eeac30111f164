"""A user's code, as the type checkers must see it. Nothing here runs; tests/test_style.py has it
checked. A line with an ignore is a mistake that they must find: an ignore without need is one."""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import esper_alloc
from esper_alloc import (
    CloneCounts,
    GatherBatch,
    GatherBatchIterator,
    RewardNormalizer,
    RunningMeanStd,
    SharedGPUGatherBatchIterator,
    ValueNormalizer,
    cudagraph_outputs,
    fused_validation_batch,
    record_use,
    using,
)

x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
side = torch.cuda.current_stream()


# --- marks


def marks() -> None:
    record_use(x, side)
    record_use([x, {"y": y}], side, event=side.record_event())
    record_use(x, side, event=side)  # type: ignore[arg-type]
    record_use(x, "side")  # type: ignore[arg-type]
    with using(x, y, stream=side) as scope:
        batch = {"x": x, "y": y}
    assert_type(scope.take(x), Tensor)
    assert_type(scope.take(batch), dict[str, Tensor])
    assert_type(scope.take(x, batch), tuple[Tensor, dict[str, Tensor]])


# --- enabling


def enabling() -> None:
    esper_alloc.enable(uses="automatic", required=True)
    esper_alloc.enable(required="yes")  # type: ignore[arg-type]


# --- outputs of CUDA graphs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


@cudagraph_outputs
def step(x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, int]:
    return x * scale, 1


@cudagraph_outputs(clone="all", mark="never")
def configured(x: Tensor, times: int) -> Tensor:
    return x * times


class Trainer:
    @cudagraph_outputs
    def step(self, x: Tensor) -> Tensor:
        return x


def any_step(step: cudagraph_outputs) -> None:
    step(x)


def outputs() -> None:
    assert_type(step(x, scale=2.0), tuple[Tensor, int])
    step(x, factor=2.0)  # type: ignore[call-arg]
    assert_type(configured(x, 3), Tensor)
    configured(x, "3")  # type: ignore[arg-type]
    assert_type(Trainer().step(x), Tensor)
    Trainer().step("x")  # type: ignore[arg-type]
    assert_type(step.counts, CloneCounts)
    model = cudagraph_outputs(Net())
    assert_type(model, Net)
    model.steps += 1
    nn.Sequential(model).to("cpu")
    with cudagraph_outputs() as scope:
        assert_type(scope.keep(step(x)), tuple[Tensor, int])
    cudagraph_outputs(3)  # type: ignore[call-overload]


# --- batches


def plain_batches(batches: GatherBatchIterator, first: GatherBatch) -> None:
    for batch in batches:
        assert_type(batch[0], tuple[Tensor, Tensor])
    assert_type(first[0], tuple[Tensor, Tensor])


def batches() -> None:
    plain = GatherBatchIterator(
        x, y, batch_size_per_env=2, n_envs=1, env_devices=["cpu"], seed=1, order="global"
    )
    for batch in plain:
        assert_type(batch, GatherBatch[Tensor, Tensor])
        for inputs, targets in batch:
            assert_type(inputs, Tensor)
            assert_type(targets, Tensor)
        with batch.for_stream(0, side) as (inputs, targets):
            assert_type(inputs, Tensor)
    named = GatherBatchIterator(
        {"image": x}, y, batch_size_per_env=2, n_envs=1, env_devices=["cpu"], seed=1
    )
    observed, _ = next(iter(named))[0]
    assert_type(observed, dict[str, Tensor])
    GatherBatchIterator([x], y, batch_size_per_env=2, n_envs=1, env_devices=["cpu"], seed=1)  # type: ignore[type-var]
    images = SharedGPUGatherBatchIterator(
        batch_size_per_env=2, n_envs=1, env_devices=["cpu"], shuffle=True, seed=1
    )
    assert_type(next(iter(images))[0], tuple[Tensor, Tensor])


# --- validation and normalisers


def scores(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
    return inputs.mean(1), inputs.argmax(1) == targets, targets.numel()


def wrong_scores(inputs: Tensor, targets: Tensor) -> Tensor:
    return inputs.mean(1)


def helpers() -> None:
    loss, _, total = fused_validation_batch(x, y, 2, evaluate=scores)
    assert_type(loss, Tensor)
    assert_type(total, int)
    fused_validation_batch(x, y, 2, evaluate=wrong_scores)  # type: ignore[arg-type]
    rms = RunningMeanStd(3)
    assert_type(rms.update_and_normalize(x), Tensor)
    assert_type(rms.mean, Tensor)
    rms.mean = [0.0, 0.0, 0.0]
    assert_type(rms.freeze(), RunningMeanStd)
    assert_type(ValueNormalizer().get_scale(), float)
    rewards = RewardNormalizer()
    reward = assert_type(rewards.update_and_normalize(1.0), float)
    assert_type(rewards.update_and_normalize(x, mask=x > 0), Tensor)
    assert_type(rewards.normalize_only(x), Tensor)
    assert_type(rewards.denormalize(rewards.normalize_only(1)), float)
    round(RewardNormalizer().mean + reward, 2)
    assert_type(esper_alloc.is_enabled(), bool)


def audits() -> None:
    with esper_alloc.audit(mode="warn", fence=False) as report:
        assert_type(report.complete, bool)
    for finding in report.findings:
        assert_type(finding.place.frames[0].line, int)
        assert_type(finding.freed is None, bool)
    assert_type(report.text() + report.json(), str)
    with esper_alloc.audit(fence=True) as fenced:
        pass
    freed = fenced.freed_at(1 << 40)
    if freed is not None:
        assert_type(freed.frees_ago, int)
    if fenced.fault is not None:
        assert_type(fenced.fault.text(), str)
    esper_alloc.audit(mode="loud")  # type: ignore[arg-type]
