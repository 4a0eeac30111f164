"""FSDP2 on two GPUs, on esper_alloc.

    python examples/fsdp2.py                     # FSDP2's own recipe, untouched
    python examples/fsdp2.py --record-use        # reduce-scatter inputs marked instead
    python examples/fsdp2.py --automatic         # nothing kept and nothing marked
    python examples/fsdp2.py --native            # on PyTorch's own allocator
    torchrun --nproc-per-node 2 examples/fsdp2.py

FSDP2 gathers weights and reduces gradients on streams of its own. It keeps their
tensors alive by hand, until an event says that nobody reads them. That works on
every allocator. The losses of all four must be the same.

`--automatic` shows that nothing has to be kept. Memory comes back when the streams
that used it have passed its free. Before more than an allowance of it waits for them,
the host is held back. benchmarks/engines.py measures a larger training.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

import esper_alloc

GPUS, LAYERS, WIDTH, BATCH, STEPS = 2, 8, 1024, 512, 10


class Allocates:
    """Where FSDP2 gets the buffers of a collective from."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class EmptiedReduceScatter(Allocates):
    """FSDP2's reduce-scatter, its input dropped right after the last read.

    FSDP2 would keep the input until the next layer's gradients are done. What it
    keeps of this one is empty: the memory is back with the allocator, which knows
    what reads it and for how long.
    """

    def __init__(self, mark: bool) -> None:
        self.mark = mark

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        assert not async_op, "the current stream must be the one that reduces"
        dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op)
        if self.mark:
            esper_alloc.record_use(input_tensor, torch.cuda.current_stream())
        input_tensor.untyped_storage().resize_(0)


class EmptiedAllGather(Allocates):
    """FSDP2's all-gather, its output dropped as soon as the weights are copied out of it.

    In forward FSDP2 would keep the output until the next layer's weights are copied out.
    """

    def __init__(self) -> None:
        self.gathered: weakref.ref[torch.Tensor] | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        assert not async_op, "the current stream must be the one that gathers"
        self.gathered = weakref.ref(output_tensor)
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)

    def empty(self, *_: Any) -> None:
        """Called before a layer's forward, after FSDP2 has copied its weights out."""
        output = self.gathered and self.gathered()
        if output is not None:
            output.untyped_storage().resize_(0)


def keep_nothing(model: nn.Module) -> None:
    """FSDP2 keeps no memory for other streams. Only automatic uses make this safe."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gather = EmptiedAllGather()
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(EmptiedReduceScatter(mark=False))
            module.register_forward_pre_hook(gather.empty)  # FSDP2's own hook comes first


class Block(nn.Module):
    """A residual two-layer perceptron: (batch, WIDTH) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def train(gpu: int, options: argparse.Namespace, **rendezvous: Any) -> None:
    """One process: one GPU, one shard of the model."""
    if not options.native:
        # In each process, before anything touches the GPU.
        esper_alloc.enable(uses="automatic" if options.automatic else None)
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", **rendezvous)
    torch.manual_seed(0)  # the same model everywhere
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).cuda()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    if options.record_use:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(EmptiedReduceScatter(mark=True))
    if options.automatic:
        keep_nothing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + gpu)  # other data everywhere
    losses = []
    for _ in range(options.steps):
        x = torch.randn(BATCH, WIDTH, device="cuda")
        loss = functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if gpu == 0:
        print("losses", *(value.hex() for value in mean.tolist()))  # exact, to be compared
        print(f"first {mean[0].item():.4f}, last {mean[-1].item():.4f}")
        print(f"peak reserved {torch.cuda.max_memory_reserved() >> 20} MiB on GPU 0")
    dist.destroy_process_group()


def start(rank: int, folder: str, options: argparse.Namespace) -> None:
    """A process that this script has spawned."""
    place = f"file://{folder}/rendezvous"
    train(rank, options, init_method=place, rank=rank, world_size=GPUS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--native", action="store_true", help="PyTorch's own allocator")
    how.add_argument("--record-use", action="store_true", help="mark reduce-scatter inputs")
    how.add_argument("--automatic", action="store_true", help="keep nothing, mark nothing")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if torch.cuda.device_count() < GPUS:
        raise SystemExit(f"this example needs {GPUS} NVIDIA GPUs")

    if "RANK" in os.environ:  # started by torchrun
        train(int(os.environ["LOCAL_RANK"]), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(start, (folder, options), nprocs=GPUS)


if __name__ == "__main__":
    main()
