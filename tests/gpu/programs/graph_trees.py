"""torch.compile(mode="reduce-overhead"): trees of CUDA graphs that share one pool.

Usage: graph_trees.py ALLOCATOR SCENARIO

Each scenario compares what graphs compute with the same in eager mode, and says
how often PyTorch put a checkpoint of the pool back, which graphs it skipped, and
how much memory it took.
"""

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from device import Scenarios, report, use_allocator

N = 512
scenario = Scenarios()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)


def new_step() -> None:
    torch.compiler.cudagraph_mark_step_begin()


def square(seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.rand(N, N, device="cuda", generator=generator) / N


def differ(got: Any, expected: Any) -> bool:
    if isinstance(got, torch.Tensor):
        got, expected = (got,), (expected,)
    return any(
        not torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(got, expected)
    )


def figure(tensors: Any) -> float:
    """One number that says whether two runs computed the same."""
    if isinstance(tensors, torch.Tensor):
        tensors = (tensors,)
    return float(sum(t.double().abs().sum().item() for t in tensors))


def use_other_memory(seed: int) -> None:
    """Everything that the default pool can have is written over, and given back."""
    kept = [
        torch.full((size,), float("nan"), device="cuda")
        for size in (1000, 100_000, N * N, 2 * N * N, 5_000_000)
        for _ in range(1 + seed % 3)
    ]
    torch.cuda.synchronize()
    del kept
    gc.collect()
    torch.cuda.empty_cache()


# One function


@scenario
def training() -> dict[str, Any]:
    losses: dict[bool, list[float]] = {}
    parameters: dict[bool, float] = {}
    peak = 0
    for graphs in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(N, 4 * N),
            torch.nn.ReLU(),
            torch.nn.Linear(4 * N, 4 * N),
            torch.nn.ReLU(),
            torch.nn.LayerNorm(4 * N),
            torch.nn.Linear(4 * N, 16),
        ).cuda()
        run = compiled(model) if graphs else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        losses[graphs] = []
        for i in range(20):
            if i == 8:
                torch.cuda.reset_peak_memory_stats()
            x = square(i)
            target = torch.arange(N, device="cuda") % 16
            new_step()
            loss = torch.nn.functional.cross_entropy(run(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses[graphs].append(loss.item())
            del loss
        parameters[graphs] = figure([p.detach() for p in model.parameters()])
        if graphs:
            peak = torch.cuda.max_memory_reserved()
        else:
            del model, optimizer, run
            gc.collect()
            torch.cuda.empty_cache()
    wrong = sum(abs(a - b) > 1e-3 * abs(a) for a, b in zip(losses[False], losses[True]))
    wrong += abs(parameters[False] - parameters[True]) > 1e-3 * parameters[False]
    return {"wrong": wrong, "figures": losses[True], "peak": peak}


# Several functions: a path through the tree for each order of calls


def first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2 + 1, (x @ x).relu()


def second(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return y @ z - 1


def third(y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (y + z).sin(), y - z


def fourth(y: torch.Tensor) -> torch.Tensor:
    return y.cos() + y


@scenario
def live_outputs() -> dict[str, Any]:
    """All outputs of a path stay alive until its end, whatever was recorded after."""
    one, two, three, four = (compiled(f) for f in (first, second, third, fourth))
    wrong, figures = 0, []
    with torch.no_grad():
        for i in range(24):
            x = square(i)
            a0, b0 = first(x)
            new_step()
            a, b = one(x)
            path = i % 4
            got: list[torch.Tensor] = []
            expected: list[torch.Tensor] = []
            if path in (0, 3):
                got.append(two(a, b))
                expected.append(second(a0, b0))
            if path in (1, 3):
                got.extend(three(a, b))
                expected.extend(third(a0, b0))
            if path == 2:
                got.append(four(b))
                expected.append(fourth(b0))
                got.append(two(got[0], a))
                expected.append(second(expected[0], a0))
            wrong += differ([a, b, *got], [a0, b0, *expected])
            figures.append(figure([a, b, *got]))
            del a, b, got
            use_other_memory(i)
    return {"wrong": wrong, "figures": figures}


@scenario
def dying_tensors() -> dict[str, Any]:
    """Outputs die at different points of the path: each way is a recording of its own."""
    one, three, four = (compiled(f) for f in (first, third, fourth))
    wrong, figures = 0, []
    with torch.no_grad():
        for i in range(24):
            x = square(i)
            a0, b0 = first(x)
            new_step()
            a, b = one(x)
            if i % 4 == 0:
                del a
                got, expected = [four(b)], [fourth(b0)]
            elif i % 4 == 1:
                del b
                got, expected = [four(a)], [fourth(a0)]
            elif i % 4 == 2:
                c, d = three(a, b)
                del a, c
                got, expected = [four(d), d], [fourth(third(a0, b0)[1]), third(a0, b0)[1]]
            else:
                c, d = three(a, b)
                del b, d
                got, expected = [four(c), a], [fourth(third(a0, b0)[0]), a0]
            wrong += differ(got, expected)
            figures.append(figure(got))
            use_other_memory(i)
    return {"wrong": wrong, "figures": figures}


# Beside a tree


@scenario
def marks_beside() -> dict[str, Any]:
    """An output is read on a side stream that is marked, and dropped while it is read."""
    import esper_alloc

    one, two = compiled(first), compiled(second)
    side = torch.cuda.Stream()
    wrong, figures = 0, []
    with torch.no_grad():
        for i in range(16):
            x = square(i)
            new_step()
            a, b = one(x)
            with esper_alloc.using(a, stream=side):
                torch.cuda._sleep(2_000_000)
                seen = a.clone()
            if i % 2:
                c = two(b, b)
                del c
            del a, b
            torch.cuda.current_stream().wait_stream(side)
            wrong += differ(seen, first(x)[0])
            figures.append(figure(seen))
            del seen
    return {"wrong": wrong, "figures": figures}


@scenario
def reset_and_again() -> dict[str, Any]:
    """All trees go, and their memory with them; then everything is recorded anew."""
    wrong, kept = 0, []
    with torch.no_grad():
        for _ in range(3):
            torch._dynamo.reset()
            one, two = compiled(first), compiled(second)
            for i in range(6):
                x = square(i)
                new_step()
                a, b = one(x)
                c = two(a, b)
                a0, b0 = first(x)
                wrong += differ([a, b, c], [a0, b0, second(a0, b0)])
                del a, b, c, a0, b0
            torch.cuda.synchronize()
            torch._dynamo.reset()
            torch._inductor.cudagraph_trees.reset_cudagraph_trees()
            del one, two, x
            gc.collect()
            torch.cuda.empty_cache()
            in_pools = sum(
                s["total_size"]
                for s in torch.cuda.memory_snapshot()
                if tuple(s["segment_pool_id"]) != (0, 0)
            )
            kept.append(in_pools)
    return {"wrong": wrong + sum(k > 0 for k in kept), "kept": kept, "figures": []}


def checkpoints() -> int:
    """How often this process put a checkpoint back."""
    return int(restores[0])


restores = [0]


def count_restores() -> None:
    original = torch._C._cuda_setCheckpointPoolState

    def counted(*arguments: Any) -> Any:
        restores[0] += 1
        return original(*arguments)

    torch._C._cuda_setCheckpointPoolState = counted


def main(allocator: str, name: str) -> None:
    use_allocator(allocator)
    import torch._inductor.cudagraph_trees
    from torch._dynamo.utils import counters
    from torch._inductor import config

    # Checks of PyTorch's own after every step: the pool's live memory is what the
    # tree believes it to be.
    config.triton.slow_path_cudagraph_asserts = True
    config.triton.fast_path_cudagraph_asserts = True
    count_restores()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
        found = scenario[name]()
    torch.cuda.synchronize()
    report(
        **{"peak": torch.cuda.max_memory_reserved(), **found},
        restores=checkpoints(),
        skips=int(counters["inductor"]["cudagraph_skips"]),
        ooms=torch.cuda.memory_stats()["num_ooms"],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
