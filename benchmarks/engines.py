"""PyTorch's own engines on two GPUs: DDP, FSDP2 and tensor parallelism, under torchrun.

    python benchmarks/engines.py [--engine ddp] [--steps 200]
    python benchmarks/engines.py --cpu --steps 4 --out FILE   # tries the script: gloo, small models

Each engine trains for --steps steps in processes of its own, one for each GPU, under native,
under ours and under native again. Everything repeats as far as PyTorch can make it: data and
weights have seeds, and deterministic algorithms are asked for.

  ddp              a Llama of 1.2 B parameters, bf16 autocast, AdamW in float32
  fsdp2            the same with fully_shard, bf16 weights and float32 reduction; also with
                   automatic uses and without what FSDP2 keeps for other streams
  tensor_parallel  perceptrons of 1.1 B parameters, split by columns and rows, in bf16; also
                   with all memory registered with NCCL

A step of the first two has 2 sequences for each GPU, all of one length: a multiple of 64 from
--shortest to 2,048. The lengths have a seed.

  losses    the largest relative difference from native's. Goal: at most twice that of native
            run again, so none where native repeats bit for bit
  tokens    of both GPUs, a second, after the first tenth of the steps (goal: 0.99 of native's,
            the mean of its runs before and after ours)
  memory    peak reserved of the GPU that has more (goal: 0.95 of native's, or 1.02 of what is
            live where native has no more than that to spare)

Allow half a minute for each variant. One is left out where --seconds leaves less than the longest
variant of its engine took.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import workloads
from common import (
    NATIVE,
    OURS,
    ROOT,
    Case,
    Results,
    Rounds,
    WorkerFailed,
    choose_allocator,
    gpu_missing,
    machine,
    memory_figures,
    parser,
    report,
    run_worker,
)

if TYPE_CHECKING:
    import torch

AGAIN = "native, run again"
BARE = "esper_alloc, automatic uses, nothing kept"
REGISTERED, NATIVE_REGISTERED = "esper_alloc, registered", "native, registered"
RANKS = 2
SEQUENCES = 2  # of a step, for each GPU
PATIENCE_S = 180.0  # for one variant
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
#: Nothing here is multicast, whatever the machine offers.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
#: NCCL registers each segment of PyTorch's allocator as it comes.
REGISTER = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
LARGE = workloads.Shape(width=2048, layers=16, heads=16, hidden=8192)
GOAL_TOKENS, GOAL_PEAK, GOAL_LIVE = 0.99, 0.95, 1.02

#: Enqueues a step and gives its loss, by its number.
Step = Callable[[int], "torch.Tensor"]


# --- the measuring side ------------------------------------------------------


def lengths(steps: int, shortest: int, longest: int) -> list[int]:
    """Of the sequences of each step: multiples of 64, or of 8 where all are short."""
    draw = random.Random(11)
    unit = 64 if longest >= 512 else 8
    shortest = min(max(shortest // unit, 1) * unit, longest)
    return [draw.randrange(shortest, longest + 1, unit) for _ in range(steps)]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain parameters and those that are DTensors in groups of their own, as fused kernels ask."""
    import torch
    from torch.distributed.tensor import DTensor

    groups: dict[bool, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


def llama_step(options: argparse.Namespace, rank: int) -> tuple[Step, int]:
    """A step of ddp or fsdp2, and the tokens of all steps that are timed."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    workloads.DEVICE = options.device
    shape = workloads.SMALL if options.small else LARGE
    model: torch.nn.Module = workloads.llama(shape).train()
    if options.engine[0] == "ddp":
        ids = [rank] if options.device == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if options.bare:
            sys.path.insert(0, str(ROOT / "examples"))
            importlib.import_module("fsdp2").keep_nothing(model)
    optimizer = adam(model)
    schedule = lengths(options.steps, options.shortest, shape.longest)
    torch.manual_seed(100 + rank)  # other data everywhere
    tokens = torch.randint(shape.vocabulary, (16, SEQUENCES, shape.longest), device=options.device)

    def step(number: int) -> torch.Tensor:
        ids = tokens[number % len(tokens), :, : schedule[number]]
        with torch.autocast(
            options.device, dtype=torch.bfloat16, enabled=options.engine[0] == "ddp"
        ):
            logits = model(ids)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, RANKS * SEQUENCES * sum(schedule[untimed(options.steps) :])


def tensor_parallel_step(options: argparse.Namespace, rank: int) -> tuple[Step, int]:
    """Residual perceptrons, the first layer of each split by columns, the second by rows."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn import functional

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
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
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


def measure(options: argparse.Namespace) -> None:
    """One rank of a variant. The first one reports."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with torchrun, which may be stopped
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    if options.device == "cuda":
        choose_allocator(options.worker)  # before anything touches the GPU
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo", timeout=timedelta(seconds=PATIENCE_S)
    )
    # Not warn_only: then the backward of flash attention would not repeat.
    torch.use_deterministic_algorithms(True)
    # Fresh memory is not filled: that would be work which no job has.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # cuDNN's attention does not repeat.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)  # the same model everywhere
    make = tensor_parallel_step if options.engine[0] == "tensor_parallel" else llama_step
    step, tokens = make(options, rank)

    def settle() -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    begin = 0.0
    losses = []
    for number in range(options.steps):
        if number == untimed(options.steps):
            begin = settle()
        losses.append(step(number))
    took = settle() - begin
    figures = memory_figures() if options.device == "cuda" else {}
    sums = torch.stack(losses).double()
    dist.all_reduce(sums)
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, figures)
    if rank == 0:
        figures = {key: max(one[key] for one in everywhere) for key in figures}
        about = machine() if options.device == "cuda" else {"gpu": "none"}
        report({
            "machine": {**about, "gpu": f"{RANKS} x {about['gpu']}"},
            "tokens_s": tokens / took,
            "losses": [loss / RANKS for loss in sums.tolist()],
            **figures,
        })  # fmt: skip
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of DDP and of gloo may end the way out by a signal


# --- the conducting side -----------------------------------------------------


def cases_of(engine: str, arguments: Sequence[str]) -> list[Case]:
    """The variants of an engine; native first, so that losses can be compared as they come."""

    def case(name: str, allocator: str, more: Sequence[str] = (), **env: str) -> Case:
        how = ("--engine", engine, *arguments, *more)
        return Case(name, allocator, how, {**DETERMINISTIC, **NO_MULTICAST, **env})

    cases = [case(NATIVE, NATIVE), case(OURS, OURS)]
    if engine == "fsdp2":
        cases.append(case(BARE, OURS, ["--bare"], ESPER_ALLOC_USES="automatic"))
    cases.append(case(AGAIN, NATIVE))
    if engine == "tensor_parallel":
        cases.append(case(NATIVE_REGISTERED, NATIVE, **REGISTER))
        cases.append(case(REGISTERED, OURS, **REGISTER))
    return cases


def measure_cases(
    cases: Sequence[Case], rounds: int, end: float, each: Callable[[Rounds], object] | None = None
) -> Rounds:
    """What each case's ranks reported, by case, for each round. `each` is told after every
    case what there is so far."""
    measured: Rounds = []
    longest = 0.0
    for turn in range(rounds):
        measured.append({})
        for case in cases:
            begin = time.monotonic()
            if end - begin < longest:
                print(f"round {turn + 1}: {case.name}: left out, no time is left", flush=True)
                continue
            try:
                found = run_worker(
                    __file__, case.allocator, case.args, PATIENCE_S, case.environment
                )
            except WorkerFailed as error:
                print(f"round {turn + 1}: {case.name}: {error}", flush=True)
                continue
            measured[-1][case.name] = found
            took = time.monotonic() - begin
            longest = max(longest, took)
            print(
                f"round {turn + 1}: {case.name}: {found['tokens_s']:.0f} tokens/s, last loss "
                f"{found['losses'][-1]:.6f}; measured in {took:.1f} s",
                flush=True,
            )
            if each:
                each(measured)
    return measured


def deviation(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def peak_goal(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Of ours over native's: see the head of this file."""
    natives = [one[NATIVE] for one in rounds if NATIVE in one]
    return max(
        (max(GOAL_PEAK, GOAL_LIVE * one["peak_allocated_mib"] / one["peak_reserved_mib"])
         for one in natives if "peak_reserved_mib" in one),
        default=GOAL_PEAK,
    )  # fmt: skip


def before_and_after(one: Mapping[str, Any]) -> dict[str, Any]:
    """The round, with the mean of native's two runs as its tokens: where the host sets the pace,
    they differ by as much as a fifth."""
    runs = [one[name]["tokens_s"] for name in (NATIVE, AGAIN) if "tokens_s" in one.get(name, {})]
    if len(runs) < 2:
        return dict(one)
    return {**one, NATIVE: {**one[NATIVE], "tokens_s": statistics.fmean(runs)}}


def add_rows(results: Results, engine: str, rounds: Sequence[Mapping[str, Any]]) -> None:
    again = [
        deviation(one[AGAIN]["losses"], one[NATIVE]["losses"])
        for one in rounds
        if NATIVE in one and AGAIN in one
    ]
    variants = {OURS: engine}
    variants |= {BARE: f"{engine}, automatic uses, nothing kept"} if engine == "fsdp2" else {}
    variants |= {REGISTERED: f"{engine}, registered"} if engine == "tensor_parallel" else {}
    for name, title in variants.items():
        ours = [
            deviation(one[name]["losses"], one[NATIVE]["losses"])
            for one in rounds
            if NATIVE in one and name in one
        ]
        results.row(
            f"{title}: losses, largest relative difference from native's", "", ours, again, AGAIN,
            max(again, default=0.0), "difference",
        )  # fmt: skip
        peer = NATIVE_REGISTERED if name == REGISTERED else NATIVE
        judged = name != BARE  # for which no peer does the same
        results.compare(
            f"{title}: tokens", "tokens/s", list(map(before_and_after, rounds)), "tokens_s", name, peer,
            GOAL_TOKENS if judged else None, "at_least",
        )  # fmt: skip
        if not any("peak_reserved_mib" in one.get(name, {}) for one in rounds):
            continue
        results.compare(
            f"{title}: peak reserved", "MiB", rounds, "peak_reserved_mib", name, peer,
            peak_goal(rounds) if judged else None,
        )  # fmt: skip
        results.compare(f"{title}: peak allocated", "MiB", rounds, "peak_allocated_mib", name, peer)


def add_engine(results: Results, engine: str, cases: Sequence[str], rounds: Rounds) -> None:
    for case in cases:
        if not any(case in one for one in rounds):
            print(f"{engine}: {case} was not measured")
            results.complete = False
    add_rows(results, engine, rounds)


ENGINES = ("ddp", "fsdp2", "tensor_parallel")


def torchrun() -> None:
    """Becomes torchrun, which starts this command once for each GPU."""
    command = "-m torch.distributed.run --standalone --nproc-per-node".split()
    os.execv(
        sys.executable,
        [sys.executable, *command, str(RANKS), str(Path(__file__).resolve()), *sys.argv[1:]],
    )


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    why = gpu_missing()
    if why:
        return why
    import torch

    count = torch.cuda.device_count()
    return None if count >= RANKS else f"{RANKS} GPUs are needed, and there is {count}"


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=1)
    arguments.add_argument("--engine", choices=ENGINES, action="append", help="default: all")
    arguments.add_argument("--steps", type=int, default=200, help="of each variant, default: 200")
    arguments.add_argument("--shortest", type=int, default=1024, help="sequence, default: 1024")
    arguments.add_argument("--small", action="store_true", help="tiny models: to try the script")
    arguments.add_argument("--cpu", action="store_true", help="without a GPU: to try the script")
    arguments.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.steps < 2:
        arguments.error("--steps: one step is not timed, so there must be two")
    if options.cpu and not (options.out or options.worker):
        arguments.error("--cpu: these are no results to keep, so name a file with --out")
    options.device = "cpu" if options.cpu else "cuda"
    options.small |= options.cpu
    if options.worker:
        if "RANK" in os.environ:
            measure(options)
        else:
            torchrun()
        return 0
    why = None if options.cpu else missing()
    if why:
        print(f"nothing can be measured: {why}")
        return 1
    end = time.monotonic() + options.seconds
    how = ["--steps", str(options.steps), "--shortest", str(options.shortest)]
    how += ["--small"] * options.small + ["--cpu"] * options.cpu
    results = Results("engines", options.out)
    complete = True
    for engine in options.engine or ENGINES:
        cases = cases_of(engine, how)
        if results.of_rounds(
            partial(measure_cases, cases, options.rounds, end),
            partial(add_engine, results, engine, [case.name for case in cases]),
        ):
            complete = results.save() and complete
        else:
            complete = False
    if results.run is None:
        print("nothing was measured under esper_alloc")
    return 0 if complete and results.run is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
