"""MemPools, seen from Python; graphs and checkpoints have tests of their own."""

import threading
from typing import Any

import torch
from ground import MiB, bytes_of, error_of, scenario, stats, type_of_error

RESERVED = ("reserved_bytes.all.current", "allocated_bytes.all.current")


def pool_with(size: int) -> tuple[torch.cuda.MemPool, torch.Tensor]:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        return pool, bytes_of(size)


def pools_shown() -> list[Any]:
    return sorted(
        (s["segment_pool_id"] != (0, 0), s["total_size"]) for s in torch.cuda.memory_snapshot()
    )


@scenario()
def a_pool_and_its_id() -> Any:
    pool = torch.cuda.MemPool()
    answer = [pool.id[0], pool.id[1] > 0, pool.use_count(), pool.snapshot()]
    with torch.cuda.use_mem_pool(pool):
        answer.append(pool.use_count())
        _x = bytes_of(12 * MiB)
    _y = bytes_of(14 * MiB)
    answer += [pool.use_count(), pools_shown(), len(pool.snapshot()), stats(*RESERVED)]
    shown = pool.snapshot()[0]
    answer += [shown["segment_pool_id"] == pool.id, shown["total_size"]]
    return answer


@scenario()
def a_pool_that_is_there_keeps_its_memory() -> Any:
    """Whoever knows its addresses, a network say, goes on knowing them."""
    pool = torch.cuda.MemPool()
    outside = bytes_of(12 * MiB)
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(30 * MiB)
    address = x.data_ptr()
    del x, outside
    torch.cuda.empty_cache()
    answer = [stats(*RESERVED)]
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(51 * MiB / total)
    try:
        answer.append(type_of_error(lambda: bytes_of(40 * MiB)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(30 * MiB)
    answer += [x.data_ptr() == address, stats(*RESERVED)]
    del x, pool
    return [*answer, stats(*RESERVED)]


@scenario()
def memory_may_outlive_its_pool() -> Any:
    pool, x = pool_with(12 * MiB)
    del pool
    answer = [stats(*RESERVED), x.numel()]
    del x
    answer.append(stats(*RESERVED))
    torch.cuda.empty_cache()
    return [*answer, stats(*RESERVED)]


@scenario()
def a_handle_that_graphs_share() -> Any:
    """torch.cuda.graph_pool_handle() names a pool that is made when something allocates to it."""
    first, second = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
    answer = [len(first), first != second, first[0], pools_shown()]
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, first)
    x = bytes_of(12 * MiB)
    torch._C._cuda_endAllocateToPool(0, first)
    y = bytes_of(14 * MiB)
    shown = torch.cuda.memory_snapshot()
    answer += [
        [s["total_size"] for s in shown if s["segment_pool_id"] == pool] for pool in (first, second)
    ]
    answer += [len(torch.cuda.memory_snapshot(first)), pools_shown()]
    torch._C._cuda_releasePool(0, first)
    answer.append(stats(*RESERVED))
    del x, y
    torch.cuda.empty_cache()
    return [*answer, stats(*RESERVED)]


@scenario()
def pools_nest() -> Any:
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer):
        a = bytes_of(12 * MiB)
        with torch.cuda.use_mem_pool(inner):
            b = bytes_of(14 * MiB)
        c = bytes_of(16 * MiB)
    shown = torch.cuda.memory_snapshot()
    answer = []
    for x, pool in ((a, outer), (b, inner), (c, outer)):
        [mine] = [s for s in shown if 0 <= x.data_ptr() - s["address"] < s["total_size"]]
        answer.append(mine["segment_pool_id"] == pool.id)
    return answer


@scenario()
def another_thread_is_not_in_the_pool() -> Any:
    pool = torch.cuda.MemPool()
    kept: list[Any] = []
    with torch.cuda.use_mem_pool(pool):
        thread = threading.Thread(target=lambda: kept.append(bytes_of(12 * MiB)))
        thread.start()
        thread.join()
    answer = pools_shown()
    kept.clear()
    return answer


@scenario()
def figures_of_private_pools() -> Any:
    """From the first version that has them on; before, nothing is shown."""

    def shown() -> list[Any]:
        nested = torch.cuda.memory_stats_as_nested_dict()
        pools = nested.get("reserved_bytes_by_private_pools", {})
        flat = [key for key in torch.cuda.memory_stats() if "by_private_pools" in key]
        assert len(flat) == 12 * len(pools)
        # What is all zero may be forgotten.
        every = [pools[pool] for pool in sorted(pools)]
        return [one for one in every if any(any(array.values()) for array in one.values())]

    answer = [shown()]
    first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(first):
        answer.append(shown())
        x, _small = bytes_of(12 * MiB), bytes_of(1000)
    with torch.cuda.use_mem_pool(second):
        _y = bytes_of(14 * MiB)
    _outside = bytes_of(16 * MiB)
    answer.append(shown())
    del x
    del first  # not its memory: `small` is there
    torch.cuda.empty_cache()
    answer.append(shown())
    torch.cuda.reset_peak_memory_stats()
    answer.append(shown())
    torch.cuda.reset_accumulated_memory_stats()
    answer.append(shown())
    return answer


@scenario()
def emptying_while_a_pool_is_open() -> Any:
    x = bytes_of(12 * MiB)
    del x
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.cuda.empty_cache()
        answer = [stats(*RESERVED)]
    torch.cuda.empty_cache()
    return [*answer, stats(*RESERVED)]


@scenario()
def the_trace_names_the_pool() -> Any:
    torch.cuda.memory._record_memory_history(context=None)
    pool, x = pool_with(12 * MiB)
    del x
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [[e["action"], e["size"], "pool_id" in e and e["pool_id"] == pool.id] for e in trace]


@scenario("pools")
def a_pool_without_splitting() -> Any:
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        _x, _y = bytes_of(12 * MiB), bytes_of(3 * MiB)
        _z = bytes_of(3 * MiB)
    return [[len(s["blocks"]) for s in pool.snapshot()], stats("segment.all.current")]


@scenario("pools")
def a_pool_that_helps_out() -> Any:
    size = torch.cuda.mem_get_info()[1] // 12  # others need some of it, too
    torch.cuda.set_per_process_memory_fraction(0.125)
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(size)
    address = x.data_ptr()
    del x
    y = bytes_of(size)
    return [y.data_ptr() == address, stats("num_ooms")]


@scenario("checkpoints")
def live_memory_of_a_pool() -> Any:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x, y = bytes_of(1000), bytes_of(2000)
    check = torch._C._cuda_checkPoolLiveAllocations
    both = {x.data_ptr(), y.data_ptr()}
    answer = [
        check(0, pool.id, both), check(0, pool.id, {x.data_ptr()}), check(0, pool.id, set()),
        check(0, pool.id, both | {12345}), error_of(lambda: check(0, (77, 0), set())) is not None,
    ]  # fmt: skip
    del y
    return [*answer, check(0, pool.id, {x.data_ptr()})]


@scenario("checkpoints")
def a_checkpoint_and_back() -> Any:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(1000)
        y = bytes_of(14 * MiB)
    state = torch._C._cuda_getCheckpointState(0, pool.id)
    address = y.data_ptr()
    del y
    with torch.cuda.use_mem_pool(pool):
        z = bytes_of(2000)
    stale = [z.untyped_storage()._cdata]
    torch._C._cuda_setCheckpointPoolState(0, state, stale, [])
    live = [
        [b["size"] for b in s["blocks"] if b["state"] == "active_allocated"]
        for s in pool.snapshot()
    ]
    answer = [sorted(live), x.data_ptr() != 0]
    torch.cuda.caching_allocator_delete(address)
    return answer
