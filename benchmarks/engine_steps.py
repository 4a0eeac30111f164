"""A training step of each of PyTorch's own engines, for as many ranks as there are.

Weights and data have seeds, so a step repeats as far as PyTorch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from measuring import example
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed import checkpoint as checkpoints, pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, parallel
from torch.distributed.tensor.experimental import context_parallel as sharing
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SEQUENCES = 2  # of a step, for each GPU
LARGE = models.Shape(width=2048, layers=16, heads=16, hidden=8192)
#: Of what goes to a file or to the host: this takes long.
LESS = models.Shape()
LONG = models.Shape(vocabulary=16000, layers=8, longest=16384)


@dataclass(frozen=True)
class How:
    """What an engine is told. activations: none, checkpoint or offload; bare: without what FSDP2
    keeps for other streams; folder: for checkpoints."""

    engine: str
    rank: int
    ranks: int
    device: str
    small: bool
    bare: bool
    activations: str
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return init_device_mesh(self.device, shape or (self.ranks,), mesh_dim_names=names)


@dataclass(frozen=True)
class Engine:
    """step(number, length) enqueues a step and gives this rank's part of the loss. tokens: of all
    ranks together, for each unit of length. varies: a training has steps of many lengths."""

    step: Callable[[int, int], torch.Tensor]
    longest: int
    tokens: int
    varies: bool = True


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Plain parameters and DTensors of each mesh in groups of their own, as fused kernels ask."""
    groups: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def lighten(layers: Iterable[nn.Module], how: How) -> None:
    """Activations of these layers are computed again in backward, or wait on the host."""

    def offloaded(forward: Callable[..., Any], *inputs: Any) -> Any:
        with save_on_cpu(pin_memory=how.cuda):
            return forward(*inputs)

    for layer in layers:
        if how.activations == "checkpoint":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        elif how.activations == "offload":
            layer.forward = functools.partial(offloaded, layer.forward)
        elif how.activations != "none":
            raise ValueError(f"activations: none, checkpoint or offload, not {how.activations!r}")


# --- a Llama: DDP and FSDP2 ---
def shard(model: nn.Module, parts: Iterable[nn.Module], how: How, mesh: DeviceMesh) -> None:
    """By FSDP2: each part, and what is left of the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*parts, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if how.bare:
        example("fsdp2").keep_nothing(model)
    elif how.engine == "fsdp2_marked":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                reduce = example("fsdp2").EmptiedReduceScatter(mark=how.cuda)
                module.set_custom_reduce_scatter(reduce)


def llama(how: How) -> Engine:
    models.DEVICE = how.device
    shape = LESS if how.activations == "offload" or "saved" in how.engine else LARGE
    shape = models.SMALL if how.small else shape
    model: nn.Module = models.llama(shape).train()
    lighten(model.layers, how)
    ddp = how.engine.startswith("ddp")
    if ddp:
        ids = [torch.cuda.current_device()] if how.cuda else None
        model = DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        if how.engine == "ddp_bf16":
            model.register_comm_hook(None, bf16_compress_hook)
    else:
        copies = how.engine == "hsdp" and how.ranks > 1
        mesh = how.mesh(2, how.ranks // 2, names=("copies", "shards")) if copies else how.mesh()
        shard(model, model.layers, how, mesh)
    optimizer = adam(model)
    torch.manual_seed(100 + how.rank)  # other data everywhere
    tokens = torch.randint(shape.vocabulary, (16, SEQUENCES, shape.longest), device=how.device)

    def step(number: int, length: int) -> torch.Tensor:
        ids = tokens[number % len(tokens), :, :length]
        with torch.autocast(how.device, dtype=torch.bfloat16, enabled=ddp):
            logits = model(ids)
        return update(models.loss_of_next(logits, ids), optimizer)

    if "saved" in how.engine:
        step = saving(step, model, optimizer, how)
    return Engine(step, shape.longest, how.ranks * SEQUENCES)


def saving(
    step: Callable[..., torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, how: How
) -> Callable[..., torch.Tensor]:
    """Of ten steps, the first is saved, and the third is undone: that state is loaded."""
    group = dist.new_group(backend="gloo")
    pending: Any = None

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def also_saves(number: int, length: int) -> torch.Tensor:
        nonlocal pending
        loss = step(number, length)
        if number % 10 == 0 and how.engine == "fsdp2_saved":
            checkpoints.save(state(), checkpoint_id=how.folder)
        elif number % 10 == 0:
            pending = checkpoints.async_save(state(), checkpoint_id=how.folder, process_group=group)
        elif number % 10 == 2:
            if pending is not None:
                pending.result()
            saved = state()
            checkpoints.load(saved, checkpoint_id=how.folder)
            set_state_dict(model, optimizer, model_state_dict=saved["model"],
                           optim_state_dict=saved["optimizer"])  # fmt: skip
        return loss

    return also_saves


# --- residual perceptrons: tensor parallelism and pipelines ---
class Perceptron(nn.Module):
    """x [tokens, width] to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def perceptrons(how: How) -> tuple[nn.Sequential, torch.Tensor]:
    """Some, and four batches [tokens, width], the same everywhere."""
    width, blocks, batch = (64, 8, 32) if how.small else (4096, 8, 4096)
    with torch.device(how.device):
        model = nn.Sequential(*(Perceptron(width) for _ in range(blocks))).to(torch.bfloat16)
        inputs = torch.randn(4, batch, width, dtype=torch.bfloat16)
    lighten(model, how)
    return model, inputs


def error(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(y.float(), wanted.float())


def tensor_parallel(how: How) -> Engine:
    """The first layer of each perceptron is split by columns, the second by rows; with sequence
    parallelism the tokens as well; and in two dimensions, over pairs, by FSDP2 beside it."""
    model, inputs = perceptrons(how)
    both, split = how.engine == "fsdp2_tp", how.engine != "tensor_parallel"
    by = min(2, how.ranks) if both else how.ranks
    names = ("data", "tensor") if both else ("tensor",)
    mesh = how.mesh(*((how.ranks // by,) * both), by, names=names)
    plan: dict[str, Any] = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    if split:
        plan = {
            "norm": parallel.SequenceParallel(sequence_dim=0),
            "up": parallel.ColwiseParallel(input_layouts=Shard(0)),
            "down": parallel.RowwiseParallel(output_layouts=Shard(0)),
        }
    for block in model:
        parallel.parallelize_module(block, mesh["tensor"], plan)
    if both:
        for module in (*model, model):
            fully_shard(module, mesh=mesh["data"])
    if how.bare:  # FSDP2's parts, if there are some
        example("fsdp2").keep_nothing(model)
    optimizer = adam(model)

    def step(number: int, length: int) -> torch.Tensor:
        x = inputs[(number + how.rank // by) % len(inputs), :length]
        x = x.chunk(by)[how.rank % by] if split else x
        return update(error(model(x), x.flip(1)), optimizer)

    return Engine(step, inputs.shape[1], how.ranks // by, varies=False)


def pipeline(how: How) -> Engine:
    """1F1B; interleaved: with two stages on each rank. Another length needs other buffers."""
    model, inputs = perceptrons(how)
    several = how.engine == "pipeline_interleaved" and how.ranks > 1
    count = how.ranks * (1 + several)
    each = len(model) // count
    indices = range(how.rank, count, how.ranks)
    mine = nn.ModuleList(model[index * each : (index + 1) * each] for index in indices)
    del model
    optimizer = adam(mine)

    @functools.lru_cache(maxsize=1)
    def schedule(length: int) -> Any:
        stages = [
            pipelining.PipelineStage(part, index, count, inputs.device)
            for index, part in zip(indices, mine, strict=True)
        ]
        if several:
            return pipelining.ScheduleInterleaved1F1B(stages, 2 * how.ranks, loss_fn=error)
        return pipelining.Schedule1F1B(stages[0], 2 * how.ranks, loss_fn=error)

    def step(number: int, length: int) -> torch.Tensor:
        x = inputs[number % len(inputs), :length]
        losses: list[torch.Tensor] = []
        given = [x] if how.rank == 0 else []
        target = x.flip(1) if how.rank == how.ranks - 1 else None
        schedule(length).step(*given, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else x.new_zeros((), dtype=torch.float)

    return Engine(step, inputs.shape[1], 1, varies=False)


# --- decoders: expert and context parallelism ---
class Spread(models.Experts):
    """Experts of which each rank has its share. Rows go to theirs, and answers come back."""

    def ask(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks, width = dist.get_world_size(), rows.shape[1]
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        coming = coming.view(ranks, -1)  # by rank, and by expert of this one
        # The host waits: sizes depend on it.
        sent, got = counts.view(ranks, -1).sum(dim=1).tolist(), coming.sum(dim=1).tolist()
        rows = all_to_all_single(rows.new_empty(sum(got), width), rows, got, sent)
        whose = torch.arange(len(self.experts), device=rows.device).repeat(ranks)
        by_expert = whose.repeat_interleave(coming.flatten()).sort(stable=True).indices
        answers = super().ask(rows.index_select(0, by_expert), coming.sum(dim=0))
        answers = answers.index_select(0, by_expert.argsort())
        return all_to_all_single(answers.new_empty(sum(sent), width), answers, sent, got)


def expert_parallel(how: How) -> Engine:
    """Eight experts a layer, spread over the ranks; all else is everywhere."""
    models.DEVICE = how.device
    shape, experts, batch = models.SMALL if how.small else models.MIXED, 8, 4

    def spread() -> nn.Module:
        feed = Spread(shape.width, shape.hidden, experts, 2)
        feed.experts = feed.experts[: experts // how.ranks]
        return feed

    model = models.decoder(shape, spread)
    lighten(model.layers, how)
    optimizer = adam(model)
    shared = [one for name, one in model.named_parameters() if ".experts." not in name]
    torch.manual_seed(100 + how.rank)
    tokens = torch.randint(shape.vocabulary, (16, batch, shape.longest + 1), device=how.device)

    def step(number: int, length: int) -> torch.Tensor:
        ids = tokens[number % len(tokens)]
        mix = models.together(batch, length)
        with torch.autocast(how.device, dtype=torch.bfloat16):
            hidden = model(ids[:, :length].flatten(), models.positions_of([length] * batch), mix)
            logits = model.logits(hidden)
        loss = functional.cross_entropy(logits.float(), ids[:, 1 : length + 1].flatten())
        loss = loss + 0.01 * sum(layer.feed.imbalance for layer in model.layers)
        loss.backward()
        for work in [dist.all_reduce(one.grad, async_op=True) for one in shared]:
            work.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Engine(step, shape.longest, how.ranks * batch)


def context_parallel(how: How) -> Engine:
    """One sequence a step, which all ranks share: ring attention, and FSDP2 over the same ranks.
    PyTorch has ring attention for CUDA only: on the CPU each rank has the whole sequence."""
    models.DEVICE = how.device
    shape = models.SMALL if how.small else LONG
    mesh = how.mesh()
    set_rotate_method("alltoall")  # a ring: not all keys and values at once
    model = models.decoder(shape)
    lighten(model.layers, how)
    shard(model, (*model.layers, model.logits), how, mesh)
    optimizer = adam(model)
    tokens = torch.randint(shape.vocabulary, (16, 1, shape.longest + 1), device=how.device)

    def mix(_: int, *qkv: torch.Tensor) -> torch.Tensor:
        return models.attend(*(one[None] for one in qkv))[0]

    def step(number: int, length: int) -> torch.Tensor:
        row = tokens[number % len(tokens)]
        ids, targets = row[:, :length].clone(), row[:, 1 : length + 1].clone()
        own = [ids, targets, models.positions_of([length])[None]]
        shared = sharing(mesh, buffers=own, buffer_seq_dims=[1, 1, 1], no_restore_buffers={*own})
        with shared if how.cuda else nullcontext():
            logits = model.logits(model(own[0][0], own[2][0], mix))
            return update(functional.cross_entropy(logits.float(), own[1][0]), optimizer)

    return Engine(step, shape.longest, 1)


MAKERS: dict[str, Callable[[How], Engine]] = {
    **dict.fromkeys(("ddp", "ddp_bf16", "fsdp2", "fsdp2_marked", "hsdp"), llama),
    "fsdp2_checkpoint": lambda how: llama(replace(how, activations="checkpoint")),
    "fsdp2_offload": lambda how: llama(replace(how, activations="offload")),
    **dict.fromkeys(("fsdp2_saved", "fsdp2_saved_async"), llama),
    **dict.fromkeys(("tensor_parallel", "sequence_parallel", "fsdp2_tp"), tensor_parallel),
    **dict.fromkeys(("pipeline", "pipeline_interleaved"), pipeline),
    "expert_parallel": expert_parallel,
    "context_parallel": context_parallel,
}
