"""The gather iterator on the GPU, one check after another.

Usage: gather.py ALLOCATOR

Reports for each check "" or what went wrong.
"""

import gc
import sys
import time
import traceback
import warnings

import torch
from device import Scenarios, other_streams, report, say, sleep, use_allocator, warm_up

from esper_alloc import GatherBatchIterator, ImageTransform
from esper_alloc.helpers.gather.compiled import CompiledGather
from esper_alloc.helpers.gather.plan import Layout, plan_epoch

check = Scenarios()
CIFAR = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}


def images(count: int = 500, size: int = 32, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    if dtype.is_floating_point:
        return torch.randn(count, 3, size, size, generator=generator).to(dtype)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator).to(dtype)


def iterators(inputs, targets, devices=("cuda", "cpu"), **arguments):
    """The same iterator on several devices."""
    given = {"batch_size_per_env": 16, "n_envs": 4, "seed": 5, **arguments}
    return [
        GatherBatchIterator(inputs, targets, env_devices=[one] * given["n_envs"], **given)
        for one in devices
    ]


def same(a, b) -> bool:
    a, b = a.cpu(), b.cpu()
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def is_native(batches) -> bool:
    return all(isinstance(one._gather, CompiledGather) for one in batches._workers)


def compare(inputs, targets, native=True, **arguments) -> None:
    """GPU and CPU give the same bits, in two epochs."""
    gpu, cpu = iterators(inputs, targets, **arguments)
    assert is_native(gpu) == native
    for _ in range(2):
        ours, wanted = list(gpu), list(cpu)
        assert len(ours) == len(wanted) > 0
        for a, b in zip(ours, wanted):
            assert len(a) == len(b)
            for (x, y), (u, v) in zip(a, b):
                assert same(x, u) and same(y, v), arguments


@check
def values_are_converted() -> None:
    for source in (torch.uint8, torch.float32, torch.half, torch.bfloat16):
        for result in (None, torch.float32, torch.half, torch.bfloat16):
            for values in ({}, CIFAR):
                for size in (32, 5):
                    how = ImageTransform(dtype=result, **values)
                    compare(images(300, size, source), torch.arange(300), transform=how)


@check
def more_than_the_parameters_hold() -> None:
    """Through device memory: many environments, many columns, several batches at once."""
    targets = torch.arange(3000)
    for drop_last in (True, False):
        compare(images(3000, 4), targets, n_envs=200, batch_size_per_env=7, drop_last=drop_last)
    named = {str(k): torch.rand(3000, k + 1) for k in range(10)}
    for gpu, cpu in [iterators(named, targets, n_envs=40)]:
        assert is_native(gpu)
        for a, b in zip(list(gpu), list(cpu)):
            for (x, y), (u, v) in zip(a, b):
                assert same(y, v) and all(same(x[name], u[name]) for name in named)


@check
def no_host_synchronisation() -> None:
    how = ImageTransform(dtype=torch.half, crop=4, flip=0.5, **CIFAR)
    (stream,) = other_streams(1)
    for reuse in (0, 2):
        for n_envs in (4, 200):
            (batches,) = iterators(
                images(4000, 8), torch.arange(4000), devices=("cuda",), n_envs=n_envs,
                batch_size_per_env=4, transform=how, reuse=reuse,
            )  # fmt: skip
            for _ in range(2):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    for batch in batches:
                        for env in range(0, len(batch), 50):
                            with batch.for_stream(env, stream) as (x, _):
                                x.sum()
                        batch.done()
                finally:
                    torch.cuda.set_sync_debug_mode("default")


@check
def the_host_runs_ahead() -> None:
    """A whole epoch is enqueued while the GPU is busy with something else."""
    (batches,) = iterators(images(), torch.arange(500), devices=("cuda",))
    list(batches)  # everything loaded
    torch.cuda.synchronize()
    sleep(torch.cuda.current_stream(), 300)
    begin = time.perf_counter()
    kept = list(batches)
    took = time.perf_counter() - begin
    assert not torch.cuda.current_stream().query(), "the GPU was done first"
    assert took < 0.2, took
    assert not kept[0].ready_event(0).query()
    torch.cuda.synchronize()
    assert kept[-1].ready_event(0).query() and kept[-1].ready.query()


@check
def allocated_bytes_stay() -> None:
    for reuse in (0, 3):
        (batches,) = iterators(images(), torch.arange(500), devices=("cuda",), reuse=reuse)
        figures = []
        for _ in range(10):
            for batch in batches:
                batch.done()
            del batch
            gc.collect()
            torch.cuda.synchronize()
            figures.append(torch.cuda.memory_allocated())
        assert figures[0] == figures[-1], (reuse, figures)


@check
def a_ring_that_another_stream_fills_is_not_reused_early() -> None:
    (stream,) = other_streams(1)
    (batches,) = iterators(images(), torch.arange(500), devices=("cuda",), reuse=1)
    epoch = iter(batches)
    next(epoch).done()
    sleep(stream, 300)
    with torch.cuda.stream(stream):
        batch = next(epoch)
    x, _ = batch[0]
    address, shape, dtype = x.data_ptr(), x.shape, x.dtype
    del batch, epoch, batches, x, _
    assert torch.empty(shape, dtype=dtype, device="cuda").data_ptr() != address
    assert not stream.query(), "the GPU was done first"


@check
def streams_of_16_environments() -> None:
    """Each environment reads on its own stream, late; batches are dropped at once."""
    inputs, targets = images(4000, 32), torch.arange(4000)
    how = ImageTransform(dtype=torch.float32, crop=4, flip=0.5, **CIFAR)
    streams = [torch.cuda.Stream() for _ in range(16)]
    arguments = {"n_envs": 16, "transform": how, "batch_size_per_env": 25}
    (cpu,) = iterators(inputs, targets, devices=("cpu",), **arguments)
    expected = [[(x.double().sum().item(), int(y.sum())) for x, y in batch] for batch in cpu]
    for reuse in (0, 2):
        (gpu,) = iterators(inputs, targets, devices=("cuda",), reuse=reuse, **arguments)
        found = []
        for batch in gpu:
            row = []
            for env, stream in enumerate(streams):
                with batch.for_stream(env, stream) as (x, y):
                    if env % 4 == 0:
                        torch.cuda._sleep(2_000_000)
                    row.append((x.double().sum(), y.sum()))
                    del x, y
            found.append(row)
            if reuse == 0:
                del batch
                torch.empty(25 * 3 * 32 * 32, device="cuda").fill_(1e9)  # takes freed memory
        torch.cuda.synchronize()
        assert len(found) == len(expected) == 10
        for row, wanted in zip(found, expected):
            for (x, y), (u, v) in zip(row, wanted):
                assert int(y) == v and abs(x.item() - u) <= 1e-6 * max(1.0, abs(u)), (reuse, x, u)


@check
def a_ring_waits_for_every_reader() -> None:
    inputs = torch.arange(4096, dtype=torch.int64).repeat_interleave(1024).view(4096, 1024)
    first, second = other_streams(2)
    (batches,) = iterators(
        inputs, torch.arange(4096), devices=("cuda",), n_envs=2, batch_size_per_env=64, reuse=2,
        shuffle=False,
    )  # fmt: skip
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
    addresses = []
    results = []
    for number, batch in enumerate(batches):
        addresses.append(batch[0][0].data_ptr())
        for env, stream in ((0, first), (1, second), (0, second)):
            with batch.for_stream(env, stream) as (x, y):
                sleep(stream, 2)
                results.append((x != y[:, None]).sum() + (y[0] != number * 128 + env * 64))
    torch.cuda.synchronize()
    assert sum(int(one) for one in results) == 0 == int(wrong)
    assert all(addresses[k] == addresses[k % 2] for k in range(len(addresses)))
    assert addresses[0] != addresses[1]
    lease = batches._ring[0]
    assert lease is not None and len(lease.events) == 2  # one for each consuming stream


@check
def memory_that_leaves_a_ring_waits_for_its_readers() -> None:
    inputs = torch.arange(64, dtype=torch.int64).repeat_interleave(1024).view(64, 1024)
    (side,) = other_streams(1)
    for marked_late in (False, True):
        (batches,) = iterators(
            inputs, torch.arange(64), devices=("cuda",), n_envs=1, batch_size_per_env=32, reuse=1,
            shuffle=False,
        )  # fmt: skip
        batch = next(iter(batches))
        with batch.for_stream(0, side) as (x, y):
            sleep(side, 100)
            wrong = (x != y[:, None]).sum() + (y[0] != 0)
            del x, y
            if marked_late:  # the slot gets other memory, as the batch is still in use
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    next(batches)
        del batch, batches
        taken = [torch.full_like(inputs[:32], -1, device="cuda") for _ in range(4)]
        taken += [torch.full((32,), -1, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert int(wrong) == 0, (marked_late, int(wrong))


@check
def the_current_stream_may_change() -> None:
    inputs, targets = images(2000, 16), torch.arange(2000)
    gpu, cpu = iterators(inputs, targets, batch_size_per_env=50)
    streams = [torch.cuda.current_stream(), *other_streams(2)]
    for _ in range(3):
        steps, wanted = iter(gpu), list(cpu)
        sleep(torch.cuda.current_stream(), 20)  # the upload comes late
        got = []
        for number in range(len(gpu)):
            with torch.cuda.stream(streams[number % 3]):
                got.append(next(steps))
        torch.cuda.synchronize()
        for a, b in zip(got, wanted):
            for (x, y), (u, v) in zip(a, b):
                assert same(x, u) and same(y, v)


@check
def data_may_be_dropped_while_it_is_read() -> None:
    """The iterator and its data go while another stream has yet to gather."""
    (side,) = other_streams(1)
    wanted = images(64, 64, torch.float32)
    for _ in range(5):
        torch.cuda.empty_cache()
        batches = GatherBatchIterator(
            wanted, torch.arange(64), batch_size_per_env=64, n_envs=1, env_devices=["cuda"], seed=1
        )
        with torch.cuda.stream(side):
            sleep(side, 20)
            batch = next(iter(batches))
        del batches
        gc.collect()
        pressure = [torch.full_like(wanted, 7.0, device="cuda") for _ in range(3)]
        pressure.append(torch.full((64,), -1, device="cuda"))
        torch.cuda.synchronize()
        x, y = batch[0]
        assert torch.equal(x.cpu(), wanted[y.cpu()])
        del pressure, batch


@check
def one_launch_a_batch() -> None:
    from torch.profiler import ProfilerActivity, profile

    how = ImageTransform(dtype=torch.half, crop=4, flip=0.5, **CIFAR)
    (batches,) = iterators(
        images(2000),
        torch.arange(2000),
        devices=("cuda",),
        n_envs=64,
        batch_size_per_env=4,
        transform=how,
    )
    list(batches)
    steps = iter(batches)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            next(steps)
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 5 and all("gather" in e.name for e in kernels), [e.name for e in kernels]
    names = {e.name for e in seen.events()}
    assert not any(
        f"aten::{op}" in names for op in ("select", "stack", "index", "index_select", "copy_")
    )


@check
def two_devices_with_uneven_environments() -> None:
    if torch.cuda.device_count() < 2:
        raise RuntimeError("there is one GPU only")
    inputs, targets = images(1000, 8), torch.arange(1000)
    devices = ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]
    for order in ("per_device", "global"):
        batches = GatherBatchIterator(
            inputs,
            targets,
            batch_size_per_env=16,
            n_envs=4,
            env_devices=devices,
            seed=5,
            order=order,
        )
        layout = Layout(1000, tuple(devices), 16, order)
        for epoch in range(2):
            plan = plan_epoch(layout, 5, epoch)
            for number, batch in enumerate(batches):
                for (x, y), part, device in zip(batch, plan.indices(number), devices):
                    assert str(x.device) == str(y.device) == device
                    assert same(x, inputs[part]) and same(y, part)
                with batch.for_stream(1, torch.cuda.Stream("cuda:1")) as (x, _):
                    x.float().sum()
                batch.done()


def main(allocator: str) -> None:
    use_allocator(allocator)
    warm_up()
    outcome = {}
    for name, function in check.items():
        say(name)
        try:
            function()
            torch.cuda.synchronize()
            outcome[name] = ""
        except Exception:
            outcome[name] = traceback.format_exc()[-1500:]
        torch.cuda.set_sync_debug_mode("default")
    report(**outcome)


if __name__ == "__main__":
    main(sys.argv[1])
