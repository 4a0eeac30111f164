"""Sixteen environments train side by side, each with a network and a stream of its own.

    python examples/cifar_envs.py                          # random pixels
    python examples/cifar_envs.py --data-root DIR          # CIFAR-10, unpacked in DIR
    python examples/cifar_envs.py --devices cuda:0 cuda:0 cuda:1   # three, unevenly

One gather a batch and device fills the memory of all its environments; each
environment waits for it on its own stream, and the end of its use is marked when
it leaves `for_stream`, so the batch may be dropped at once. Without a GPU it runs
on the CPU, a few small steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence

import torch
from torch import nn

import esper_alloc

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def network(width: int = 32) -> nn.Module:
    """A small convolutional network for [n, 3, 32, 32]."""
    layers: list[nn.Module] = []
    channels = 3
    for step in range(3):
        layers += [nn.Conv2d(channels, width << step, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width << step
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 10))


class Environment:
    """A network, its optimiser, and the stream that both run on (none on the CPU)."""

    def __init__(self, device: str, width: int = 32) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        model = network(width).to(self.device)
        self.model = model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.loss = torch.zeros((), device=self.device)  # of the last step
        if self.stream is not None:  # what was made above belongs to the current stream
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of training, on the current stream."""
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def last_loss(self) -> float:
        """Waits for the environment's stream."""
        if self.stream is not None:
            self.stream.synchronize()
        return self.loss.item()


def train(environments: Sequence[Environment], batches: Iterable[esper_alloc.GatherBatch]) -> int:
    """One epoch: the number of batches. Does not wait for the GPU."""
    count = 0
    for batch in with_progress(batches):
        for env, (_, environment) in enumerate(zip(batch, environments)):
            with batch.for_stream(env, environment.stream) as (inputs, targets):
                environment.step(inputs, targets)
        count += 1
    return count


def with_progress(
    batches: Iterable[esper_alloc.GatherBatch],
) -> Iterable[esper_alloc.GatherBatch]:
    """A bar on a terminal, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, unit="batch", disable=None, leave=False)


def random_batches(
    devices: Sequence[str], size: int, samples: int
) -> esper_alloc.GatherBatchIterator:
    """Random pixels in CIFAR's shapes; labels that can be learned."""
    pixels = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8)
    labels = pixels[:, 0].float().mean(dim=(1, 2)).argsort().argsort() * 10 // samples
    return esper_alloc.GatherBatchIterator(
        pixels,
        labels,
        batch_size_per_env=size,
        n_envs=len(devices),
        env_devices=devices,
        seed=0,
        order="global",
        transform=esper_alloc.ImageTransform(
            mean=MEAN, std=STD, crop=4, flip=0.5, channels_last=True
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", help="the folder that holds cifar-10-batches-py")
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help="one for each environment")
    parser.add_argument("--batch", type=int, default=64, help="samples for each environment")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        esper_alloc.enable()  # optional: everything here works with PyTorch's own allocator, too
    devices = options.devices or ["cuda:0" if on_gpu else "cpu"] * (16 if on_gpu else 2)
    batches: esper_alloc.GatherBatchIterator
    if options.data_root:
        batches = esper_alloc.SharedGPUGatherBatchIterator(
            batch_size_per_env=options.batch,
            n_envs=len(devices),
            env_devices=devices,
            shuffle=True,
            data_root=options.data_root,
            seed=0,
            order="global",
            augment=True,
        )
    else:
        samples = 50_000 if on_gpu else 4 * options.batch * len(devices)
        batches = random_batches(devices, options.batch, samples)
    environments = [Environment(device, 32 if on_gpu else 4) for device in devices]
    for epoch in range(options.epochs):
        begin = time.perf_counter()
        count = train(environments, batches)
        losses = [environment.last_loss() for environment in environments]
        took = time.perf_counter() - begin
        print(
            f"epoch {epoch}: {count} batches for {len(devices)} environments in {took:.2f} s, "
            f"mean loss {sum(losses) / len(losses):.3f}"
        )


if __name__ == "__main__":
    main()
