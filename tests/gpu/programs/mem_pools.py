"""torch.cuda.MemPool and private pools of graphs.

Usage: mem_pools.py ALLOCATOR SCENARIO
"""

import gc
import random
import sys
import tempfile
import time
from typing import Any

import torch
from device import OURS, Scenarios, report, use_allocator

MiB = 1 << 20
scenario = Scenarios()


def memory(mebibytes: float) -> torch.Tensor:
    return torch.empty(int(mebibytes * MiB), dtype=torch.uint8, device="cuda")


def wrong_elements(x: torch.Tensor, value: float) -> int:
    """How many elements of `x` are not `value`, counted on the host: there may be no
    memory left to compare in.
    """
    torch.cuda.synchronize()
    return int((x.cpu() != value).sum())


def segments(pool: Any = None) -> list[dict[str, Any]]:
    every = torch.cuda.memory_snapshot()
    return [s for s in every if pool is None or tuple(s["segment_pool_id"]) == tuple(pool.id)]


def reserved() -> int:
    return int(torch.cuda.memory_stats()["reserved_bytes.all.current"])


# Graphs


@scenario
def empty_cache_in_a_capture() -> dict[str, Any]:
    """The default pool's cache stays, and serves on; after a capture that failed it
    goes again."""
    x = torch.ones(MiB, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # PyTorch keeps a state for captures
        x.add_(0)
    graph.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = reserved()
    cached = memory(30)
    del cached
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch.cuda.graph would empty the cache before
        graph.capture_begin()
        y = x * 3
        torch.cuda.empty_cache()
        inside = reserved() - base >= 30 * MiB
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    x.fill_(5)
    graph.replay()
    wrong = wrong_elements(y, 15) > 0
    graph.reset()
    del y, graph
    main = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise KeyError
    except KeyError:
        pass
    torch.cuda.set_stream(main)
    gc.collect()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        pass
    torch.cuda.empty_cache()
    return {"wrong": wrong, "inside": inside, "after": reserved() - base}


@scenario
def graphs_share_a_mem_pool() -> dict[str, Any]:
    """Two graphs and eager work in one MemPool; graphs go one after the other."""
    pool = torch.cuda.MemPool()
    x = torch.ones(MiB, dtype=torch.int32, device="cuda")
    outs = []
    graphs = []
    wrong = 0
    with torch.cuda.use_mem_pool(pool):
        eager = x * 5
    for k in (2, 3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.id):
            temporary = x + k
            outs.append(temporary * k)
            del temporary
        graphs.append(graph)
    counts = pool.use_count()
    for value in range(4):
        x.fill_(value)
        for graph in graphs:
            graph.replay()
        wrong += wrong_elements(outs[0], (value + 2) * 2) > 0
        wrong += wrong_elements(outs[1], (value + 3) * 3) > 0
        torch.cuda.empty_cache()
    wrong += wrong_elements(eager, 5) > 0
    graphs[0].reset()
    torch.cuda.empty_cache()
    x.fill_(9)
    graphs[1].replay()
    wrong += wrong_elements(outs[1], 36) > 0
    graphs[1].reset()
    after = pool.use_count()
    del outs, eager, pool, graphs, graph
    gc.collect()
    torch.cuda.empty_cache()
    left = sum(s["total_size"] for s in segments() if tuple(s["segment_pool_id"]) != (0, 0))
    return {"wrong": wrong, "counts": counts, "after": after, "left": left}


# NCCL


@scenario
def registered_with_nccl() -> dict[str, Any]:
    """A pool's segments are registered in the order of their birth, those that come later
    when they come, and those that go leave the registration."""
    import torch.distributed as dist

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{file.name}",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0),
        )
        gpu = torch.device("cuda", 0)
        backend = dist.group.WORLD._get_backend(gpu)
        wrong, kinds = 0, []
        # NCCL's own memory needs multicast, which a machine of one GPU may not offer.
        own = [backend.mem_allocator] if backend.supports_tensor_alloc(gpu) else []
        for allocator in (None, *own):
            pool = torch.cuda.MemPool(allocator) if allocator else torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                early = [memory(30).fill_(1), memory(0.5).fill_(2)]
            backend.register_mem_pool(pool)
            with torch.cuda.use_mem_pool(pool):
                late = [memory(40).fill_(3), memory(3).fill_(4)]
            for value, x in enumerate(early + late, 1):
                dist.all_reduce(x)
                wrong += wrong_elements(x, value)
            del x
            kinds.append([s["is_expandable"] for s in segments(pool)])
            del early
            backend.deregister_mem_pool(pool)
            late.clear()
            del pool
        torch.cuda.empty_cache()
        left = reserved()
        dist.destroy_process_group()
    return {"wrong": wrong, "expandable": kinds, "left": left}


# Addresses


@scenario
def addresses() -> dict[str, Any]:
    """The places of a random program's tensors in a MemPool. What differs from run to
    run are the delays of the host and of the stream."""
    program, delays = random.Random(7), random.SystemRandom()
    pool = torch.cuda.MemPool()
    live: list[torch.Tensor] = []
    bases: list[int] = []
    places: list[list[int]] = []
    with torch.no_grad(), torch.cuda.use_mem_pool(pool):
        for _ in range(400):
            if live and program.random() < 0.5:
                torch.cuda._sleep(delays.randrange(1, 300_000))
                del live[program.randrange(len(live))]
            else:
                x = memory(program.choice((0.01, 0.3, 1, 2, 3, 5, 12, 30)))
                known = [i for i, base in enumerate(bases) if 0 <= x.data_ptr() - base < 64 * MiB]
                found = [s["address"] for s in segments(pool)]
                base = max(address for address in found if address <= x.data_ptr())
                if base not in bases:
                    bases.append(base)
                del known
                places.append([bases.index(base), x.data_ptr() - base])
                live.append(x)
                del x
            if delays.random() < 0.1:
                time.sleep(delays.random() / 500)
            if delays.random() < 0.05:
                torch.cuda.synchronize()
    return {"wrong": 0, "places": places, "reserved": sum(s["total_size"] for s in segments(pool))}


def main(allocator: str, name: str) -> None:
    use_allocator(allocator)
    with torch.no_grad():
        found = scenario[name]()
    torch.cuda.synchronize()
    report(**found)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [OURS]))
