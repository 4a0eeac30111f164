"""torch.compile(mode="reduce-overhead") on esper_alloc: PyTorch's trees of CUDA graphs.

Each scenario runs in a process of its own, on PyTorch's allocator and on this one.
"""

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from helper import run_python
from scenario import NATIVE, OURS, once, run_program
from test_shim import ENABLE, TOGETHER

#: Those in which a function is recorded after another one was replayed.
WITH_CHECKPOINTS = ["live_outputs", "dying_tensors"]
ALONE = ["training", "reset_and_again"]
#: Reserved bytes, ours over native's; and what a segment more or less may cost.
MOST, SLACK = 1.02, 22 << 20


def run(allocator: str, name: str) -> dict[str, Any]:
    # Whoever compiles first also measures candidates, which takes memory: so both compile.
    with tempfile.TemporaryDirectory() as cache:
        return run_program("graph_trees", allocator, name, env={"TORCHINDUCTOR_CACHE_DIR": cache})


@once
def ahead() -> dict[tuple[str, str], Future[dict[str, Any]]]:
    """The programs that are run at the same time where the tests are, too: all of them
    under pytest-xdist, else none."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return {}
    jobs = [(allocator, name) for name in WITH_CHECKPOINTS + ALONE for allocator in (OURS, NATIVE)]
    pool = ThreadPoolExecutor(5)
    return {job: pool.submit(run, *job) for job in jobs}


@once
def found(allocator: str, name: str) -> dict[str, Any]:
    started = ahead().get((allocator, name))
    return started.result() if started else run(allocator, name)


@pytest.mark.parametrize("name", WITH_CHECKPOINTS + ALONE)
def test_graphs_compute_what_eager_mode_does(name: str) -> None:
    assert found(OURS, name)["wrong"] == 0, found(OURS, name)


@pytest.mark.parametrize("name", WITH_CHECKPOINTS + ALONE)
def test_native_computes_the_same(name: str) -> None:
    ours, native = found(OURS, name), found(NATIVE, name)
    assert native["wrong"] == 0, native
    assert ours["figures"] == pytest.approx(native["figures"], rel=1e-5)


@pytest.mark.parametrize("name", WITH_CHECKPOINTS + ALONE)
def test_no_graph_is_skipped(name: str) -> None:
    assert found(OURS, name)["skips"] == found(OURS, name)["ooms"] == 0


@pytest.mark.parametrize("name", WITH_CHECKPOINTS)
def test_checkpoints_are_put_back_as_often_as_on_native(name: str) -> None:
    ours, native = found(OURS, name), found(NATIVE, name)
    assert ours["restores"] == native["restores"] > 0


@pytest.mark.parametrize("name", WITH_CHECKPOINTS + ALONE)
def test_memory_is_at_most_natives(name: str) -> None:
    ours, native = found(OURS, name), found(NATIVE, name)
    assert ours["peak"] <= MOST * native["peak"] + SLACK, (ours["peak"], native["peak"])


def test_a_mark_protects_an_output_beside_the_tree() -> None:
    assert found(OURS, "marks_beside")["wrong"] == 0
    assert found(OURS, "marks_beside")["skips"] == 0


PROGRAM = """
import torch._inductor.config
def f(x):
    return (x @ x).relu() + 1, x * 2
fast = torch.compile(f, mode="reduce-overhead", fullgraph=True)
with torch.no_grad():
    for i in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        kept = fast(torch.full((64, 64), float(i), device="cuda"))
torch.cuda.synchronize()
assert (kept[1] == 6).all()
"""


@pytest.mark.parametrize(
    "end",
    [
        "",  # with a tree and its outputs alive
        "sys.modules['kept_for_good'] = (kept, fast)",
        "del kept, fast; gc.collect(); torch.cuda.empty_cache()",
        "torch._dynamo.reset()",
    ],
    ids=["alive", "in a module", "dropped", "reset"],
)
def test_a_process_with_a_tree_ends_quietly(end: str) -> None:
    printed = run_python(TOGETHER + ENABLE + PROGRAM + end)
    assert "rror" not in printed and "Traceback" not in printed, printed
