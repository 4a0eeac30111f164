"""torch.cuda.MemPool on esper_alloc: graphs, NCCL, addresses. What a program sees of pools
and their options is in conformance/pools.py."""

from typing import Any

import pytest
from helper import run_python
from scenario import NATIVE, OURS, run_program
from test_shim import TOGETHER

MiB = 1 << 20


def ours(name: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    return run_program("mem_pools", OURS, name, env=env)


def both(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return ours(name), run_program("mem_pools", NATIVE, name)


def test_empty_cache_in_a_capture_leaves_the_default_pool_alone() -> None:
    here, native = both("empty_cache_in_a_capture")
    assert here == native
    assert here["wrong"] == 0 and here["inside"] and here["after"] <= 0


def test_graphs_share_a_mem_pool() -> None:
    here, native = both("graphs_share_a_mem_pool")
    assert here == native
    assert here["wrong"] == 0 and here["left"] == 0


@pytest.mark.parametrize("kind", ["", "mapped"])
def test_nccl_registers_a_pool(kind: str) -> None:
    native = run_program("mem_pools", NATIVE, "registered_with_nccl")
    found = ours("registered_with_nccl", {"ESPER_ALLOC_SEGMENTS": kind})
    assert found["wrong"] == native["wrong"] == 0
    assert found["left"] == native["left"]
    if not kind:
        assert found == native


def test_addresses_repeat_from_run_to_run() -> None:
    runs = [ours("addresses") for _ in range(4)]
    assert all(run == runs[0] for run in runs[1:])
    assert len(runs[0]["places"]) > 150


# Where CUDA is initialised already, as in a notebook


def test_a_mem_pool_over_this_allocator_beside_pytorchs_own() -> None:
    run_python(
        TOGETHER
        + """
import gc
import torch
before = torch.ones(1 << 20, device="cuda")  # CUDA is initialised
import esper_alloc
assert not esper_alloc.is_enabled()
pool = torch.cuda.MemPool(esper_alloc.allocator().allocator())
side = torch.cuda.Stream()
with torch.no_grad(), torch.cuda.use_mem_pool(pool):
    for i in range(20):
        x = torch.full((1 << 22,), i, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(1e7))
            seen = (x == i).all()
        esper_alloc.record_use(x, side)
        del x
        over = torch.full((1 << 22,), -1, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert seen.item(), i
        del over, seen
held = sum(s["total_size"] for s in pool.snapshot())
assert held > 0
del pool
gc.collect()
torch.cuda.empty_cache()
assert (before == 1).all()
"""
    )
