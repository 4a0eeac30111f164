"""Mapped segments on a GPU: pages move under streams that are at work, and the figures
are the device's."""

from __future__ import annotations

import json
from typing import Any

from helper import run_python

MAPPED = {"ESPER_ALLOC_SEGMENTS": "mapped"}
MIB = 2**20

HEAD = """
import faulthandler
faulthandler.dump_traceback_later(LIMIT, exit=True)
import json
import random
import esper_alloc
esper_alloc.enable()
import torch

MIB = 2**20


def block(mib, value):
    one = torch.empty(int(mib * MIB) // 4, dtype=torch.int32, device="cuda")
    one.fill_(value)
    return one


def actions():
    torch.cuda.synchronize()
    [trace] = torch.cuda.memory._snapshot()["device_traces"][:1]
    return [entry["action"] for entry in trace]
"""

# Each line is the step that comes next: of a hang the last one is to blame.
SMOKE = """
import sys


def step(name):
    print(name, file=sys.stderr, flush=True)


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
import sys


def step(name):
    print(name, file=sys.stderr, flush=True)


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
import sys


def step(name):
    print(name, file=sys.stderr, flush=True)


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

# Every tensor holds its own number; what moves under it would show another.
MOVES = """
torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
draw = random.Random(SEED)
side = [torch.cuda.Stream() for _ in range(3)]
main = torch.cuda.current_stream()
bads = {}
live, wrong, number = [], torch.zeros((), dtype=torch.int64, device="cuda"), 0
for step in range(400):
    torch.cuda._sleep(draw.randrange(2_000_000))
    number += 1
    live.append((number, block(draw.choice((2.5, 5, 9, 21, 33, 48, 70)), number)))
    if draw.random() < 0.4:  # read late on another stream, and marked
        value, one = draw.choice(live)
        stream = draw.choice(side)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(draw.randrange(4_000_000))
            seen = (one != value).sum()
            bad = bads.setdefault(stream, torch.zeros((), dtype=torch.int64, device="cuda"))
            bad += seen
        esper_alloc.record_use(one, stream)
        del one, seen
    while sum(one.numel() * 4 for _, one in live) > 600 * MIB:
        value, one = live.pop(draw.randrange(len(live)))
        wrong += (one != value).sum()
        del one
    if step % 97 == 96:
        torch.cuda.empty_cache()
for value, one in live:
    wrong += (one != value).sum()
torch.cuda.synchronize()
seen = actions()
print(json.dumps({
    "wrong": wrong.item() + sum(bad.item() for bad in bads.values()),
    "unmapped": seen.count("segment_unmap"),
    "mapped": seen.count("segment_map"),
}))
"""

FIGURES = """
def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


block(1, 0)
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
print(json.dumps({"rows": rows, "kinds": sorted(kinds)}))
"""

LENGTHS = """
draw = random.Random(3)
weights = [block(32, 0) for _ in range(24)]
for step in range(40):
    tokens = draw.randrange(1, 7) * draw.randrange(64, 2049)
    kept = []
    for layer in range(24):
        kept += [block(tokens * 4096 / MIB, 1), block(tokens * 11008 / MIB, 2)]
        block(tokens * 7000 / MIB, 3)
    logits = block(tokens * 128_000 / MIB, 4)
    del logits
    while kept:
        block(tokens * 11008 / MIB, 5)
        kept.pop()
print(json.dumps({
    "allocated": torch.cuda.max_memory_allocated(),
    "reserved": torch.cuda.max_memory_reserved(),
    "retries": torch.cuda.memory_stats()["num_alloc_retries"],
}))
"""


def result(code: str, env: dict[str, str] = MAPPED, limit: int = 240) -> Any:
    """What the code's last line says. After `limit` seconds it prints where it hangs."""
    head = HEAD.replace("LIMIT", str(limit))
    return json.loads(run_python(head + code, env=env, timeout=limit + 15).splitlines()[-1])


# The cheapest ones first: what hangs here hangs everywhere.


def test_a_page_comes_and_goes() -> None:
    assert result(SMOKE, limit=45) == 0


def test_classic_segments_come_and_go_beside_them() -> None:
    assert result(SMOKE, {"ESPER_ALLOC_SEGMENTS": "classic"}, limit=45) == 0


def test_classic_segments_ask_for_no_pages() -> None:
    count = """
import esper_alloc._core as compiled
calls = compiled.driver_calls()
print(sum(n for name, n in calls.items() if name.startswith(("page_", "range_"))))
"""
    assert result(SMOKE + count, {"ESPER_ALLOC_SEGMENTS": "classic"}, limit=45) == 0
    assert result(SMOKE + count, limit=45) >= 6


def test_streams_and_threads_have_pages() -> None:
    assert result(STREAMS, limit=45) == 0


def test_pages_come_and_go_beside_captures() -> None:
    assert result(CAPTURE, limit=60) <= 4


def test_nothing_changes_under_pages_that_move() -> None:
    for seed in range(4):
        found = result(MOVES.replace("SEED", str(seed)))
        assert found["wrong"] == 0
        # Else nothing was tried: pages moved, and some between two empty_caches.
        assert found["unmapped"] > 8 and found["mapped"] > 20


def test_reserved_bytes_are_the_devices() -> None:
    for _ in range(5):  # other processes take and give the device's memory, too
        found = result(FIGURES)
        if all(abs(used - reserved) <= 4 * MIB for _, used, reserved in found["rows"]):
            break
    else:
        raise AssertionError(found)
    assert found["kinds"] == [True]
    rows = {what: (used, reserved) for what, used, reserved in found["rows"]}
    assert rows["their pages moved"][1] < rows["twenty"][1] + 24 * MIB
    assert rows["emptied"][1] < rows["their pages moved"][1]
    assert rows["all free"][1] <= 0


def test_variable_lengths_reserve_little_more_than_is_live() -> None:
    found = result(LENGTHS)
    assert found["allocated"] > 1024 * MIB
    assert found["reserved"] <= 1.05 * found["allocated"], found
    assert found["retries"] == 0


def test_expandable_segments_are_mapped_ones() -> None:
    code = "a = block(64, 1)\nprint(json.dumps(torch.cuda.memory_snapshot()[0]['is_expandable']))"
    assert result(code, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) is True
    assert result(code, {"ESPER_ALLOC_SEGMENTS": "classic"}) is False
