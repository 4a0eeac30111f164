#!/usr/bin/env python3
"""Writes the figures of benchmarks/results into the README's "Measured" section.

python benchmarks/readme.py            # write
python benchmarks/readme.py --check    # exit status 1 if the README is not up to date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin (benchmarks/readme.py) -->", "<!-- figures: end -->"

#: Topic, name of the row, peer, and what the README calls it. Of rows with several names,
#: for what was measured in more than one way, the newest is shown.
SHOWN: list[tuple[str, str | tuple[str, ...], str, str]] = [
    *(  # on segments of its own choice, which are mapped where the driver can, or those asked for
        (
            "jobs",
            (f"{job}: {figure}", f"{job}, mapped segments: {figure}"),
            peer,
            f"{label}, {figure}",
        )
        for job, label in (
            ("gpt2", "GPT-2 124M training"),
            ("llama_varlen", "Llama training on sequences of 64 to 2,048 tokens"),
            ("llama_decode", "Llama decoding with a growing cache"),
            ("resnet50", "ResNet-50 training (`cudnn.benchmark` off)"),
            ("ppo", "PPO with small networks"),
        )
        for figure, peer in (
            ("peak reserved", "least peak allocated of any peer"),
            ("step time", "fastest peer"),
        )
    ),
    *(
        (
            "limits",
            f"{job}: largest batch within 20 GiB",
            "best peer",
            f"{label}, largest batch in 20 GiB",
        )
        for job, label in (
            ("gpt2", "GPT-2 124M training on 256 tokens"),
            ("llama_varlen", "Llama training on 64 to 512 tokens"),
        )
    ),
    (
        "malloc_times",
        "gpt_train: malloc, the whole job, 99.9th percentile",
        "native",
        "99.9th percentile of malloc time, allocations of a recorded GPT-2 training",
    ),
    (
        "startup",
        "import torch and esper_alloc",
        "import torch",
        "importing torch, and esper_alloc after it",
    ),
    ("startup", "idle device memory", "native", "idle, device memory in use"),
    (
        "startup",
        "first allocation to the end of the first kernel",
        "native",
        "first allocation to the end of the first kernel",
    ),
    ("pair", "raw_alloc + raw_delete, 512 B", "native", "`raw_alloc` + `raw_delete`, 512 B"),
    ("pair", "raw_alloc + raw_delete, 1 MiB", "native", "`raw_alloc` + `raw_delete`, 1 MiB"),
    ("pair", "raw_alloc + raw_delete, 64 MiB", "native", "`raw_alloc` + `raw_delete`, 64 MiB"),
    *(
        (
            "churn",
            f"free and malloc among {live} live blocks up to {most}",
            "native",
            f"the same among {live} live blocks",
        )
        for live, most in (("10,000", "8 MiB"), ("1,000,000", "64 KiB"))
    ),
    *(
        ("threads", f"{what}, 4 KiB, 16 threads", "native", label)
        for what, label in (
            ("pairs", "16 threads, a stream each, pairs a second"),
            ("pairs, handed on", "the same, freed by the next thread"),
        )
    ),
    (
        "precision",
        "dropped memory serves again after, 50 ms of work queued",
        "native, record_stream",
        "a dropped tensor's memory serves again after, with 50 ms of other work queued on its reader",
    ),
    (
        "pipeline",
        "peak active over base",
        "native, record_stream",
        "FSDP-like pipeline of 48 layers, peak memory of the gathered weights and x",
    ),
    ("pipeline", "peak active over base", "native, recipe", "the same"),
    ("pipeline", "step time", "native, record_stream", "the same, step time"),
    ("pipeline", "step time", "native, recipe", "the same"),
    (
        "prefetch",
        "compute-bound: peak active over base",
        "native, record_stream",
        "prefetching on a copy stream, peak memory of the batches and the work on them",
    ),
    (
        "prefetch",
        "compute-bound: time a batch",
        "native, record_stream",
        "the same, time a batch",
    ),
    (
        "record_use_cost",
        "record_use, cycle",
        "native, record_stream",
        "allocate, mark for another stream, drop (Python)",
    ),
    ("record_use_cost", "C, esper_alloc_record_use", "cuEventRecord", "a mark in C"),
    (
        "captures",
        "a graph's private pool",
        "native, record_stream",
        "a captured graph with readers on a side stream, its private pool",
    ),
    (
        "captures",
        "a graph's private pool",
        "native, graph_capture_record_stream_reuse",
        "the same",
    ),
    *(
        (
            "gather",
            f"a batch, {form}",
            "native, plain PyTorch",
            f"CIFAR batches of {label}, gathered",
        )
        for form, label in (
            ("1 x 512", "512 images for one environment"),
            ("4 x 128", "128 for each of 4"),
            ("16 x 32", "32 for each of 16"),
            ("64 x 32", "32 for each of 64"),
        )
    ),
    *(
        (
            "normalize",
            f"update_and_normalize, {shape}",
            "plain PyTorch",
            f"running mean-std, {label}",
        )
        for shape, label in (
            ("64x64", "batches of 64 x 64"),
            ("1024x128", "of 1024 x 128"),
            ("65536x64", "of 65536 x 64"),
        )
    ),
    *(
        (
            "cifar_envs",
            f"16 environments on {on}",
            "native, plain PyTorch",
            f"16 networks on CIFAR, {label}",
        )
        for on, label in (
            ("one GPU: a step", "a stream each, a step"),
            ("one GPU: peak reserved", "peak reserved"),
            ("two GPUs, 10 and 6 environments: a step", "10 and 6 of them on two GPUs, a step"),
        )
    ),
    (
        "cudagraph_outputs",
        "simulator fp32, 1024 x 1024: graphs with the wrapper",
        "eager",
        "a simulator of 1024 x 1024, CUDA graphs with `cudagraph_outputs`",
    ),
]


def load(topic: str) -> dict[str, Any]:
    """A result file; one without rows where the topic was not measured yet."""
    try:
        found: dict[str, Any] = json.loads((RESULTS / f"{topic}.json").read_text())
    except FileNotFoundError:
        return {"runs": [], "rows": []}
    return found


def find(topic: str, names: str | tuple[str, ...], peer: str) -> dict[str, Any] | None:
    """The newest row of these names, with its run in place of the run's id; None: not
    measured yet."""
    results = load(topic)
    runs = {run["id"]: run for run in results["runs"]}
    wanted = (names,) if isinstance(names, str) else names
    found = [
        {**row, "run": runs[row["run"]]}
        for row in results["rows"]
        if row["name"] in wanted and row["peer_name"] == peer
    ]
    return max(found, key=lambda row: str(row["run"]["time"]), default=None)


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def judged(row: dict[str, Any]) -> tuple[float, str]:
    """The ratio that a row's goal is about, and what the goal is."""
    how, goal = row.get("judged", "ratio"), row["goal"]
    ratio: float = row.get("mean_ratio", row["ratio"]) if how == "mean_ratio" else row["ratio"]
    if goal is None:
        return ratio, ""
    said = {
        "at_least": f"at least {goal:.3g}",
        "difference": f"at most {goal:.3g} {row['unit']} more",
        "no_worse": "no worse",
        "ours": f"at most {goal:.3g} {row['unit']}",
    }.get(how, f"at most {goal:.3g}")
    return ratio, said + (", missed" if row.get("met") is False else "")


def render() -> str:
    lines = ["| | esper_alloc | native | | ratio | goal |", "|---|---|---|---|---|---|"]
    machines: set[str] = set()
    commits: set[str] = set()
    left_out: set[tuple[str, str, str]] = set()
    for topic, names, peer, label in SHOWN:
        row = find(topic, names, peer)
        if row is None:
            continue
        run = row["run"]
        machines.add(f"{run['gpu']}, driver {run['driver']}, torch {run['torch']}")
        commits.add(run["commit"])
        left_out.update((topic, *one) for one in run.get("left_out", {}).items())
        beside = peer.removeprefix("native").removeprefix(", ")
        ratio, goal = judged(row)
        lines.append(
            f"| {label} | {figure(row['ours'])} {row['unit']} | {figure(row['peer'])} "
            f"{row['unit']} | {beside} | {ratio:.3f} | {goal} |"
        )
    lines += [
        "",
        f"On {'; '.join(sorted(machines))}, at commits {', '.join(sorted(commits))};",
        "esper_alloc and the peer alternated in one command. Figures are medians, and the ratio is",
        "theirs, but of step times the mean of the rounds' ratios.",
    ]
    lines += [
        f"Not measured by {topic}.py: {name} ({why})." for topic, name, why in sorted(left_out)
    ]
    return "\n".join(lines)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n{render()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("README.md does not show benchmarks/results: run benchmarks/readme.py")
        return int(wanted != text)
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
