"""The helpers beside plain PyTorch: gathered batches, normalising, a training loop, CUDA graphs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from common import MIB, NATIVE, OURS
from measuring import example, machine, ms_a_step, use_allocator


def prepare(allocator: str) -> None:
    """The allocator, and kernels, without which there is nothing to measure."""
    use_allocator(allocator)
    from esper_alloc.helpers import kernels

    if not kernels.usable(0):
        raise RuntimeError("the kernels cannot run here: there is nothing to measure")
    gc.disable()


# --- gathered batches, in CIFAR's shapes -------------------------------------
SAMPLES = 50_000
#: Environments, and samples for each.
BATCHES = ((1, 512), (16, 32), (64, 32))


def plain_batches(
    inputs: torch.Tensor, targets: torch.Tensor, order: torch.Tensor, envs: int, size: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Batches as one writes them first: for each environment its indices are copied to the device,
    and inputs and targets are gathered by them."""
    step = envs * size

    def batch(start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = order[start : start + step].tensor_split(envs)
        indices = (part.to(inputs.device) for part in parts)
        return [(inputs[index], targets[index]) for index in indices]

    return map(batch, range(0, len(order) - step + 1, step))


def a_batch_us(
    begin_epoch: Callable[[], Iterator[Any]], epochs: int, marked: bool = False
) -> float:
    """Median over the epochs of the microseconds a batch, the epoch's start left out."""
    figures = []
    for _ in range(epochs + 2):
        steps = begin_epoch()
        torch.cuda.synchronize()
        count, batch = 0, None
        begin = time.perf_counter()
        # Not `for`, which would call iter() again, and that starts the next epoch.
        while (batch := next(steps, None)) is not None:
            count += 1
            if marked:
                batch.done()
        torch.cuda.synchronize()
        figures.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(figures[2:])


def gather(allocator: str) -> dict[str, Any]:
    """us a batch: of ours under ours, of plain PyTorch under native."""
    prepare(allocator)
    torch.manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (SAMPLES,), device="cuda")
    if allocator == NATIVE:
        generator = torch.Generator().manual_seed(0)

        def plain(envs: int, size: int) -> Iterator[Any]:
            order = torch.randperm(SAMPLES, generator=generator)
            return plain_batches(images, labels, order, envs, size)

        figures = {
            f"plain, {envs} x {size}": a_batch_us(partial(plain, envs, size), 3)
            for envs, size in BATCHES
        }
        return {"machine": machine(), **figures}
    from esper_alloc import GatherBatchIterator

    def ours(envs: int, size: int, **more: Any) -> float:
        batches = GatherBatchIterator(
            images, labels, batch_size_per_env=size, n_envs=envs, env_devices=["cuda"] * envs,
            seed=0, **more,
        )  # fmt: skip
        return a_batch_us(lambda: iter(batches), 15, marked="reuse" in more)

    figures = {f"ours, {envs} x {size}": ours(envs, size) for envs, size in BATCHES}
    return {"machine": machine(), **figures, "ours, 64 x 32, reuse": ours(64, 32, reuse=2)}


# --- normalised observations -------------------------------------------------
NORMALIZED = ((64, 64), (65536, 64))  # rows and features
REPEATS, CALLS = 11, 500


class Plain:
    """Running statistics by separate operations, rebound at each update."""

    def __init__(self, features: int) -> None:
        self.mean = torch.zeros(features, device="cuda")
        self.var = torch.ones(features, device="cuda")
        self.count = torch.tensor(1e-4, device="cuda")

    @torch.inference_mode()
    def update(self, x: torch.Tensor) -> None:
        batch_mean, batch_var, n = x.mean(dim=0), x.var(dim=0, unbiased=False), x.shape[0]
        delta = batch_mean - self.mean
        total = self.count + n
        spread = self.var * self.count + batch_var * n
        spread = spread + delta**2 * self.count * n / total
        self.mean = self.mean + delta * n / total
        self.var = spread / total
        self.count = total

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp((x - self.mean) / torch.sqrt(self.var + 1e-4), -10.0, 10.0)


def normalize(allocator: str) -> dict[str, Any]:
    """Median us of each, in turn."""
    prepare(allocator)
    from esper_alloc import RunningMeanStd

    figures: dict[str, Any] = {}
    for rows, features in NORMALIZED:
        x = torch.randn(rows, features, device="cuda")
        ours, plain = RunningMeanStd(features, device="cuda"), Plain(features)

        def plain_both() -> None:
            plain.update(x)
            plain.normalize(x)

        both = {"update_and_normalize": lambda: ours.update_and_normalize(x), "plain": plain_both}
        for call in both.values():
            ms_a_step(call, 50)  # to warm up
        turns = [
            {name: ms_a_step(both[name], CALLS) * 1e3 for name in both} for _ in range(REPEATS)
        ]
        for name in both:
            us = statistics.median(one[name] for one in turns)
            figures[f"{name} {rows}x{features}"] = us
    return {"machine": machine(), **figures}


# --- a training loop with 16 environments on streams -------------------------
ENVS, ENV_SIZE, ENV_SAMPLES, EPOCHS = 16, 64, 20_480, 6


def plain_epoch(environments: Sequence[Any], batches: Iterator[Any]) -> int:
    """One epoch without the helpers: the number of batches."""
    count = 0
    for batch in batches:
        for environment, (inputs, targets) in zip(environments, batch):
            stream = environment.stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                environment.step(inputs, targets)
            inputs.record_stream(stream)
            targets.record_stream(stream)
        del batch  # before the next one is made
        count += 1
    return count


def cifar_envs(allocator: str) -> dict[str, Any]:
    """ms a step (median over epochs), and the peak in MiB."""
    use_allocator(allocator)
    from esper_alloc import GatherBatchIterator

    code = example("cifar_envs")
    torch.manual_seed(0)
    images = torch.randn(ENV_SAMPLES, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (ENV_SAMPLES,))
    columns = images.to("cuda:0"), labels.to("cuda:0")
    environments = [code.Environment("cuda:0") for _ in range(ENVS)]
    if allocator == OURS:
        batches = GatherBatchIterator(
            *columns, batch_size_per_env=ENV_SIZE, n_envs=ENVS, env_devices=["cuda:0"] * ENVS,
            seed=0, order="global",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def epoch() -> int:
        if allocator == OURS:
            return code.train(environments, batches)
        order = torch.randperm(ENV_SAMPLES, generator=generator)
        return plain_epoch(environments, plain_batches(*columns, order, ENVS, ENV_SIZE))

    times = []
    for _ in range(1 + EPOCHS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        count = epoch()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3 / count)
    return {
        "machine": machine(),
        "step_ms": statistics.median(times[1:]),
        "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
    }


# --- compiled functions, with CUDA graphs --------------------------------------
SIZE = 1024  # pixels either way
BLOCKS, RUNS = 60, 50  # that the variants do by turns


@torch.no_grad()
def simulator(allocator: str) -> dict[str, Any]:
    """Median ms of a run of each variant, launches and the copies of cudagraph_outputs included.

    A run makes an image from two angles, in two compiled functions of which the second reads what
    the first returned. Every variant's images are eager's, also after later runs.
    """
    use_allocator(allocator)
    from esper_alloc import cudagraph_outputs

    make = partial(example("simulator").Simulator, SIZE, "cuda", torch.float32)
    variants = {
        "eager": make("eager"),
        "compiled without graphs": make("default"),
        "graphs": cudagraph_outputs(make("reduce-overhead")),
    }
    angles = [[0.001 * turn, -0.002 * turn] for turn in range(8)]
    inputs = [torch.tensor(one, device="cuda") for one in angles]
    expected = [variants["eager"](one) for one in inputs]
    tolerance = 2e-2 * max(float(image.abs().max()) for image in expected)
    for name, run in variants.items():
        images = [run(one) for one in inputs]
        for image, wanted in zip(images, expected, strict=True):
            worst = float((image - wanted).abs().max())
            if not worst <= tolerance:
                raise RuntimeError(f"{name}: an image is wrong by {worst:g}")
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for block in range(BLOCKS):
        for name, run in variants.items():
            one = inputs[block % len(inputs)]
            taken[name].append(ms_a_step(lambda: run(one), RUNS))
    return {"machine": machine(), **{name: statistics.median(ms) for name, ms in taken.items()}}
