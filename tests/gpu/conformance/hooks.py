"""Side channels: GPU trace callbacks, the profiler, the sanitizer."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from ground import MiB, bytes_of, scenario, type_of_error
from torch.profiler import ProfilerActivity, profile


@scenario()
def a_gpu_trace_sees_memory() -> Any:
    from torch.cuda import _gpu_trace

    events: list[Any] = []
    _gpu_trace.register_callback_for_memory_allocation(lambda p: events.append(["alloc", p]))
    _gpu_trace.register_callback_for_memory_deallocation(lambda p: events.append(["free", p]))
    torch._C._activate_gpu_trace()  # for good: callbacks cannot be taken back
    x = bytes_of(1000)
    p = x.data_ptr()
    y = torch.empty(0, device="cuda")
    del x, y
    first = [[what, pointer == p] for what, pointer in events]
    events.clear()
    raw = torch.cuda.caching_allocator_alloc(100)
    torch.cuda.caching_allocator_delete(raw)
    second = [[what, pointer == raw] for what, pointer in events]
    events.clear()
    torch.cuda.caching_allocator_enable(False)
    z = bytes_of(100)
    q = z.data_ptr()
    del z
    torch.cuda.caching_allocator_enable(True)
    return [first, second, [[what, pointer == q] for what, pointer in events]]


@scenario()
def a_callback_may_use_the_allocator() -> Any:
    from torch.cuda import _gpu_trace

    seen: list[int] = []
    busy = [False]

    def look(_: int) -> None:
        if not busy[0]:
            busy[0] = True
            seen.append(torch.cuda.memory_allocated())
            bytes_of(512)
            busy[0] = False

    _gpu_trace.register_callback_for_memory_allocation(look)
    x = bytes_of(1000)
    busy[0] = True
    return [seen, torch.cuda.memory_allocated(), x.numel()]


def told(p: profile, name: str) -> list[dict[str, Any]]:
    """The arguments of a trace's events of that name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        p.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [e["args"] for e in events if e.get("name") == name]


@scenario()
def the_profilers_totals() -> Any:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        x = bytes_of(3 * MiB)
        del x
    found = told(p, "[memory]")
    return [
        [a["Bytes"], a["Total Allocated"], a["Total Reserved"], a["Device Id"]]
        for a in found
        if a.get("Device Type") == 1
    ]


@scenario()
def the_profiler_sees_what_there_was_no_memory_for() -> Any:
    """The request, rounded up, beside what is there."""
    x = bytes_of(12 * MiB)
    torch.cuda.set_per_process_memory_fraction(0.0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        error = type_of_error(lambda: bytes_of(3 * MiB - 7))
    torch.cuda.set_per_process_memory_fraction(1.0)
    found = told(p, "[OutOfMemory]")
    names = ("Bytes", "Total Allocated", "Total Reserved", "Device Type", "Device Id")
    del x
    return [error, [[a.get(name) for name in names] for a in found]]


@scenario("gpu")
def the_sanitizer_sees_a_race() -> Any:
    import subprocess
    import sys

    code = """
import torch, os
{}
torch.cuda.init()
x = torch.ones(1000, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    x.add_(1)
torch.cuda.synchronize()
"""
    import os

    enable = (
        ""
        if torch.cuda.get_allocator_backend() == "native"
        else "import esper_alloc; esper_alloc.enable()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(enable)], capture_output=True, text=True,
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"}, timeout=1200,
    )  # fmt: skip
    return ["data race" in done.stderr, done.returncode != 0]
