"""PyTorch on esper_alloc: everything of the allocator that Python can see.

Each scenario is a fresh process on the GPU.
"""

from __future__ import annotations

import textwrap

import pytest
from helper import run_python
from scenario import PROGRAMS

#: What a process prints, libraries' complaints included, is one text.
TOGETHER = "import os; os.dup2(1, 2)\n"

ENABLE = f"""
import contextlib, ctypes, gc, os, sys, threading, warnings
import torch
import esper_alloc
sys.path.insert(0, {str(PROGRAMS)!r})
from device import calibrate, held_up, other_streams
esper_alloc.enable()

MiB = 1 << 20

def stat(key):
    return torch.cuda.memory_stats()[key]

def bytes_of(mebibytes):
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device="cuda")

def cycles(seconds):
    # For torch.cuda._sleep: enough for any GPU clock up to 2 GHz.
    return int(seconds * 2e9)

def stream_beside():
    # Streams may share a hardware queue, where one waits for the other.
    calibrate()
    return other_streams(1)[0]
"""


def in_torch(scenario: str, **keywords) -> str:
    """Runs a scenario in a fresh process; what it printed, errors included."""
    return run_python(TOGETHER + textwrap.dedent(scenario), **keywords)


def on_gpu(scenario: str, **keywords) -> str:
    """The same with esper_alloc enabled, and the names above at hand."""
    return in_torch(ENABLE + textwrap.dedent(scenario), **keywords)


# The swap


def test_change_current_allocator():
    in_torch(
        """
        import torch, esper_alloc
        torch.cuda.memory.change_current_allocator(esper_alloc.allocator())
        assert esper_alloc.is_enabled()
        x = torch.arange(1000, device="cuda")
        assert x.sum().item() == 499500
        assert torch.cuda.memory_allocated() > 0
        assert torch.cuda.get_allocator_backend() == "esper_alloc"
        """
    )


def test_enable_is_idempotent_and_survives_init():
    on_gpu(
        """
        esper_alloc.enable()
        x = bytes_of(1)
        esper_alloc.enable()
        assert esper_alloc.is_enabled()
        """
    )


def test_enable_after_init_is_refused_with_the_remedy():
    in_torch(
        """
        import torch, esper_alloc
        x = torch.ones(8, device="cuda")
        try:
            esper_alloc.enable()
        except RuntimeError as error:
            text = str(error)
            assert "initialised" in text and "run script.py" in text, text
        else:
            raise AssertionError("no error")
        assert not esper_alloc.is_enabled()
        assert torch.cuda.get_allocator_backend() == "native"
        assert x.sum().item() == 8
        """
    )


def test_environment_variable_reaches_spawned_workers(tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.multiprocessing as mp
            import esper_alloc

            def work(rank, queue):
                x = torch.full((1000,), float(rank), device="cuda")
                queue.put((esper_alloc.is_enabled(), x.sum().item()))

            if __name__ == "__main__":
                context = mp.get_context("spawn")
                queue = context.Queue()
                workers = [
                    context.Process(target=work, args=(rank, queue))
                    for rank in range(2)
                ]
                for worker in workers:
                    worker.start()
                answers = sorted(queue.get(timeout=600) for _ in workers)
                for worker in workers:
                    worker.join()
                assert answers == [(True, 0.0), (True, 1000.0)], answers
                print("fine")
            """
        )
    )
    printed = in_torch(
        f"""
        import subprocess, sys
        sys.exit(subprocess.call([sys.executable, {str(script)!r}]))
        """,
        env={"ESPER_ALLOC": "1"},
    )
    assert "fine" in printed


# Figures

COMPARE = """
def compare(stats, segments):
    # Every figure equals the sum over the snapshot.
    for name, wanted in (
        ("all", ("small", "large")), ("small_pool", ("small",)), ("large_pool", ("large",))
    ):
        chosen = [s for s in segments if s["segment_type"] in wanted]
        blocks = [(s, b) for s in chosen for b in s["blocks"]]
        live = [b for _, b in blocks if b["state"] == "active_allocated"]
        active = [b for _, b in blocks if b["state"] != "inactive"]
        split = [
            b for s, b in blocks
            if b["state"] == "inactive" and b["size"] != s["total_size"]
            and not s["is_expandable"]  # what is free there can go
        ]
        size = lambda some: sum(b["size"] for b in some)
        expected = {
            "allocation": len(live),
            "allocated_bytes": size(live),
            "active": len(active),
            "active_bytes": size(active),
            "requested_bytes": sum(b["requested_size"] for b in active),
            "inactive_split": len(split),
            "inactive_split_bytes": size(split),
            "segment": len(chosen),
            "reserved_bytes": sum(s["total_size"] for s in chosen),
        }
        for key, value in expected.items():
            got = stats[f"{key}.{name}.current"]
            assert got == value, (key, name, got, value)
    for segment in segments:
        blocks = segment["blocks"]
        assert sum(b["size"] for b in blocks) == segment["total_size"]
        address = segment["address"]
        for block in blocks:
            assert block["address"] == address
            address += block["size"]
        live = [b for b in blocks if b["state"] == "active_allocated"]
        active = [b for b in blocks if b["state"] != "inactive"]
        assert segment["allocated_size"] == sum(b["size"] for b in live)
        assert segment["active_size"] == sum(b["size"] for b in active)
    addresses = [s["address"] for s in segments]
    assert addresses == sorted(addresses)
"""


@pytest.mark.parametrize("kind", ["classic", "mapped"])
def test_statistics_equal_the_snapshot_after_random_operations(kind: str):
    on_gpu(
        COMPARE
        + textwrap.dedent(
            """
            import random
            random.seed(20260)
            streams = [torch.cuda.Stream() for _ in range(3)]
            live = []
            for step in range(4000):
                stream = random.choice(streams)
                with torch.cuda.stream(stream):
                    if random.random() < 0.52 or not live:
                        size = int(2 ** random.uniform(0, 25))
                        live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                    else:
                        x = live.pop(random.randrange(len(live)))
                        if random.random() < 0.3:
                            x.record_stream(random.choice(streams))
                        if random.random() < 0.3:
                            esper_alloc.record_use(x, random.choice(streams))
                        del x
                if random.random() < 0.002:
                    torch.cuda.empty_cache()
                if step % 400 == 0:
                    torch.cuda.synchronize()
                    stats = torch.cuda.memory_stats()
                    compare(stats, torch.cuda.memory_snapshot())
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            assert len(stats) == 122 or torch.__version__ >= "2.12", len(stats)
            compare(stats, torch.cuda.memory_snapshot())
            for key, value in stats.items():
                if key.endswith(".current"):
                    base = key[: -len("current")]
                    assert stats[base + "allocated"] - stats[base + "freed"] == value, key
                    assert stats[base + "peak"] >= value, key
            live.clear()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            stats = torch.cuda.memory_stats()
            for key, value in stats.items():
                if key.endswith(".current"):
                    assert value == 0, (key, value)
            assert torch.cuda.memory_snapshot() == []
            """
        ),
        env={"ESPER_ALLOC_SEGMENTS": kind},
    )


def test_peaks_and_resets():
    on_gpu(
        """
        x = bytes_of(64)
        del x
        y = bytes_of(16)
        assert torch.cuda.max_memory_allocated() == 64 * MiB
        assert torch.cuda.memory_allocated() == 16 * MiB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 16 * MiB
        assert stat("allocation.all.allocated") == 2
        torch.cuda.reset_accumulated_memory_stats()
        assert stat("allocation.all.allocated") == 0
        assert stat("allocated_bytes.all.current") == 16 * MiB
        """
    )


def test_memory_summary():
    printed = on_gpu("x = bytes_of(8); print(torch.cuda.memory_summary())")
    assert "PyTorch CUDA memory summary" in printed
    assert "8192 KiB" in printed


def test_empty_cache_gives_everything_back_with_one_synchronisation():
    on_gpu(
        """
        x, y = bytes_of(64), bytes_of(1)
        del x
        before = stat("num_sync_all_streams")
        torch.cuda.empty_cache()
        assert stat("num_sync_all_streams") == before + 1
        assert torch.cuda.memory_reserved() < 64 * MiB
        del y
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        """
    )


def test_accelerator_module_reaches_the_same_allocator():
    on_gpu(
        """
        x = bytes_of(32)
        a, c = torch.accelerator, torch.cuda
        assert a.memory_allocated() == c.memory_allocated() == 32 * MiB
        assert a.memory_reserved() == c.memory_reserved() > 0
        assert a.memory_stats()["num_device_alloc"] == stat("num_device_alloc")
        del x
        assert a.max_memory_allocated() == 32 * MiB
        a.reset_peak_memory_stats()
        assert a.max_memory_allocated() == 0
        a.empty_cache()
        assert c.memory_reserved() == 0
        """
    )


def test_memory_info_and_fraction():
    on_gpu(
        """
        torch.cuda.init()
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
        torch.cuda.set_per_process_memory_fraction(0.25)
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
        """
    )


def test_memory_fraction_from_the_options():
    on_gpu(
        """
        torch.cuda.init()
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        """,
        env={"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.5"},
    )


# Out of memory


def test_impossible_sizes_raise_with_natives_wording():
    on_gpu(
        """
        x = torch.arange(1000, device="cuda")
        try:
            torch.empty(800000000 * 1024 ** 3, dtype=torch.int8, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            text = str(error)
            assert text.startswith(
                "CUDA out of memory. Tried to allocate 800000000.00 GiB. "
                "GPU 0 has a total capacity of "
            ), text
            assert " is free. " in text
            assert "is allocated by PyTorch, and " in text
            assert "is reserved by PyTorch but unallocated." in text
        else:
            raise AssertionError("no error")
        assert stat("num_ooms") == 1
        try:
            torch.empty((1 << 60) + 1, dtype=torch.int8, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            assert "Tried to allocate more than 1EB memory" in str(error)
        else:
            raise AssertionError("no error")
        assert x.sum().item() == 499500
        assert bytes_of(1).numel() == MiB
        """
    )


def test_filling_the_fraction_then_a_fitting_request():
    on_gpu(
        """
        torch.cuda.init()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(2048 * MiB / total)
        seen = []
        torch._C._cuda_attach_out_of_memory_observer(
            lambda device, asked, total, free: seen.append((device, asked))
        )
        live = []
        try:
            for _ in range(1000):
                live.append(bytes_of(100))
                live[-1].fill_(len(live))
        except torch.cuda.OutOfMemoryError as error:
            assert "Tried to allocate 100.00 MiB" in str(error), error
            assert "2.00 GiB allowed; " in str(error), error
        else:
            raise AssertionError("no error")
        assert 15 <= len(live) <= 20, len(live)
        assert seen == [(0, 100 * MiB)], seen
        # What lived before lives on. (Slices: there is no room for a result.)
        for number, x in enumerate(live, 1):
            assert (x[:: 1 << 20] == number).all().item(), number
        del x
        live.pop()
        live.append(bytes_of(100))
        live.clear()
        assert bytes_of(1500).numel() == 1500 * MiB
        """
    )


def test_one_more_look_before_giving_up():
    # Everything is freed, in pieces that only merge when uses complete.
    on_gpu(
        """
        torch.cuda.init()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(1024 * MiB / total)
        side = torch.cuda.Stream()
        pieces = [bytes_of(64) for _ in range(14)]
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles(0.05))
        for x in pieces:
            x.record_stream(side)
        del x, pieces
        assert bytes_of(800).numel() == 800 * MiB
        """
    )


# Memory through every entry


def test_zero_bytes_and_raw_entries():
    on_gpu(
        """
        empty = torch.empty(0, device="cuda")
        assert empty.data_ptr() == 0
        before = torch.cuda.memory_allocated()
        stream = torch.cuda.Stream()
        ptr = torch.cuda.caching_allocator_alloc(3 * MiB, stream=stream)
        assert torch.cuda.memory_allocated() == before + 4 * MiB or (
            torch.cuda.memory_allocated() == before + 3 * MiB
        )
        torch.cuda.caching_allocator_delete(ptr)
        assert torch.cuda.memory_allocated() == before
        try:
            torch.cuda.caching_allocator_delete(ptr)
        except RuntimeError as error:
            assert "invalid device pointer" in str(error), error
        else:
            raise AssertionError("second free accepted")
        """
    )


def test_caching_can_be_turned_off_and_on():
    on_gpu(
        """
        x = bytes_of(4)
        torch.cuda.caching_allocator_enable(False)
        y = bytes_of(4)
        assert torch.cuda.memory_allocated() == 4 * MiB
        y.fill_(3); assert (y == 3).all().item()
        del x
        y.record_stream(torch.cuda.Stream())
        torch.cuda.caching_allocator_enable(True)
        del y
        z = bytes_of(4)
        z.fill_(4); assert (z == 4).all().item()
        """
    )


def test_threads_and_streams_keep_their_data():
    on_gpu(
        """
        failures = []
        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                kept = []
                for step in range(300):
                    size = int(torch.randint(1, 1 << 18, (1,), generator=generator))
                    value = seed * 1000 + step
                    kept.append((torch.full((size,), value, device="cuda"), value))
                    if len(kept) > 20:
                        x, value = kept.pop(0)
                        if not (x == value).all().item():
                            failures.append((seed, step))
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not failures, failures[:5]
        """
    )


def test_cudnn_benchmark_convolution():
    on_gpu(
        """
        torch.backends.cudnn.benchmark = True
        x = torch.randn(8, 16, 64, 64, device="cuda", requires_grad=True)
        conv = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
        y = conv(x)
        y.square().mean().backward()
        torch.backends.cudnn.benchmark = False
        reference = torch.nn.functional.conv2d(
            x.detach().cpu(), conv.weight.detach().cpu(), conv.bias.detach().cpu(), padding=1
        )
        assert torch.allclose(y.detach().cpu(), reference, atol=1e-2)
        assert x.grad.isfinite().all()
        """
    )


def test_copies():
    on_gpu(
        """
        x = torch.randn(1 << 20, device="cuda")
        y = x.clone()
        host = x.cpu()
        z = torch.empty_like(x)
        z.copy_(host.pin_memory(), non_blocking=True)
        assert torch.equal(x, y) and torch.equal(x, z)
        lazy = torch._lazy_clone(x)
        lazy.add_(1)
        assert torch.allclose(lazy, x + 1) and torch.equal(x, y)
        again = torch.from_dlpack(x)
        assert again.data_ptr() == x.data_ptr()
        """
    )


def test_base_allocation_and_free_memory_callbacks(tmp_path):
    on_gpu(
        """
            from torch.utils.cpp_extension import load_inline
            from esper_alloc import get_include
            source = r'''
            #include <c10/cuda/CUDACachingAllocator.h>
            namespace native = c10::cuda::CUDACachingAllocator;
            std::tuple<int64_t, int64_t> base(int64_t ptr) {
              size_t size = 0;
              void* at = native::getBaseAllocation(reinterpret_cast<void*>(ptr), &size);
              return {reinterpret_cast<int64_t>(at), static_cast<int64_t>(size)};
            }
            static std::vector<at::Tensor> hoard;
            static int calls = 0;
            void keep(at::Tensor t) { hoard.push_back(std::move(t)); }
            int times_called() { return calls; }
            struct LetGo : c10::FreeMemoryCallback {
              bool Execute() override {
                calls += 1;
                const bool some = !hoard.empty();
                hoard.clear();
                return some;
              }
            };
            namespace c10 { REGISTER_FREE_MEMORY_CALLBACK("esper_alloc_test", LetGo); }
            '''
            module = load_inline(
                "shim_test", source, functions=["base", "keep", "times_called"],
                with_cuda=True, build_directory=os.environ["BUILD_FOLDER"],
            )
            x = bytes_of(30)
            address, size = module.base(x.data_ptr())
            segment = [
                s for s in torch.cuda.memory_snapshot()
                if s["address"] <= x.data_ptr() < s["address"] + s["total_size"]
            ][0]
            assert (address, size) == (segment["address"], segment["total_size"])
            try:
                module.base(1 << 20)
            except RuntimeError as error:
                assert "invalid device pointer" in str(error)
            else:
                raise AssertionError("a foreign pointer has a base")

            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(512 * MiB / total)
            module.keep(bytes_of(300))
            y = bytes_of(400)
            assert y.numel() == 400 * MiB and module.times_called() >= 1
            """,
        env={"BUILD_FOLDER": str(tmp_path)},
    )


# Streams


def test_record_stream_holds_until_the_stream_is_done():
    on_gpu(
        """
        side = torch.cuda.Stream()
        x = bytes_of(32)
        address = x.data_ptr()
        states = lambda: {
            b["state"] for s in torch.cuda.memory_snapshot() for b in s["blocks"]
            if b["address"] == address
        }
        with held_up(side):
            x.record_stream(side)
            del x
            assert states() == {"active_pending_free"}, states()
            assert torch.cuda.memory_allocated() == 0
            assert stat("active_bytes.all.current") == 32 * MiB
        assert stat("active_bytes.all.current") == 0
        assert bytes_of(32).data_ptr() == address
        """
    )


def test_record_use_with_an_event():
    on_gpu(
        """
        side = torch.cuda.Stream()
        x = bytes_of(64)
        fresh = torch.cuda.Event()
        try:
            esper_alloc.record_use(x, event=fresh)
        except ValueError as error:
            assert "not recorded" in str(error)
        else:
            raise AssertionError("an unrecorded event was accepted")
        with held_up(side):
            event = torch.cuda.Event(); event.record(side)
            esper_alloc.record_use(x, event=event)
            del x, event
            assert stat("active_bytes.all.current") == 64 * MiB
        assert stat("active_bytes.all.current") == 0
        """
    )


def test_record_use_finds_memory_in_containers_views_and_layouts():
    on_gpu(
        """
        import dataclasses
        side = torch.cuda.Stream()

        @dataclasses.dataclass
        class Batch:
            ids: torch.Tensor
            rest: dict

        def pending(make):
            # Bytes that stay pending after the value is dropped.
            torch.cuda.synchronize(); gc.collect()
            assert stat("active_bytes.all.current") == 0
            value = make()
            with held_up(side):
                with torch.no_grad():
                    esper_alloc.record_use(value, side)
                del value
                gc.collect()
                return stat("active_bytes.all.current")

        assert pending(lambda: bytes_of(4)) == 4 * MiB
        assert pending(lambda: bytes_of(4)[MiB:2 * MiB].view(1024, 1024).T) == 4 * MiB
        assert pending(lambda: [bytes_of(4), (bytes_of(4), {"x": bytes_of(4)}), None, 5]) == 12 * MiB
        assert pending(lambda: Batch(bytes_of(4), {"y": [bytes_of(4)]})) == 8 * MiB
        assert pending(lambda: torch.nn.Parameter(torch.empty(MiB, device="cuda"))) == 4 * MiB
        assert pending(lambda: torch.from_dlpack(bytes_of(4))) == 4 * MiB
        sparse = lambda: torch.sparse_coo_tensor(
            torch.zeros(1, MiB, dtype=torch.int64, device="cuda"),
            torch.ones(MiB, device="cuda"), (MiB,), check_invariants=False,
        )
        assert pending(sparse) >= 12 * MiB
        nested = lambda: torch.nested.nested_tensor(
            [torch.ones(MiB), torch.ones(MiB)], layout=torch.jagged, device="cuda")
        assert pending(nested) >= 8 * MiB
        strided = lambda: torch.nested.nested_tensor([torch.ones(MiB), torch.ones(MiB)], device="cuda")
        assert pending(strided) >= 8 * MiB
        assert pending(lambda: torch.ones(4)) == 0
        """
    )


def test_record_use_is_as_fast_as_record_stream():
    on_gpu(
        """
        import time
        side = torch.cuda.Stream()
        def microseconds(call):
            best = 1e9
            for _ in range(7):
                start = time.perf_counter()
                for _ in range(2000):
                    call()
                best = min(best, time.perf_counter() - start)
                torch.cuda.synchronize()
            return best / 2000 * 1e6
        with torch.no_grad():
            # Both do the same once per tensor: the own stream, where neither
            # has anything to record, leaves the cost of getting there.
            x = bytes_of(1)
            own = torch.cuda.current_stream()
            theirs = microseconds(lambda: x.record_stream(own))
            ours = microseconds(lambda: esper_alloc.record_use(x, own))
        print(f"record_stream {theirs:.2f} us, record_use {ours:.2f} us")
        assert ours <= theirs + 0.1, (ours, theirs)
        """
    )


# Autograd


def test_marks_are_exact_without_grad_mode_and_held_in_it():
    on_gpu(
        """
        side = torch.cuda.Stream()
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        base = stat("active_bytes.all.current")

        def held_after(scenario):
            # Bytes that wait for what was enqueued on side after the mark.
            value = scenario()
            done = torch.cuda.Event(); done.record(side)
            with held_up(side):
                done.synchronize()
                del value
                gc.collect()
                held = stat("active_bytes.all.current") - base
            torch.cuda.synchronize()
            assert stat("active_bytes.all.current") == base
            return held

        def input_():
            return torch.ones(1 << 20, device="cuda")

        def scope():
            x = input_()
            with esper_alloc.using(x, stream=side):
                x * weight
            return x

        def mark():
            x = input_()
            with torch.cuda.stream(side):
                x * weight
            esper_alloc.record_use(x, side)
            return x

        def mark_with_an_event():
            x = input_()
            with torch.cuda.stream(side):
                x * weight
            esper_alloc.record_use(x, event=side.record_event())
            return x

        def mark_in_a_list():
            xs = [input_()]
            with torch.cuda.stream(side):
                xs[0].sum()
            esper_alloc.record_use(xs, side)
            return xs

        for scenario in (scope, mark, mark_in_a_list):
            assert held_after(scenario) == 4 * MiB, scenario
            for off in (torch.no_grad, torch.inference_mode):
                assert held_after(off()(scenario)) == 0, scenario
        assert held_after(mark_with_an_event) == 0
        """
    )


# using


def test_using_orders_marks_and_restores():
    on_gpu(
        """
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        main = torch.cuda.current_stream()
        with torch.no_grad():
            torch.cuda._sleep(cycles(0.05))
            x = torch.full((1 << 22,), 3, device="cuda")
            with esper_alloc.using({"x": [x]}, stream=side) as scope:
                assert torch.cuda.current_stream() == side
                y = x + 1                       # after x was filled
                with esper_alloc.using(y, stream=other) as inner:
                    assert torch.cuda.current_stream() == other
                    z = y + 1
                assert torch.cuda.current_stream() == side
                inner.take(z)
            assert torch.cuda.current_stream() == main
            del x
            y = scope.take(y)
            assert (y == 4).all().item()
            a, b = scope.take(y, z)
            assert a is y and (b == 5).all().item()
            try:
                with esper_alloc.using(y, stream=side):
                    raise KeyError("inside")
            except KeyError:
                pass
            assert torch.cuda.current_stream() == main
            del y, a
            scope = esper_alloc.using(z, stream=side)
            with scope:
                with scope:
                    z.sum()
            assert torch.cuda.current_stream() == main
        """
    )


def test_marks_work_under_the_native_allocator():
    in_torch(
        """
        import torch, esper_alloc
        side = torch.cuda.Stream()
        for attempt in range(5):
            x = torch.full((1 << 24,), attempt, device="cuda")
            with esper_alloc.using(x, stream=side):
                torch.cuda._sleep(int(2e7))
                right = (x == attempt).all()
            event = torch.cuda.Event(); event.record(side)
            esper_alloc.record_use(x, side)
            esper_alloc.record_use(x, event=event)
            del x
            y = torch.full((1 << 24,), -1, device="cuda")
            side.synchronize()
            assert right.item()
        assert not esper_alloc.is_enabled()
        """
    )


# Snapshot and history


@pytest.mark.parametrize(
    ("kind", "action"), [("classic", "segment_alloc"), ("mapped", "segment_map")]
)
def test_history_and_viewer(tmp_path, kind: str, action: str):
    on_gpu(
        """
        from torch.cuda import _memory_viz as viz
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.cuda.memory._record_memory_history("all", context=None)
        assert torch._C._cuda_isHistoryEnabled()
        side = torch.cuda.Stream()
        with torch.autograd.profiler.record_function("step one"):
            x = bytes_of(24)
        address = x.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles(0.05))
        x.record_stream(side)
        del x
        torch.cuda.synchronize()
        y = bytes_of(24)
        snapshot = torch.cuda.memory._snapshot()
        trace = snapshot["device_traces"][0]
        mine = [e["action"] for e in trace if e["addr"] == address and e["size"] == 24 * MiB
                and not e["action"].startswith("segment")]
        assert mine == ["alloc", "free_requested", "free_completed", "alloc"], mine
        assert any(e["action"] == os.environ["SEGMENT_ACTION"] for e in trace)
        times = [e["time_us"] for e in trace]
        assert times == sorted(times)
        import time
        assert abs(times[-1] / 1e6 - time.time()) < 60
        assert "PYTORCH" not in str(snapshot["allocator_settings"]["max_split_size"])
        for render in (viz.trace_plot, viz.segment_plot):
            assert "<html" in render(snapshot).lower() or "script" in render(snapshot)
        assert viz.segsum(snapshot) and viz.trace(snapshot)
        torch.cuda.memory._dump_snapshot(os.path.join(os.environ["OUT_FOLDER"], "s.pickle"))

        torch.cuda.memory._record_memory_history("all", context=None, max_entries=5, clear_history=True)
        for _ in range(20):
            z = bytes_of(1)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        assert len(trace) <= 5, len(trace)

        torch.cuda.memory._record_memory_history(
            "all", context=None, skip_actions=["free_requested", "free_completed"], clear_history=True)
        z = bytes_of(1); del z
        actions = {e["action"] for e in torch.cuda.memory._snapshot()["device_traces"][0]}
        assert "alloc" in actions and not actions & {"free_requested", "free_completed"}, actions

        torch.cuda.memory._record_memory_history("state", context=None)
        assert torch._C._cuda_isHistoryEnabled()
        torch.cuda.memory._record_memory_history(None)
        assert not torch._C._cuda_isHistoryEnabled()
        assert torch.cuda.memory._snapshot()["device_traces"][0] == []
        """,
        env={"OUT_FOLDER": str(tmp_path), "ESPER_ALLOC_SEGMENTS": kind, "SEGMENT_ACTION": action},
    )
    assert (tmp_path / "s.pickle").stat().st_size > 0


def test_profiler_and_trace_hooks_see_allocations():
    on_gpu(
        """
        from torch.profiler import profile, ProfilerActivity
        torch.cuda.init()
        seen = []
        import torch.cuda._gpu_trace as gpu_trace
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            x = torch.empty(MiB, device="cuda")
            del x
        names = [e.name for e in profiler.events()]
        assert any("memory" in name.lower() for name in names), names
        torch._C._activate_gpu_trace()
        gpu_trace.register_callback_for_memory_allocation(lambda ptr: seen.append(("alloc", ptr)))
        gpu_trace.register_callback_for_memory_deallocation(lambda ptr: seen.append(("free", ptr)))
        x = torch.empty(MiB, device="cuda")
        address = x.data_ptr()
        del x
        assert seen == [("alloc", address), ("free", address)], seen
        """
    )


# Options


def test_options_reach_the_core_also_at_run_time():
    on_gpu(
        """
        x = bytes_of(1)
        assert stat("max_split_size") == 64 * MiB
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
        assert stat("max_split_size") == 128 * MiB
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:4")
        assert stat("max_split_size") == -1
        y = torch.empty(9 * MiB, dtype=torch.uint8, device="cuda")
        assert stat("requested_bytes.all.current") == 10 * MiB
        assert torch.cuda.memory_allocated() == 11 * MiB, torch.cuda.memory_allocated()
        """,
        env={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
    )


def test_options_of_captures_and_collection_warn_of_nothing():
    printed = on_gpu(
        """
        x = bytes_of(1)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        """,
        env={
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,"
            "garbage_collection_threshold:0.8,graph_capture_record_stream_reuse:True"
        },
    )
    assert "esper_alloc" not in printed, printed


def test_backend_option_of_the_native_allocator_is_accepted():
    on_gpu("bytes_of(1)", env={"PYTORCH_CUDA_ALLOC_CONF": "backend:native"})


def test_options_of_mempools_are_accepted():
    on_gpu(
        """
        for options in ({"use_on_oom": True}, {"no_split": True}):
            pool = torch.cuda.MemPool(**options)
            with torch.cuda.use_mem_pool(pool):
                x = bytes_of(1)
            x.fill_(7)
            assert (x == 7).all().item()
            assert len(pool.snapshot()) == 1
            del x, pool
        """
    )


# The function-pointer way


def test_pluggable_allocator():
    on_pluggable = """
        import torch, esper_alloc
        torch.cuda.memory.change_current_allocator(esper_alloc.pluggable_allocator())
        assert esper_alloc.is_enabled()
        side = torch.cuda.Stream()
        for attempt in range(10):
            x = torch.full((1 << 24,), attempt, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(2e7))
                right = (x == attempt).all()
            if attempt % 2:
                x.record_stream(side)
            else:
                esper_alloc.record_use(x, side)
            del x
            y = torch.full((1 << 24,), -1, device="cuda")
            side.synchronize()
            assert right.item(), attempt
            del y
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.5)
        """
    printed = in_torch(on_pluggable)
    assert "record_stream" not in printed, printed


def test_bare_constructor_warns_and_is_safe():
    printed = in_torch(
        """
        import torch, esper_alloc
        bare = torch.cuda.memory.CUDAPluggableAllocator(
            esper_alloc.library_path(), "esper_alloc_malloc", "esper_alloc_free")
        torch.cuda.memory.change_current_allocator(bare)
        side = torch.cuda.Stream()
        for attempt in range(10):
            x = torch.full((1 << 24,), attempt, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(2e7))
                right = (x == attempt).all()
            x.record_stream(side)      # cannot be seen
            del x
            y = torch.full((1 << 24,), -1, device="cuda")
            side.synchronize()
            assert right.item(), attempt
            del y
        """
    )
    assert printed.count("record_stream") == 1, printed


# The end


def test_quiet_exit_with_live_tensors_and_streams():
    printed = on_gpu(
        """
        keep = [bytes_of(3) for _ in range(5)]
        side = torch.cuda.Stream()
        keep[0].record_stream(side)
        esper_alloc.record_use(keep[1], side)
        sys.modules["kept_for_good"] = keep
        """
    )
    assert printed == "", printed


def test_sticky_errors_are_reported_by_the_next_allocation():
    # With classic segments: the driver's calls for pages do not report such errors.
    printed = on_gpu(
        """
        x = bytes_of(4)
        index = torch.tensor([10 ** 9], device="cuda")
        x[index] = 1                      # device-side assert
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            pass
        del x                             # silent
        try:
            # Cached memory may still be handed out; a driver call may not
            # pretend to have worked.
            kept = [bytes_of(64) for _ in range(4)]
        except RuntimeError as error:
            print("malloc:", str(error).splitlines()[0])
            sys.stdout.flush()
        os._exit(0)
        """,
        env={"ESPER_ALLOC_SEGMENTS": "classic"},
    )
    assert "malloc: CUDA error" in printed, printed
