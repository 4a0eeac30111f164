"""Keeps what the forward pass saves for the backward pass in CPU memory.

    python examples/offload_activations.py

`saved_tensors_hooks` calls `pack` for each tensor that autograd saves and `unpack`
when the backward pass wants it. Copies run on a side stream, beside the computing.
The gradients are compared with those of a run without offloading.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn

import esper_alloc

LAYERS, WIDTH, ROWS = 8, 2048, 8192  # a saved tensor of float32: 64 MiB


@dataclass
class Saved:
    """What autograd keeps in place of a tensor on the GPU."""

    host: torch.Tensor  # pinned
    before: Saved | None  # saved before this one, so wanted after it
    gpu: torch.Tensor | None = None  # the copy back, once it was asked for
    ready: torch.cuda.Event | None = None  # the copy back is done


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Use a new one for each forward pass: ``with Offload(model, copies): ...``"""

    def __init__(self, model: nn.Module, copies: torch.cuda.Stream) -> None:
        super().__init__(self.pack, self.unpack)
        self.copies = copies
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.last: Saved | None = None

    @torch.no_grad()  # these are copies; nothing here is differentiated
    def pack(self, x: torch.Tensor) -> torch.Tensor | Saved:
        small = x.numel() * x.element_size() < 1 << 20
        if not x.is_cuda or small or x.untyped_storage().data_ptr() in self.weights:
            return x
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self.copies.wait_stream(torch.cuda.current_stream())  # x is written first
        with torch.cuda.stream(self.copies):
            host.copy_(x, non_blocking=True)
            # The last read of x on this stream: once the model drops x, its memory serves
            # again as soon as this copy is done.
            esper_alloc.record_use(x, self.copies)
        self.last = Saved(host, before=self.last)
        return self.last

    @torch.no_grad()
    def unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.gpu is None:
            self.fetch(saved)
        assert saved.gpu is not None and saved.ready is not None
        x, saved.gpu = saved.gpu, None
        torch.cuda.current_stream().wait_event(saved.ready)  # the copy, then the reads
        if saved.before is not None:  # it comes while the GPU works on x
            self.fetch(saved.before)
        return x

    def fetch(self, saved: Saved) -> None:
        """Begins to copy back."""
        if saved.gpu is not None:
            return
        # Allocated on the stream that will read it: those reads need no mark. But
        # the side stream writes it, so that is what has to be marked.
        saved.gpu = torch.empty_like(saved.host, device="cuda")
        self.copies.wait_stream(torch.cuda.current_stream())  # earlier owners are done
        with torch.cuda.stream(self.copies):
            saved.gpu.copy_(saved.host, non_blocking=True)
            esper_alloc.record_use(saved.gpu, self.copies)
        saved.ready = self.copies.record_event()


def train_step(model: nn.Module, x: torch.Tensor, offload: bool) -> tuple[list[torch.Tensor], int]:
    """The gradients, and how many MiB were active at the peak."""
    copies = torch.cuda.Stream()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    # Cached memory that is ready is taken before memory that a copy still reads, so
    # the last run's would hide what this one needs.
    torch.cuda.empty_cache()
    base = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    if offload:
        with Offload(model, copies):
            loss = model(x).square().mean()
    else:
        loss = model(x).square().mean()
    loss.backward()
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, (peak - base) >> 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU")
    esper_alloc.enable()  # before anything touches the GPU

    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    train_step(model, x, offload=False)  # loads kernels, allocates workspaces

    expected, plain = train_step(model, x, offload=False)
    found, offloaded = train_step(model, x, offload=True)
    equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    print(f"at the peak {plain} MiB active, with offloading {offloaded} MiB")
    print(f"the gradients are {'equal' if equal else 'NOT equal'}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
