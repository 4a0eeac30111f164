"""Where CUDA is initialised already, as in a notebook: a MemPool of PyTorch's own allocator
over this one, on the simulated device."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from on_sim import build

BEGIN = """
import gc, simulated, torch, esper_alloc
MiB = 1 << 20
before = torch.empty(MiB, device="cuda")  # CUDA is in use, by PyTorch's own allocator
side = torch.cuda.Stream()

def memory(mebibytes=3):
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device="cuda")

def segments(pool):
    return [(s["address"], s["total_size"]) for s in pool.snapshot()]

pool = torch.cuda.MemPool(esper_alloc.allocator().allocator())
assert not esper_alloc.is_enabled()
"""


@pytest.fixture
def run(library: Path) -> Callable[[str], None]:
    """Runs code behind the beginning, which must succeed and be silent."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ESPER_", "PYTORCH_"))}
    env = {**kept, **build.environment(library), "ESPER_SIMULATED_ALLOCATOR": "native"}

    def run(code: str) -> None:
        done = build.program(BEGIN + code, env)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr

    return run


def test_segments_come_from_here_and_go_back(run: Callable[[str], None]) -> None:
    run("""
with torch.cuda.use_mem_pool(pool):
    x, y = memory(), memory(30)
outside = memory(30)
of_core = simulated.core_segments()
assert sorted(of_core) == sorted(segments(pool)) and len(of_core) == 2, of_core
assert x.data_ptr() in [address for address, _ in of_core]
assert outside.data_ptr() not in [address for address, _ in of_core]
del x, y, pool
gc.collect()
assert simulated.core_live() == 0
assert simulated.core_is_valid()
assert torch.cuda.memory_reserved() == (20 + 30) * MiB
""")


def test_marks_protect_as_record_stream_does(run: Callable[[str], None]) -> None:
    run("""
def memory_of_the_pool():
    with torch.cuda.use_mem_pool(pool):
        return memory()

def check(place):
    other = memory_of_the_pool()
    assert other.data_ptr() != place  # the side stream is still at work
    simulated.time_passes()
    outside = memory()  # PyTorch's allocator looks, now that the pool is not in use
    x = memory_of_the_pool()
    assert x.data_ptr() == place
    return x

with torch.no_grad():
    x = memory_of_the_pool()
    place = x.data_ptr()
    simulated.work(side)
    esper_alloc.record_use(x, side)
    simulated.work(side)  # held for this, too: it is not precise here
    del x
    x = check(place)
    with esper_alloc.using(x, stream=side):
        simulated.work(side)
    del x
    x = check(place)

    # Inside the block nothing that was read elsewhere is used again.
    with torch.cuda.use_mem_pool(pool):
        simulated.work(side)
        esper_alloc.record_use(x, side)
        del x
        others = [memory() for _ in range(10)]
    assert place not in [other.data_ptr() for other in others]
simulated.time_passes()
""")


def test_the_end_comes_in_any_order(run: Callable[[str], None]) -> None:
    run("""
import sys
with torch.cuda.use_mem_pool(pool):
    x = memory()
sys.modules["kept_for_good"] = (pool, x, side)
simulated.work(side)
x.record_stream(side)
""")
