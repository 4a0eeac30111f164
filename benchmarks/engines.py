"""PyTorch's own engines on two GPUs: DDP, FSDP2 and tensor parallelism, under torchrun.

Everything repeats as far as PyTorch can make it: data, weights and the lengths of sequences have
seeds, and deterministic algorithms are asked for.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import models
import torch
import torch.distributed as dist
from common import workers
from measuring import choose_allocator, example, machine, memory_figures
from torch import nn
from torch.nn import functional

RANKS = 2
SEQUENCES = 2  # of a step, for each GPU
PATIENCE_S = 180.0  # for one variant
LARGE = models.Shape(width=2048, layers=16, heads=16, hidden=8192)


#: What measure() was asked.
How = SimpleNamespace
#: Enqueues a step and gives its loss, by its number.
Step = Callable[[int], torch.Tensor]


def lengths(steps: int, shortest: int, longest: int) -> list[int]:
    """Of the sequences of each step: multiples of 64, or of 8 where all are short."""
    draw = random.Random(11)
    unit = 64 if longest >= 512 else 8
    shortest = min(max(shortest // unit, 1) * unit, longest)
    return [draw.randrange(shortest, longest + 1, unit) for _ in range(steps)]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain parameters and those that are DTensors in groups of their own, as fused kernels ask."""
    from torch.distributed.tensor import DTensor

    groups: dict[bool, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


def llama_step(options: How, rank: int) -> tuple[Step, int]:
    """A step of ddp or fsdp2, and the tokens of all steps that are timed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    models.DEVICE = options.device
    shape = models.SMALL if options.small else LARGE
    model: torch.nn.Module = models.llama(shape).train()
    if options.engine == "ddp":
        ids = [rank] if options.device == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if options.bare:
            example("fsdp2").keep_nothing(model)
    optimizer = adam(model)
    schedule = lengths(options.steps, options.shortest, shape.longest)
    torch.manual_seed(100 + rank)  # other data everywhere
    tokens = torch.randint(shape.vocabulary, (16, SEQUENCES, shape.longest), device=options.device)

    def step(number: int) -> torch.Tensor:
        ids = tokens[number % len(tokens), :, : schedule[number]]
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.engine == "ddp"):
            logits = model(ids)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, RANKS * SEQUENCES * sum(schedule[untimed(options.steps) :])


def tensor_parallel_step(options: How, rank: int) -> tuple[Step, int]:
    """Residual perceptrons, the first layer of each split by columns, the second by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    width, blocks, batch = (64, 2, 32) if options.small else (4096, 8, 4096)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    with torch.device(options.device):
        model = nn.Sequential(*(Block() for _ in range(blocks))).to(torch.bfloat16)
    mesh = init_device_mesh(options.device, (RANKS,))
    for block in model:
        plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(block, mesh, plan)
    optimizer = adam(model)
    inputs = torch.randn(4, batch, width, device=options.device, dtype=torch.bfloat16)

    def step(number: int) -> torch.Tensor:
        x = inputs[number % len(inputs)]
        loss = functional.mse_loss(model(x).float(), x.flip(1).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, batch * (options.steps - untimed(options.steps))


def untimed(steps: int) -> int:
    """The first steps, in which memory grows and NCCL connects."""
    return max(steps // 10, 1)


def measure(
    allocator: str,
    engine: str,
    steps: int,
    shortest: int,
    device: str,
    bare: bool = False,
    small: bool = False,
) -> None:
    """Becomes torchrun, which starts this command once for each GPU; or one rank, of which the
    first one reports. bare: without what FSDP2 keeps for other streams; shortest: tokens."""
    if "RANK" not in os.environ:
        command = "-m torch.distributed.run --standalone --nproc-per-node".split()
        os.execv(sys.executable, [sys.executable, *command, str(RANKS), *sys.argv])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with torchrun, which may be stopped
    options = How(engine=engine, steps=steps, shortest=shortest, device=device, bare=bare,
                  small=small or device == "cpu")  # fmt: skip
    rank, cuda = int(os.environ["LOCAL_RANK"]), device == "cuda"
    if cuda:
        choose_allocator(allocator)  # before anything touches the GPU
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=PATIENCE_S))
    # Not warn_only: then the backward of flash attention would not repeat.
    torch.use_deterministic_algorithms(True)
    # Fresh memory is not filled: that would be work which no job has.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # cuDNN's attention does not repeat.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)  # the same model everywhere
    make = tensor_parallel_step if engine == "tensor_parallel" else llama_step
    step, tokens = make(options, rank)

    def settle() -> float:
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    losses = [step(number) for number in range(untimed(steps))]
    begin = settle()
    losses += [step(number) for number in range(untimed(steps), steps)]
    took = settle() - begin
    figures = memory_figures() if cuda else {}
    sums = torch.stack(losses).double()
    dist.all_reduce(sums)
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, figures)
    if rank == 0:
        figures = {key: max(one[key] for one in everywhere) for key in figures}
        about = machine() if cuda else {"gpu": "none"}
        about["gpu"] = f"{RANKS} x {about['gpu']}"
        losses = [loss / RANKS for loss in sums.tolist()]
        workers.report({"machine": about, "tokens_s": tokens / took, "losses": losses, **figures})
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of DDP and of gloo may end the way out by a signal
