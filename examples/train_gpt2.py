"""Trains a small GPT on its own source text, on esper_alloc.

    python examples/train_gpt2.py                # on esper_alloc
    python examples/train_gpt2.py --native       # on PyTorch's own allocator

The only line that esper_alloc asks for is ``esper_alloc.enable()``; batches
come from a copy stream, one step ahead, and are marked with ``record_use``.
Needs nothing but torch. Without a GPU it trains a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import esper_alloc


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes: (batch, length) integers in, (batch, length, 256) logits out."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def on_cpu(text: torch.Tensor, batch: int, length: int, steps: int) -> Iterator[torch.Tensor]:
    """Random pieces of the text: (batch, length + 1) integers."""
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch,))
        yield torch.stack([text[start : start + length + 1] for start in starts.tolist()])


def on_gpu(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The batches on the GPU, each copied while the step before it runs."""
    copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()

    def fetch() -> torch.Tensor | None:
        batch = next(batches, None)
        with torch.cuda.stream(copies):
            return None if batch is None else batch.pin_memory().to("cuda", non_blocking=True)

    ahead = fetch()
    while ahead is not None:
        compute.wait_stream(copies)
        batch, ahead = ahead, fetch()
        yield batch
        # The step has enqueued its last read of the batch: mark it, drop it.
        with torch.no_grad():
            esper_alloc.record_use(batch, compute)
        del batch


def with_progress(batches: Iterator[torch.Tensor], steps: int) -> Iterable[torch.Tensor]:
    """A bar on a terminal, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, total=steps, unit="step", disable=None, leave=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--native", action="store_true", help="PyTorch's own allocator")
    parser.add_argument("--steps", type=int, help="how many steps (default: 50, on the CPU 10)")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be at least 1")

    gpu = torch.cuda.is_available()
    if gpu and not options.native:
        esper_alloc.enable()

    torch.manual_seed(0)
    if gpu:  # about the size of GPT-2
        model, batch, length, steps = GPT(12, 768, 12, 1024).cuda(), 8, 1024, 50
    else:
        model, batch, length, steps = GPT(2, 64, 4, 64), 4, 64, 10
    steps = options.steps or steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    batches = on_cpu(text, batch, length, steps)

    if not gpu:
        place = "the CPU, where no CUDA allocator is needed"
    else:
        allocator = "esper_alloc" if esper_alloc.is_enabled() else "PyTorch's own allocator"
        place = f"{torch.cuda.get_device_name()}, {allocator}"
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{size:.1f} M parameters on {place}")

    begin, timed_from = 0.0, min(10, steps // 2)
    device = "cuda" if gpu else "cpu"
    for step, ids in enumerate(with_progress(on_gpu(batches) if gpu else batches, steps)):
        if step == timed_from:
            if gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    if gpu:
        torch.cuda.synchronize()
    took = (time.perf_counter() - begin) / max(1, steps - timed_from)
    print(f"{took * 1e3:.1f} ms a step")
    if gpu:
        allocated = torch.cuda.max_memory_allocated() / 2**20
        reserved = torch.cuda.max_memory_reserved() / 2**20
        print(f"peak allocated {allocated:.0f} MiB, peak reserved {reserved:.0f} MiB")


if __name__ == "__main__":
    main()
