"""torch.cuda.MemPool on esper_alloc: allocators of their own, flags, life, shortage."""

from __future__ import annotations

from typing import Any

import pytest
from helper import run_python
from scenario import NATIVE, OURS, run_program
from test_shim import ENABLE, TOGETHER

MiB = 1 << 20


def ours(name: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    return run_program("mem_pools", OURS, name, env=env)


def both(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return ours(name), run_program("mem_pools", NATIVE, name)


def test_an_allocator_of_its_own() -> None:
    here, native = both("own_allocator")
    assert here == native
    assert here["wrong"] == 0 and here["user_pool"]
    assert here["obtained"] == [2 * MiB, 20 * MiB]
    assert here["left"] == here["kept"] == 0


def test_what_is_read_is_not_given_back_to_it() -> None:
    found = ours("own_allocator_with_uses")
    assert found["wrong"] == 0
    assert found["given_back_while_busy"] == 0 == found["left"]


def test_an_allocator_that_has_no_more() -> None:
    found = ours("own_allocator_has_no_more")
    assert found["wrong"] == 0 and found["refused"]


@pytest.mark.parametrize(
    ("kind", "segments"),
    [
        ("classic", [[2 * MiB, 1], [20 * MiB, 1], [20 * MiB, 1]]),
        ("mapped", [[2 * MiB, 1], [8 * MiB, 2]]),  # two pages for each 3 MiB, nothing cut off
    ],
)
def test_no_split(kind: str, segments: list[list[int]]) -> None:
    assert ours("no_split", {"ESPER_ALLOC_SEGMENTS": kind})["blocks"] == segments


def test_use_on_oom() -> None:
    found = ours("use_on_oom")
    assert found == {"wrong": 0, "live_refused": True, "served": True, "refused": True}


def test_nesting_and_threads() -> None:
    here, native = both("nesting_and_threads")
    assert here == native
    assert here == {"wrong": 0, "counts": [1, 1]}


def test_empty_cache_inside_leaves_the_default_pool_alone_where_native_does() -> None:
    here, native = both("empty_cache_inside")
    assert here == native
    assert here["inside"] in (0, 30 * MiB) and here["after"] == 0


def test_empty_cache_in_a_capture_leaves_the_default_pool_alone() -> None:
    here, native = both("empty_cache_in_a_capture")
    assert here == native
    assert here["wrong"] == 0 and here["inside"] and here["after"] <= 0


def test_figures_of_pools() -> None:
    here, native = both("figures_of_pools")
    assert here == native


def test_graphs_share_a_mem_pool() -> None:
    here, native = both("graphs_share_a_mem_pool")
    assert here == native
    assert here["wrong"] == 0 and here["left"] == 0


def test_out_of_memory_inside_pools_and_captures() -> None:
    here, native = both("out_of_memory")
    assert here["wrong"] == 0
    assert here["refused"] == native["refused"] == [True, True, True]
    assert here["ooms"] == native["ooms"] == 3


def test_memory_in_hand_is_waited_for() -> None:
    found = ours("memory_in_hand")
    assert found == {"wrong": 0, "refused": 0}


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


# The end of a process

KEPT = """
x = torch.ones(1 << 20, device="cuda")
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    inside = x + 1
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    y = x * 2
graph.replay()
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.modules['kept_for_good'] = (graph, y, pool)",
        "graph.reset()",
        "del pool; gc.collect()",
        "del graph, y; gc.collect()",
        "import atexit; atexit.register(graph.reset)",
        "import atexit; atexit.register(lambda: torch.cuda.empty_cache())",
        "graph.replay(); os._exit(0)",
        "threading.Thread(target=lambda: [graph.replay() for _ in range(1000)]).start()",
    ],
)
def test_a_process_with_a_live_graph_ends_quietly(end: str) -> None:
    assert run_python(TOGETHER + ENABLE + KEPT + end) == ""


@pytest.mark.parametrize("name", ["use_mem_pool(pool)", "graph(torch.cuda.CUDAGraph())"])
def test_an_exception_leaves_the_pool(name: str) -> None:
    run_python(
        TOGETHER
        + ENABLE
        + f"""
x = torch.ones(1 << 20, device="cuda")
pool = torch.cuda.MemPool()
main = torch.cuda.current_stream()
for _ in range(40):  # more than pools that may be open at once
    try:
        with torch.cuda.{name}:
            y = x + 1
            raise KeyError
    except KeyError:
        pass
torch.cuda.set_stream(main)
assert pool.use_count() == 1
y = x + 1
address = y.data_ptr()
(found,) = [s for s in torch.cuda.memory_snapshot()
            if s["address"] <= address < s["address"] + s["total_size"]]
assert tuple(found["segment_pool_id"]) == (0, 0)
assert (y == 2).all()
"""
    )


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
