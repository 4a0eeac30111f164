"""PyTorch on esper_alloc: the swap, code that is compiled against the allocator, function pointers.

What a program sees is in conformance/, and how processes end in programs/exits.py.

Each scenario is a fresh process on the GPU.
"""

import textwrap

from helper import run_python
from scenario import PROGRAMS

#: What a process prints, libraries' complaints included, is one text.
TOGETHER = "import os; os.dup2(1, 2)\n"

ENABLE = f"""
import gc, os, sys
import torch
import esper_alloc
sys.path.insert(0, {str(PROGRAMS)!r})
from device import calibrate, other_streams
esper_alloc.enable()

MiB = 1 << 20

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


def test_cudnn_benchmark_convolution():
    on_gpu("""
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
        """)


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


# The function-pointer way

#: A use is not seen by a free that comes before it, unless it is marked.
POINTERS = """
import torch, esper_alloc
allocator = ALLOCATOR
torch.cuda.memory.change_current_allocator(allocator)
side = torch.cuda.Stream()
for attempt in range(10):
    x = torch.full((1 << 24,), attempt, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(2e7))
        right = (x == attempt).all()
    if MARKED and attempt % 2 == 0:
        esper_alloc.record_use(x, side)
    else:
        x.record_stream(side)
    del x
    y = torch.full((1 << 24,), -1, device="cuda")
    side.synchronize()
    assert right.item(), attempt
    del y
"""


def test_pluggable_allocator():
    begin = POINTERS.replace("ALLOCATOR", "esper_alloc.pluggable_allocator()")
    printed = in_torch(
        begin.replace("MARKED", "True")
        + """
assert esper_alloc.is_enabled()
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(0.5)
"""
    )
    assert "record_stream" not in printed, printed


def test_bare_constructor_warns_and_is_safe():
    """It cannot see record_stream."""
    bare = """torch.cuda.memory.CUDAPluggableAllocator(
    esper_alloc.library_path(), "esper_alloc_malloc", "esper_alloc_free")"""
    printed = in_torch(POINTERS.replace("ALLOCATOR", bare).replace("MARKED", "False"))
    assert printed.count("record_stream") == 1, printed
