"""Small models train for a few steps. Usage: training.py ALLOCATOR

Prints every loss as an exact hexadecimal number: two allocators must give the
same ones, bit for bit, since neither address nor stream order may matter.
"""

import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from device import report, use_allocator
from torch import nn
from torch.nn import functional

STEPS = 20


def convolutions() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(32, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def recurrent() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    # Lengths vary, so blocks of many sizes come and go.
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        length = int(torch.randint(5, 60, ()))
        return torch.randn(64, length, 32), torch.randint(10, (64,))

    return Recurrent(), batch


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


def attention() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        length = int(torch.randint(8, 64, ()))
        return torch.randint(100, (32, length)), torch.randint(10, (32,))

    return Attention(), batch


MODELS = {"convolutions": convolutions, "recurrent": recurrent, "attention": attention}


def prefetched(
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]], steps: int, marked: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that a copy stream moves to the device one step ahead."""
    copies = torch.cuda.Stream()
    compute = torch.cuda.current_stream()

    def fetch() -> list[torch.Tensor]:
        pinned = [part.pin_memory() for part in batch()]
        with torch.cuda.stream(copies):
            return [part.to("cuda", non_blocking=True) for part in pinned]

    ahead = fetch()
    for step in range(steps):
        compute.wait_stream(copies)
        parts = ahead
        if step + 1 < steps:
            ahead = fetch()
        yield parts[0], parts[1]
        # The step has enqueued its last read (backward included) by now.
        if marked:
            import esper_alloc

            with torch.no_grad():
                esper_alloc.record_use(parts, compute)
        else:
            for part in parts:
                part.record_stream(compute)


def losses(name: str, marked: bool) -> list[str]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for inputs, targets in prefetched(batch, STEPS, marked):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(loss).hex() for loss in found]


def main(allocator: str) -> None:
    use_allocator(allocator)
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    report(losses={name: losses(name, marked=allocator != "native") for name in MODELS})


if __name__ == "__main__":
    main(sys.argv[1])
