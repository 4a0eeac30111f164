"""The helpers beside plain PyTorch: gathered batches, normalising, and a training loop."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import MIB, NATIVE, OURS, ROOT
from measuring import machine, median_ms, use_allocator


def need_kernels() -> None:
    from esper_alloc.helpers import kernels

    if not kernels.usable(0):
        raise RuntimeError("the kernels cannot run here: there is nothing to measure")


# --- gathered batches, in CIFAR's shapes -------------------------------------
SAMPLES = 50_000
#: Environments, and samples for each.
BATCHES = ((1, 512), (4, 128), (16, 32), (64, 32))


class PlainBatches:
    """Batches as one writes them first: for each environment its indices are copied to
    the device, and inputs and targets are gathered by them."""

    def __init__(self, inputs, targets, envs: int, size: int) -> None:
        self.inputs, self.targets, self.envs = inputs, targets, envs
        self.step = envs * size
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[list]:
        order = torch.randperm(len(self.inputs), generator=self.generator)
        return self.batches(order)

    def batches(self, order) -> Iterator[list]:
        for start in range(0, len(order) - self.step + 1, self.step):
            found = []
            for part in order[start : start + self.step].tensor_split(self.envs):
                index = part.to(self.inputs.device)
                found.append((self.inputs[index], self.targets[index]))
            yield found


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random images in channels_last and labels, on the GPU."""
    torch.manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32, device="cuda")
    labels = torch.randint(0, 10, (SAMPLES,), device="cuda")
    return images.contiguous(memory_format=torch.channels_last), labels


def ours(images, labels, envs: int, size: int, **more):
    from esper_alloc import GatherBatchIterator

    return GatherBatchIterator(
        images,
        labels,
        batch_size_per_env=size,
        n_envs=envs,
        env_devices=["cuda"] * envs,
        seed=0,
        **more,
    )


def a_batch_us(batches, epochs: int, *, marked: bool = False) -> float:
    """Median over the epochs of the microseconds a batch, the epoch's start left out."""
    figures = []
    for _ in range(epochs + 2):
        steps = iter(batches)
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


def measure_batches(figures: dict[str, float], allocator: str) -> None:
    images, labels = data()
    for envs, size in BATCHES:
        name = f"{envs} x {size}"
        figures[f"ours, {name}"] = a_batch_us(ours(images, labels, envs, size), 15)
        if allocator == NATIVE:
            figures[f"plain, {name}"] = a_batch_us(PlainBatches(images, labels, envs, size), 3)
    ring = ours(images, labels, 64, 32, reuse=2)
    figures["ours, 64 x 32, reuse"] = a_batch_us(ring, 15, marked=True)
    start = ours(images, labels, 64, 32)
    figures["ours, epoch start"] = median_ms(lambda: iter(start), 15, warm=2) * 1e3
    plain = PlainBatches(images, labels, 64, 32)
    figures["plain, epoch start"] = median_ms(lambda: iter(plain), 15, warm=2) * 1e3


def gather(allocator: str) -> dict[str, Any]:
    use_allocator(allocator)
    need_kernels()
    figures: dict[str, Any] = {}
    gc.disable()
    measure_batches(figures, allocator)
    return {"machine": machine(), **figures}


# --- normalised observations -------------------------------------------------
NORMALIZED = ((64, 64), (1024, 128), (65536, 64))  # rows and features
REPEATS = 11
CALLS = 500


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median us of each call, a block of calls of each in turn."""
    for call in calls.values():
        for _ in range(50):
            call()
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            figures[name].append((time.perf_counter_ns() - begin) / CALLS / 1000)
    return {name: statistics.median(values) for name, values in figures.items()}


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
    """Every duration, in this process, as {name: us}."""
    use_allocator(allocator)
    from esper_alloc import RunningMeanStd

    need_kernels()
    figures: dict[str, Any] = {}
    gc.disable()
    for rows, features in NORMALIZED:
        x = torch.randn(rows, features, device="cuda")
        ours, plain = RunningMeanStd(features, device="cuda"), Plain(features)

        def plain_both(x: torch.Tensor = x, plain: object = plain) -> None:
            plain.update(x)
            plain.normalize(x)

        def ours_both(x: torch.Tensor = x, ours: RunningMeanStd = ours) -> None:
            ours.update(x)
            ours.normalize(x)

        found = microseconds(
            {
                "update_and_normalize": lambda: ours.update_and_normalize(x),
                "plain": plain_both,
                "update, normalize": ours_both,
                "normalize": lambda: ours.normalize(x),
                "plain normalize": lambda: plain.normalize(x),
            }
        )
        figures |= {f"{name} {rows}x{features}": value for name, value in found.items()}
    return {"machine": machine(), **figures}


# --- a training loop with 16 environments on streams -------------------------
ENVS, ENV_SIZE, ENV_SAMPLES = 16, 64, 20_480
EPOCHS = 6


def layout(gpus: int) -> list[str]:
    """The environments' devices: all on one GPU, or 10 and 6."""
    if gpus == 1:
        return ["cuda:0"] * ENVS
    return ["cuda:0"] * 10 + ["cuda:1"] * (ENVS - 10)


def plain_epoch(environments: Sequence[Any], columns: dict, order: Any) -> int:
    """One epoch without the helpers: the number of batches."""
    step = ENVS * ENV_SIZE
    count = 0
    for start in range(0, ENV_SAMPLES - step + 1, step):
        batch = []
        for environment, part in zip(environments, order[start : start + step].tensor_split(ENVS)):
            images, labels = columns[environment.device]
            index = part.to(environment.device)
            batch.append((images[index], labels[index]))
        for environment, (inputs, targets) in zip(environments, batch):
            stream = environment.stream
            stream.wait_stream(torch.cuda.current_stream(environment.device))
            with torch.cuda.stream(stream):
                environment.step(inputs, targets)
            inputs.record_stream(stream)
            targets.record_stream(stream)
        count += 1
    return count


def cifar_envs(allocator: str, gpus: int) -> dict[str, Any]:
    """ms a step (median over epochs), peaks in MiB, and the losses."""
    use_allocator(allocator)
    sys.path.insert(0, str(ROOT / "examples"))
    import cifar_envs as example

    from esper_alloc import GatherBatchIterator

    devices = layout(gpus)
    torch.manual_seed(0)
    images = torch.randn(ENV_SAMPLES, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (ENV_SAMPLES,))
    columns = {torch.device(d): (images.to(d), labels.to(d)) for d in dict.fromkeys(devices)}
    environments = [example.Environment(device) for device in devices]
    epoch: Callable[[], int]
    if allocator == OURS:
        batches = GatherBatchIterator(
            *columns[torch.device("cuda:0")], batch_size_per_env=ENV_SIZE, n_envs=ENVS,
            env_devices=devices, seed=0, order="global",
        )  # fmt: skip

        def epoch() -> int:
            return example.train(environments, batches)

    else:
        generator = torch.Generator().manual_seed(0)

        def epoch() -> int:
            order = torch.randperm(ENV_SAMPLES, generator=generator)
            return plain_epoch(environments, columns, order)

    def wait() -> None:
        for device in dict.fromkeys(devices):
            torch.cuda.synchronize(device)

    epoch()
    wait()
    times = []
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        count = epoch()
        wait()
        times.append((time.perf_counter() - begin) * 1e3 / count)
    peak = sum(torch.cuda.max_memory_reserved(d) for d in dict.fromkeys(devices)) / MIB
    losses = [environment.last_loss() for environment in environments]
    return {
        "machine": machine(),
        "step_ms": statistics.median(times),
        "peak_reserved_mib": peak,
        "mean_loss": sum(losses) / len(losses),
    }
