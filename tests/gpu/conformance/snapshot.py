"""torch.cuda.memory._snapshot() and memory_snapshot()."""

import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from ground import MiB, all_stats, busy, bytes_of, let_pass, scenario


def taken() -> dict[str, Any]:
    return torch.cuda.memory._snapshot()


@scenario()
def keys() -> Any:
    x = bytes_of(1000)
    picture = taken()
    segment = picture["segments"][0]
    del x
    return [
        sorted(picture),
        {key: type(segment[key]).__name__ for key in sorted(segment)},
        sorted(segment["blocks"][0]),
        sorted(picture["allocator_settings"]),
        len(picture["device_traces"]),
        picture["device_traces"],
        [a for a in picture["external_annotations"] if not a["name"].startswith("esper_alloc.")],
    ]


def figures(segments: list[dict[str, Any]]) -> dict[str, int]:
    """Those of memory_stats() that are sums over a snapshot."""
    found: dict[str, int] = {}

    def add(name: str, size_class: str, amount: int) -> None:
        for which in ("all", size_class):
            key = f"{name}.{which}.current"
            found[key] = found.get(key, 0) + amount

    for segment in segments:
        size_class = segment["segment_type"] + "_pool"
        add("segment", size_class, 1)
        add("reserved_bytes", size_class, segment["total_size"])
        for block in segment["blocks"]:
            live = block["state"] == "active_allocated"
            active = block["state"] != "inactive"
            add("allocation", size_class, live)
            add("allocated_bytes", size_class, live * block["size"])
            add("active", size_class, active)
            add("active_bytes", size_class, active * block["size"])
            add("requested_bytes", size_class, active * block["requested_size"])
            # What is free in an expandable segment can go, and is not counted.
            split = not active and len(segment["blocks"]) > 1 and not segment["is_expandable"]
            add("inactive_split", size_class, split)
            add("inactive_split_bytes", size_class, split * block["size"])
    return found


@scenario()
def its_sums_are_the_statistics() -> Any:
    kept = [bytes_of(size) for size in (1, 5000, 3 * MiB, 14 * MiB, 700_000, 31 * MiB)]
    del kept[1], kept[2]
    segments = taken()["segments"]
    sums, every = figures(segments), all_stats()
    addresses = [segment["address"] for segment in segments]
    tiled = all(
        [block["address"] for block in segment["blocks"]]
        == [
            segment["address"] + sum(b["size"] for b in segment["blocks"][:i])
            for i in range(len(segment["blocks"]))
        ]
        and sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        for segment in segments
    )
    return [
        {key: every[key] - value for key, value in sums.items() if every[key] != value},
        addresses == sorted(addresses),
        tiled,
        sum(segment["allocated_size"] for segment in segments)
        == every["allocated_bytes.all.current"],
        sum(segment["active_size"] for segment in segments) == every["active_bytes.all.current"],
        sum(segment["requested_size"] for segment in segments)
        == every["requested_bytes.all.current"],
    ]


@scenario()
def states_of_blocks() -> Any:
    side = torch.cuda.Stream()
    x, _y, z = bytes_of(12 * MiB), bytes_of(14 * MiB), bytes_of(16 * MiB)
    x.record_stream(side)
    busy(side)
    del x, z
    segments = sorted(taken()["segments"], key=lambda s: s["total_size"])
    return [
        [s["total_size"], s["allocated_size"], s["active_size"], s["requested_size"],
         [(b["size"], b["requested_size"] if b["state"] != "inactive" else 0, b["state"]) for b in s["blocks"]]]
        for s in segments
    ]  # fmt: skip


@scenario()
def the_stream_of_a_segment() -> Any:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = bytes_of(12 * MiB)
    y = bytes_of(14 * MiB)
    streams = {s["total_size"]: s["stream"] for s in taken()["segments"]}
    del x, y
    return [streams[12 * MiB] == side.cuda_stream, streams[14 * MiB]]


@scenario()
def memory_snapshot_of_pools() -> Any:
    _x = bytes_of(1000)
    every = torch.cuda.memory_snapshot()
    default = torch.cuda.memory_snapshot((0, 0))
    none = torch.cuda.memory_snapshot((5, 5))
    bare = torch.cuda.memory_snapshot((0, 0), include_traces=False)
    return [len(every), len(default), len(none), len(bare), every[0]["segment_pool_id"]]


@scenario()
def dumps() -> Any:
    _x = bytes_of(1000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        loaded = pickle.loads(path.read_bytes())
    return [sorted(loaded), len(loaded["segments"])]


@scenario()
def viewers() -> Any:
    """Whether torch/cuda/_memory_viz.py makes something of it."""
    import torch.cuda._memory_viz as viz

    seen: list[str] = []

    def draw(lines: str) -> str:  # in place of a program that is fetched from the network
        seen.append(lines)
        return "drawn"

    torch.cuda.memory._record_memory_history(max_entries=1000)
    side = torch.cuda.Stream()
    x, y = bytes_of(12 * MiB), bytes_of(1000)
    x.record_stream(side)
    busy(side)
    del x
    z = bytes_of(31 * MiB)
    before = taken()
    del z
    let_pass()
    torch.cuda.empty_cache()
    picture = taken()
    torch.cuda.memory._record_memory_history(enabled=None)
    del y
    answers = [
        viz.segments(picture, draw), viz.memory(picture, draw),
        viz.compare(before["segments"], picture["segments"], draw), len(viz.segsum(picture)) > 100,
        "cudaMalloc" in viz.trace(picture), len(viz.trace_plot(picture)) > 1000,
        len(viz.segment_plot(picture)) > 1000,
    ]  # fmt: skip
    return [answers, [bool(lines) for lines in seen]]
