"""Gradients that a second stream reduces: five steps by hand, or one line.

    python examples/reduce_scatter.py

A backward pass makes one large gradient after another on the compute stream. A
communication stream reduces each to a shard, here by a plain sum, so that one GPU
is enough. A gradient's memory must not be reused while the reduction reads it.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable

import torch

import esper_alloc

LAYERS, RANKS, SIDE = 24, 4, 4096  # a gradient of float32: 64 MiB


def gradient(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Stands for a layer's backward pass, on the current stream."""
    return torch.mm(x, x).add_(layer)


def reduce(full: torch.Tensor) -> torch.Tensor:
    """Stands for a reduce-scatter, on the current stream."""
    return full.view(RANKS, -1).sum(0)


def one_stream(x: torch.Tensor) -> list[torch.Tensor]:
    """What must come out."""
    return [reduce(gradient(x, layer)) for layer in range(LAYERS)]


def by_hand(x: torch.Tensor) -> list[torch.Tensor]:
    """The recipe for allocators that know nothing of the second stream."""
    compute, comm = torch.cuda.current_stream(), torch.cuda.Stream()
    stash: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
    shards = []
    for layer in range(LAYERS):
        if len(stash) == 2:
            old, done = stash.popleft()  # 3. the oldest, before memory is wanted
            compute.wait_event(done)  # 4. its owner waits for the last read
            del old, done  # 5. and drops it, its own stream being the current one
        full = gradient(x, layer)
        comm.wait_stream(compute)
        with torch.cuda.stream(comm):
            shards.append(reduce(full))
            done = comm.record_event()  # 1. an event after the last read
        stash.append((full, done))  # 2. a reference, so that nobody frees it
        del full, done
    for _, done in stash:
        compute.wait_event(done)
    compute.wait_stream(comm)  # the shards are read here
    return shards


def by_record_use(x: torch.Tensor) -> list[torch.Tensor]:
    """The same. No stash, no events, and it may be dropped anywhere."""
    compute, comm = torch.cuda.current_stream(), torch.cuda.Stream()
    shards = []
    for layer in range(LAYERS):
        full = gradient(x, layer)
        comm.wait_stream(compute)
        with torch.cuda.stream(comm):
            shards.append(reduce(full))
            esper_alloc.record_use(full, comm)  # right after the last read
        del full
    compute.wait_stream(comm)  # the shards are read here
    return shards


def measure(
    pipeline: Callable[[torch.Tensor], list[torch.Tensor]], x: torch.Tensor
) -> tuple[list[torch.Tensor], int]:
    """The shards, and how many MiB were active at the peak beside x and the shards."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    shards = pipeline(x)
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"] - base
    torch.cuda.synchronize()
    made = sum(shard.numel() * shard.element_size() for shard in shards)
    # The shards are the streams' own results: they are compared on the CPU.
    return [shard.cpu() for shard in shards], (peak - made) >> 20


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this example needs an NVIDIA GPU")
    esper_alloc.enable()  # before anything touches the GPU

    torch.manual_seed(0)
    x = torch.randn(SIDE, SIDE, device="cuda")
    one_stream(x)  # loads kernels, allocates workspaces
    expected, _ = measure(one_stream, x)
    for pipeline in (by_hand, by_record_use):
        shards, peak = measure(pipeline, x)
        equal = all(torch.equal(a, b) for a, b in zip(expected, shards, strict=True))
        verdict = "equal" if equal else "WRONG"
        print(f"{pipeline.__name__:14} {peak:4} MiB for gradients, shards {verdict}")
        if not equal:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
