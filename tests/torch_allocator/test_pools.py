"""PyTorch's private pools on esper_alloc, without a GPU.

The allocator runs over a driver made of nothing (``tests/device/fake_cuda.c``), and
what PyTorch asks of the CUDA runtime on its way there is answered by
``tests/shim/simulated.c``. Memory is numbers, so nothing is read or written.
"""

import functools
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from compilers import CC
from on_sim import build
from processes import ROOT

BEGIN = """
import ctypes, gc, os, sys, threading, warnings
import torch
import esper_alloc
from torch import _C

MiB = 1 << 20
OWN = os.environ["LD_PRELOAD"]
own = ctypes.CDLL(OWN)
class Pieces(ctypes.Structure):
    _fields_ = [("live", ctypes.c_int), ("calls", ctypes.c_int), ("strict", ctypes.c_int),
                ("bytes", ctypes.c_size_t)]
own.own_pieces.restype = Pieces
own.own_limit.argtypes = [ctypes.c_size_t]

def own_allocator():
    made = torch.cuda.memory.CUDAPluggableAllocator(OWN, "own_malloc", "own_free")
    return made.allocator()

def start():
    # There is no GPU whose runtime could be initialised.
    torch.cuda._lazy_init = lambda: None
    torch.cuda._initialized = True

def memory(size, device="cuda:0"):
    return torch.empty(size, dtype=torch.uint8, device=device)

def segment_of(mib):
    # Bytes that are taken for the first `mib` MiB of a pool.
    return (20 if os.environ["ESPER_ALLOC_SEGMENTS"] == "classic" else mib) * MiB

def segments(pool=(0, 0)):
    return _C._cuda_memorySnapshot(tuple(pool))["segments"]

def reserved(pool=None):
    return sum(s["total_size"] for s in segments()
               if pool is None or s["segment_pool_id"] == tuple(pool))

def refused(error, text, call, *arguments):
    try:
        call(*arguments)
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}")
"""
OURS = BEGIN + "esper_alloc.enable()\nstart()\n"


@pytest.fixture(scope="module")
def libraries(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that name the driver and the runtime."""
    driver = tmp_path_factory.mktemp("driver") / "libfake.so"
    flags = "-std=c11 -D_GNU_SOURCE -O1 -shared -fPIC -fvisibility=hidden -pthread".split()
    source = ROOT / "tests" / "device" / "fake_cuda.c"
    subprocess.run([*CC, *flags, str(source), "-o", str(driver)], check=True)
    return {"ESPER_ALLOC_LIBCUDA": str(driver), "LD_PRELOAD": str(library)}


Run = Callable[..., str]


def running(begin: str) -> Callable[..., Run]:
    """A fixture that runs code behind this beginning, with variables of its environment: what it
    printed."""

    @pytest.fixture
    def run(libraries: dict[str, str]) -> Run:
        return functools.partial(output_of, libraries, begin)

    return run


def output_of(libraries: dict[str, str], begin: str, scenario: str, **more: str) -> str:
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTORCH_", "ESPER_ALLOC"))
    }
    given = {**environment, **libraries, "PYTHONPATH": str(ROOT), **more}
    done = build.program(begin + textwrap.dedent(scenario), given)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


run = running(OURS)


@pytest.fixture(params=["classic", "mapped"])
def run_on_both_kinds(run: Run, request: pytest.FixtureRequest) -> Run:
    return functools.partial(run, ESPER_ALLOC_SEGMENTS=request.param)


# Checkpoints, with the calls that CUDA graph trees make

TREE = """
POOL = (7, 0)

def inside(sizes):
    _C._cuda_beginAllocateCurrentThreadToPool(0, POOL)
    try:
        return [memory(size) for size in sizes]
    finally:
        _C._cuda_endAllocateToPool(0, POOL)

def live():
    return {block["address"] for segment in segments(POOL) for block in segment["blocks"]
            if block["state"] == "active_allocated"}

def same(*tensors):
    addresses = {t.untyped_storage().data_ptr() for t in tensors}
    assert live() == addresses
    return _C._cuda_checkPoolLiveAllocations(0, POOL, addresses)

def storage_at(address, size):
    # What a replayed graph's output is: it owns nothing.
    return _C._construct_storage_from_data_pointer(address, torch.device("cuda", 0), size)
"""


run_tree = running(OURS + TREE)


@pytest.fixture(params=["classic", "mapped"])
def run_tree_on_both_kinds(run_tree: Run, request: pytest.FixtureRequest) -> Run:
    return functools.partial(run_tree, ESPER_ALLOC_SEGMENTS=request.param)


def test_a_tree_puts_a_checkpoint_back(run_tree: Run) -> None:
    run_tree("""
a, temporary, b = inside([6 * MiB, 3 * MiB, 5 * MiB])
assert _C._has_Standard_Deleter(a.untyped_storage()._cdata)
del temporary
state = _C._cuda_getCheckpointState(0, POOL)
assert same(a, b)
where = a.data_ptr(), b.data_ptr()
del a, b
(other,) = inside([12 * MiB])
assert other.data_ptr() == where[0]  # the memory was one piece in between
del other

# The graph was replayed: its outputs stand there again, owned by nobody.
for keep in (2, 1, 0):
    outputs = [storage_at(where[0], 6 * MiB), storage_at(where[1], 5 * MiB)][:keep]
    for storage in outputs:
        assert not _C._has_Standard_Deleter(storage._cdata)
    _C._cuda_setCheckpointPoolState(0, state, [], [s._cdata for s in outputs])
    for address in where[keep:]:  # those that have died since
        _C._cuda_cudaCachingAllocator_raw_delete(address)
    assert _C._cuda_checkPoolLiveAllocations(0, POOL, set(where[:keep])), keep
    assert live() == set(where[:keep])
    for storage in outputs:
        assert _C._has_Standard_Deleter(storage._cdata)
    if outputs:
        _C._free_And_Remove_DeleterFn(outputs[0]._cdata)
        assert not _C._cuda_checkPoolLiveAllocations(0, POOL, set(where[:keep]))
    del outputs[:1]
    (more,) = inside([3 * MiB])  # new memory keeps off what is live
    ends = {where[0]: 6, where[1]: 5}
    for address in where[1:keep]:
        assert not address - 3 * MiB < more.data_ptr() < address + ends[address] * MiB
    del outputs, more
assert live() == set()
""")


def test_a_tensor_that_stays_alive_keeps_its_deleter(run_tree: Run) -> None:
    run_tree("""
a, b = inside([6 * MiB, 5 * MiB])
view = a[MiB:]
state = _C._cuda_getCheckpointState(0, POOL)
_C._cuda_setCheckpointPoolState(0, state, [], [])
assert same(a, b) and same(view, b)
del a
assert same(view, b)
del view
assert same(b)
""")


def test_a_live_tensor_that_the_checkpoint_does_not_know(run_tree: Run) -> None:
    run_tree("""
(a,) = inside([6 * MiB])
state = _C._cuda_getCheckpointState(0, POOL)
(late,) = inside([5 * MiB])
refused(RuntimeError, "stale tensors", _C._cuda_setCheckpointPoolState, 0, state, [], [])
""")


def test_checkpoints_refuse_what_is_gone(run_tree_on_both_kinds: Run) -> None:
    run_tree_on_both_kinds("""
refused(RuntimeError, "no pool (7, 0)", _C._cuda_getCheckpointState, 0, POOL)
(a,) = inside([6 * MiB])
state = _C._cuda_getCheckpointState(0, POOL)
del a
torch.cuda.empty_cache()  # a tree's memory is kept while the tree is
assert reserved(POOL) == segment_of(6)
_C._cuda_setCheckpointPoolState(0, state, [], [])
_C._cuda_cudaCachingAllocator_raw_delete(*live())
_C._cuda_releasePool(0, POOL)
torch.cuda.empty_cache()
assert reserved(POOL) == 0
refused(RuntimeError, "no pool (7, 0)", _C._cuda_setCheckpointPoolState, 0, state, [], [])
refused(RuntimeError, "no pool (7, 0)", _C._cuda_checkPoolLiveAllocations, 0, POOL, set())
del state
""")


# MemPool


def test_a_mem_pools_own_allocator(run_on_both_kinds: Run) -> None:
    run_on_both_kinds("""
        pool = torch.cuda.MemPool(own_allocator())
        with torch.cuda.use_mem_pool(pool):
            a, b = memory(6 * MiB), memory(6 * MiB)
            small = memory(1000)
        assert own.own_pieces().live == 2 and own.own_pieces().bytes == 22 * MiB
        assert b.data_ptr() == a.data_ptr() + 6 * MiB
        outside = memory(6 * MiB)
        assert own.own_pieces().calls == 2
        assert torch.cuda.memory_reserved() == 22 * MiB + segment_of(6)
        del a, b, small
        torch.cuda.empty_cache()
        assert own.own_pieces().live == 2  # while the pool is there it keeps them
        with torch.cuda.use_mem_pool(pool):
            a = memory(3 * MiB)
        assert own.own_pieces().calls == 2
        del pool  # the tensor outlives it, and so does the allocator
        gc.collect()
        assert own.own_pieces().live == 1
        del a
        torch.cuda.empty_cache()
        assert own.own_pieces().live == 0
        assert own.own_pieces().strict == 0  # some thread may be capturing
        del outside
        """)


def test_forty_threads_have_a_pool_each(run_on_both_kinds: Run) -> None:
    run_on_both_kinds("""
        pools = [torch.cuda.MemPool() for _ in range(40)]
        inside, kept = threading.Barrier(40), {}
        def allocate(pool):
            with torch.cuda.use_mem_pool(pool):
                inside.wait()
                kept[pool.id] = memory(MiB)
                inside.wait()
        threads = [threading.Thread(target=allocate, args=(pool,)) for pool in pools]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
        for pool in pools:
            (segment,) = pool.snapshot()
            assert segment["allocated_size"] == MiB
            assert segment["address"] <= kept[pool.id].data_ptr() < segment["address"] + 20 * MiB
        """)


def test_who_only_looks_makes_no_context(run_on_both_kinds: Run) -> None:
    # There are two devices.
    run_on_both_kinds(
        """
        class Fake(ctypes.Structure):
            _fields_ = [("fail", ctypes.c_void_p),
                        ("calls", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p))]
        fake = Fake.in_dll(ctypes.CDLL(os.environ["ESPER_ALLOC_LIBCUDA"]), "fake")
        contexts = lambda: fake.calls(b"cuDevicePrimaryCtxRetain")
        memory(MiB)
        assert contexts() == 1
        torch.cuda.empty_cache()
        assert torch.cuda.memory_stats(1)["reserved_bytes.all.peak"] == 0
        torch.cuda.reset_peak_memory_stats(1)
        torch.cuda.reset_accumulated_memory_stats(1)
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            memory(MiB)
        del pool
        segments()
        esper_alloc.report()
        assert contexts() == 1
        memory(MiB, "cuda:1")
        assert contexts() == 2
        """,
        PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.5",
    )


def test_a_mem_pools_own_allocator_has_no_more(run: Run) -> None:
    run("""
        pool = torch.cuda.MemPool(own_allocator())
        own.own_limit(25 * MiB)
        with torch.cuda.use_mem_pool(pool):
            a = memory(6 * MiB)
            address = a.data_ptr()
            refused(torch.cuda.OutOfMemoryError, "Tried to allocate 40.00 MiB", memory, 40 * MiB)
            assert torch.cuda.memory_stats()["num_ooms"] == 1
            del a
            b = memory(18 * MiB)
            assert b.data_ptr() == address and own.own_pieces().live == 1
            del b
        memory(40 * MiB)  # the device has it
        """)


def test_a_mem_pool_whose_segments_are_ours(run_on_both_kinds: Run) -> None:
    run_on_both_kinds("""
        pool = torch.cuda.MemPool(esper_alloc.allocator().allocator())
        with torch.cuda.use_mem_pool(pool):
            a = memory(6 * MiB)
        assert reserved(pool.id) == segment_of(6) == reserved()
        del a, pool
        torch.cuda.empty_cache()
        assert reserved() == 0
        """)


# Kinds of segments


@pytest.mark.parametrize(("given", "pages"), [(None, 1), ("20", 2)])
def test_a_size_of_segments_is_that_of_pages(run: Run, given: str | None, pages: int) -> None:
    """Also the one that PyTorch has where nothing is said."""
    run(
        f"""
        before = esper_alloc._core.driver_calls()["page_create"]
        x = memory(30 * MiB)
        assert esper_alloc._core.driver_calls()["page_create"] - before == {pages}
        """,
        **({"PYTORCH_ALLOC_CONF": f"large_segment_size_mb:{given}"} if given else {}),
    )


def general(settings: str) -> dict[str, str]:
    return {"PYTORCH_ALLOC_CONF": settings}


def cuda(settings: str) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": settings}


CLASSIC, MAPPED = "expandable_segments:False", "expandable_segments:True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "before", "after", "mapped"),
    [
        ({}, None, None, True),
        ({"ESPER_ALLOC_SEGMENTS": "classic"}, None, None, False),
        ({}, None, CLASSIC, False),
        ({}, None, "max_split_size_mb:64", True),
        (general("garbage_collection_threshold:0.8"), None, None, True),
        (general("max_non_split_rounding_mb:40,large_segment_size_mb:40"), None, None, True),
        (general("roundup_power2_divisions:4"), None, None, True),
        # PyTorch reads both variables, this one last.
        ({**cuda(MAPPED), **general(CLASSIC)}, None, None, True),
        ({**cuda(CLASSIC), **general(MAPPED)}, None, None, False),
        ({**cuda("roundup_power2_divisions:4"), **general(CLASSIC)}, None, None, False),
        ({"ESPER_ALLOC_SEGMENTS": "mapped"}, None, "max_split_size_mb:64", True),
        ({"ESPER_ALLOC_SEGMENTS": "classic"}, None, MAPPED, True),
        (general(CLASSIC), None, None, False),
        (cuda(MAPPED), None, "max_split_size_mb:64", True),
        (general(CLASSIC), "max_split_size_mb:64", None, False),
        ({}, CLASSIC, "max_split_size_mb:64", False),
        ({"ESPER_ALLOC_SEGMENTS": "mapped"}, CLASSIC, None, False),
    ],
)
def test_the_kind_of_segments(
    libraries: dict[str, str],
    env: dict[str, str],
    before: str | None,
    after: str | None,
    mapped: bool,
) -> None:
    """Settings given before the allocator is there, and between that and its first use."""
    set_options = "_C._accelerator_setAllocatorSettings"

    def given(settings: str | None) -> str:
        return f"{set_options}({settings!r})\n" if settings else ""

    output_of(
        libraries,
        BEGIN + given(before) + OURS[len(BEGIN) :] + given(after),
        f"""
        x = memory(6 * MiB)
        assert segments()[0]["is_expandable"] is {mapped}, segments()
        try:  # what stands before the bad option holds
            {set_options}("expandable_segments:{not mapped},per_process_memory_fraction:7")
        except (RuntimeError, ValueError):
            pass
        y = memory(30 * MiB)
        kinds = [s["is_expandable"] for s in segments()]
        assert sorted(kinds) == [False, True], kinds
        """,
        **env,
    )
