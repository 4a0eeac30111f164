"""Mapped segments on a GPU: pages move under streams that are at work, and the figures
are the device's."""

import json
from pathlib import Path
from typing import Any

import pytest
from helper import HANG_S, run_fresh, run_python

MAPPED = {"ESPER_ALLOC_SEGMENTS": "mapped"}
MIB = 2**20

HEAD = """
import faulthandler
faulthandler.dump_traceback_later(LIMIT, exit=True)
import json
import random
import sys
import esper_alloc
esper_alloc.enable()
import torch

MIB = 2**20


def block(mib, value):
    one = torch.empty(int(mib * MIB) // 4, dtype=torch.int32, device="cuda")
    one.fill_(value)
    return one


def step(name):
    "What comes next: of a hang the last one is to blame."
    print(name, file=sys.stderr, flush=True)
"""

SMOKE = """
step("a page is made and mapped")
x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
step("it is written and read")
x.fill_(7)
assert (x == 7).all().item()
step("it is freed")
del x
step("pages go back")
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())
"""

STREAMS = """
step("other streams have segments of their own")
side = [torch.cuda.Stream() for _ in range(4)]
kept = []
for stream in side:
    with torch.cuda.stream(stream):
        kept.append(block(30, 3))
step("pages move while the stream is at work")
parts = [block(24, i) for i in range(4)]
torch.cuda._sleep(50_000_000)
del parts[::2]
large = block(48, 9)
assert (large == 9).all().item()
step("a thread without a context")
import threading
seen = []


def work():
    y = torch.empty(21 * MIB, dtype=torch.uint8, device="cuda")
    y.fill_(5)
    seen.append((y == 5).all().item())


thread = threading.Thread(target=work)
thread.start()
thread.join()
assert seen == [True]
step("all goes back")
del parts, large, kept
torch.cuda.synchronize()
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())
"""

CAPTURE = """
import threading


def work():  # of 24 MiB that are free elsewhere, and new ones
    made.append(torch.empty(48 * MIB, dtype=torch.uint8, device="cuda"))


x, made = block(4, 1), []
for mode in ("global", "thread_local", "relaxed"):
    step("pages are made and mapped inside a capture, " + mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x + 1
        z = torch.cat([y] * 8)
    step("replay")
    x.fill_(4)
    graph.replay()
    assert (z == 5).all().item()
    step("pages move in a thread while another stream is captured")
    kept = [block(24, 1), block(24, 2), block(24, 3)]
    del kept[1]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode=mode)
        w = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        other.capture_end()
    other.replay()
    assert (w == 0).all().item() and len(made) == 1
    made.clear()
    del y, z, w, graph, other, kept
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
print(torch.cuda.memory_reserved() // MIB)
"""


FIGURES = """
def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


block(1, 0)
for attempt in range(20):  # other processes take and give the device's memory, too
    torch.cuda.empty_cache()
    base, start = used(), torch.cuda.memory_reserved()
    rows = []

    def note(what):
        rows.append((what, used() - base, torch.cuda.memory_reserved() - start))

    parts = [block(24, i) for i in range(20)]
    note("twenty")
    kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    del parts[::2]
    note("ten free")
    large = block(200, 7)
    note("their pages moved")
    torch.cuda.empty_cache()
    note("emptied")
    del parts, large
    torch.cuda.empty_cache()
    note("all free")
    if all(abs(taken - reserved) <= 4 * MIB for _, taken, reserved in rows):
        break
print(json.dumps({"rows": rows, "kinds": sorted(kinds)}))
"""


# Each tensor holds a number of its own; the copies on the other device must show it.
PEERS = """
def on(device, mib, value):
    one = torch.empty(int(mib * MIB) // 4, dtype=torch.int32, device=f"cuda:{device}")
    return one.fill_(value)


def check(one, value, what):
    wrong = (one != value).sum().item()
    assert wrong == 0, (what, wrong, one.device, value)


def cross(x, value, what):
    for current in (0, 1):
        other = 1 - x.device.index
        with torch.cuda.device(current):
            y = x.to(f"cuda:{other}")
            check(y, value, what + ": to, whole")
            z = torch.empty_like(x)
            z.copy_(y, non_blocking=True)
            torch.cuda.synchronize(other)
            check(z, value, what + ": copy_, back")
            # A kernel of the one device reads and writes the other's memory.
            check(x[::2].to(f"cuda:{other}"), value, what + ": to, every second")
            part = torch.zeros(x.numel(), dtype=torch.int64, device=f"cuda:{other}")
            part[::2].copy_(x[1::2])
            check(part[::2], value, what + ": copy_, another type")
            check(part[1::2], 0, what + ": beside it")
            del y, z, part


peers = torch.cuda.can_device_access_peer(0, 1)
step(f"before any copy: memory that is there already; peers: {peers}")
early = [on(d, mib, 10 * d + i + 1) for d in (0, 1) for i, mib in enumerate((1, 24, 50))]
for i, x in enumerate(early):
    cross(x, 10 * (i // 3) + i % 3 + 1, "early")
step("memory that is mapped after the access was given")
late = [on(d, mib, 100 + 10 * d + i) for d in (0, 1) for i, mib in enumerate((3, 70, 130))]
for i, x in enumerate(late):
    cross(x, 100 + 10 * (i // 3) + i % 3, "late")
step("pages that move")
del early, late
torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
for d in (0, 1):
    parts = [on(d, 24, 200 + i) for i in range(8)]
    kept = [(200 + i, parts[i]) for i in range(1, 8, 2)]
    del parts
    large = on(d, 90, 300 + d)
    cross(large, 300 + d, "moved")
    for value, x in kept:
        cross(x, value, "stayed")
    del kept, large
step("all at once")
draw = random.Random(5)
live, number = [], 1000
for turn in range(150):
    number += 1
    d = draw.randrange(2)
    live.append((number, on(d, draw.choice((0.5, 3, 9, 21, 48)), number)))
    value, x = draw.choice(live)
    check(x.to(f"cuda:{1 - x.device.index}", non_blocking=draw.random() < 0.5), value, "random")
    while sum(x.numel() * 4 for _, x in live) > 300 * MIB:
        value, x = live.pop(draw.randrange(len(live)))
        check(x, value, "at the end")
    del x
    if turn % 41 == 40:
        torch.cuda.empty_cache()
for d in (0, 1):
    torch.cuda.synchronize(d)
traces = torch.cuda.memory._snapshot()["device_traces"][:2]
print(json.dumps({
    "unmapped": [sum(e["action"] == "segment_unmap" for e in trace) for trace in traces],
    "expandable": all(s["is_expandable"] for s in torch.cuda.memory_snapshot()),
}))
"""


def result(code: str, env: dict[str, str] = MAPPED) -> Any:
    """What the code's last line says. Shortly before it is taken to hang it prints where."""
    head = HEAD.replace("LIMIT", str(HANG_S - 15))
    return json.loads(run_python(head + code, env=env).splitlines()[-1])


# The cheapest ones first: what hangs here hangs everywhere.


def test_a_page_comes_and_goes() -> None:
    assert result(SMOKE) == 0


def test_classic_segments_ask_for_no_pages() -> None:
    count = """
import esper_alloc._core as compiled
calls = compiled.driver_calls()
print(sum(n for name, n in calls.items() if name.startswith(("page_", "range_"))))
"""
    assert result(SMOKE + count, {"ESPER_ALLOC_SEGMENTS": "classic"}) == 0
    assert result(SMOKE + count) >= 6


def test_streams_and_threads_have_pages() -> None:
    assert result(STREAMS) == 0


def test_pages_come_and_go_beside_captures() -> None:
    assert result(CAPTURE) <= 4


def test_reserved_bytes_are_the_devices() -> None:
    found = result(FIGURES)
    assert all(abs(used - reserved) <= 4 * MIB for _, used, reserved in found["rows"]), found
    assert found["kinds"] == [True]
    rows = {what: (used, reserved) for what, used, reserved in found["rows"]}
    assert rows["their pages moved"][1] < rows["twenty"][1] + 24 * MIB
    assert rows["emptied"][1] < rows["their pages moved"][1]
    assert rows["all free"][1] <= 0


@pytest.mark.two_gpus
def test_two_gpus_copy_mapped_memory_both_ways() -> None:
    found = result(PEERS)
    assert found["expandable"]
    assert min(found["unmapped"]) > 2  # else nothing moved


@pytest.mark.two_gpus
def test_two_gpus_copy_beside_classic_segments() -> None:
    """What was allocated before is classic, what comes after is mapped."""
    code = PEERS.replace('expandable": all', 'expandable": any')
    change = 'torch._C._accelerator_setAllocatorSettings("expandable_segments:True")\n'
    marker = 'step("memory that is mapped after the access was given")'
    assert marker in code
    assert result(code.replace(marker, change + marker), {"ESPER_ALLOC_SEGMENTS": "classic"})[
        "expandable"
    ]


SHARE = Path(__file__).with_name("conformance") / "share.py"


def shared(name: str) -> Any:
    """What the program of several processes says, all of them with mapped segments."""
    output = run_fresh(str(SHARE), name, env={**MAPPED, "ESPER_ALLOC": "1"})
    return json.loads(output.splitlines()[-1])


# The first one is quick, and tries all that the others need; conformance/sharing.py has more.


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("there_and_back", [499500, 7000, 0, 0]), ("stitched", [True, 10, True, 0]),
        ("neighbours_move", [True, 9, 0, 0]), ("other_segments", [499500, 7000, 0, 0]),
        pytest.param("from_afar", [True, 7, 0], marks=pytest.mark.two_gpus),
    ],
)  # fmt: skip
def test_processes_share_mapped_memory(name: str, answer: Any) -> None:
    assert shared(name) == answer


def test_a_native_handle_and_ours_exclude_each_other() -> None:
    """As with classic segments: the text says what to do."""
    code = """
import os
native = os.environ["KIND"] == "native"
if not native:
    import esper_alloc
    esper_alloc.enable()
import torch
x = torch.zeros(1000, device="cuda")
made = list(x.untyped_storage()._share_cuda_())
made[7] = False  # there is no event to wait for, which one process cannot share with itself
made[1] = bytes.fromhex(os.environ["HANDLE"]) if os.environ["HANDLE"] else made[1]
if os.environ["HANDLE"]:
    try:
        torch.UntypedStorage._new_shared_cuda(*made)
        print("opened")
    except Exception as error:
        print(str(error).splitlines()[0])
else:
    print(made[1].hex())
"""
    for theirs in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}):
        native = {"KIND": "native", "HANDLE": "", "ESPER_ALLOC": "0", **theirs}
        handle = run_python(code, env=native).splitlines()[-1]
        said = run_python(code, env={**MAPPED, "KIND": "ours", "HANDLE": handle}).splitlines()[-1]
        assert "was shared by a process that does not run on esper_alloc" in said
    handle = run_python(code, env={**MAPPED, "KIND": "ours", "HANDLE": ""}).splitlines()[-1]
    native = {"KIND": "native", "HANDLE": handle, "ESPER_ALLOC": "0"}
    assert run_python(code, env=native).splitlines()[-1] != "opened"
