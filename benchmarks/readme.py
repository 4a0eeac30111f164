#!/usr/bin/env python3
"""Writes the figures of benchmarks/results into the documents that show them.

    python benchmarks/readme.py            # write
    python benchmarks/readme.py --check    # name what is stale; exit status 1 if anything is

README.md has a few rows and five sentences with figures, docs/results.md has all rows, and
benchmarks/results/pipeline.svg is the README's picture, which needs matplotlib. What stands
outside of the marks "figures: begin" and "figures: end" is left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin (benchmarks/readme.py) -->", "<!-- figures: end -->"
PICTURE = "pipeline.svg"

Names = str | tuple[str, ...]

#: Topic, name of the row, peer, and what docs/results.md calls it. Of rows with several names,
#: for what was measured in more than one way, the newest is shown.
ALL: list[tuple[str, Names, str, str]] = [
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

#: The README's rows: topic, name, peer, what was measured, and what it is compared with.
FEW: list[tuple[str, Names, str, str, str]] = [
    (
        "pipeline",
        "peak active over base",
        "native, record_stream",
        "FSDP-like steps on two streams: peak memory of gathered weights",
        "`record_stream`",
    ),
    (
        "pipeline",
        "peak active over base",
        "native, recipe",
        "the same",
        "tensors kept by hand beside events",
    ),
    (
        "pipeline",
        "step time",
        "native, recipe",
        "the same, time of a step",
        "tensors kept by hand beside events",
    ),
    (
        "prefetch",
        "compute-bound: peak active over base",
        "native, record_stream",
        "prefetching batches on a copy stream: peak memory",
        "`record_stream`",
    ),
    (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "native, expandable",
        "Llama training, sequences of 64 to 2,048 tokens: peak reserved",
        "expandable segments",
    ),
    (
        "jobs",
        ("gpt2: step time", "gpt2, mapped segments: step time"),
        "native, expandable",
        "GPT-2 124M training: time of a step",
        "expandable segments",
    ),
    (
        "gather",
        "a batch, 16 x 32",
        "native, plain PyTorch",
        "CIFAR batches for 16 networks on one GPU, gathered",
        "plain PyTorch",
    ),
    (
        "malloc_times",
        "gpt_train: malloc, the whole job, 99.9th percentile",
        "native",
        "99.9th percentile of malloc time while GPT-2's memory grows",
        "PyTorch's default",
    ),
]

#: The README's sentences, each with a link to its file. `{x.ours}` and `{x.peer}` are figures of SAID["x"].
BULLETS = """\
- **[Memory comes back at the last read.](benchmarks/results/precision.json)** A tensor whose reader
  has 50 ms of other work queued serves again after {dropped.ours}; with `record_stream` after {dropped.peer}.
- **[The GPU waits, not the host.](benchmarks/results/pipeline.json)** A stream that wants such memory
  earlier waits on the GPU. Steps that gather weights on one stream and use them on another, as FSDP
  does, take {step.ours} and {peak.ours}; with `record_stream` {step.peer} and {peak.peer}.
- **[CUDA graphs gain, too.](benchmarks/results/captures.json)** A captured graph with readers on a side
  stream has a private pool of {graph.ours}; with `record_stream` of {graph.peer}.
- **[Little is wasted.](benchmarks/results/jobs.json)** Training a Llama on sequences of random lengths
  reserves {llama.ours}, of which {live.peer} are live; PyTorch's default reserves {llama.peer}.
- **[Jobs on one stream gain little.](benchmarks/results/jobs.json)** GPT-2 124M takes {gpt2.ours} and
  {gpt2_step.ours} a step; with PyTorch's expandable segments {gpt2.peer} and {gpt2_step.peer}."""
SAID: dict[str, tuple[str, Names, str]] = {
    "dropped": (
        "precision",
        "dropped memory serves again after, 50 ms of work queued",
        "native, record_stream",
    ),
    "step": ("pipeline", "step time", "native, record_stream"),
    "peak": ("pipeline", "peak active over base", "native, record_stream"),
    "graph": ("captures", "a graph's private pool", "native, record_stream"),
    "llama": (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "native",
    ),
    "live": (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "least peak allocated of any peer",
    ),
    "gpt2": (
        "jobs",
        ("gpt2: peak reserved", "gpt2, mapped segments: peak reserved"),
        "native, expandable",
    ),
    "gpt2_step": (
        "jobs",
        ("gpt2: step time", "gpt2, mapped segments: step time"),
        "native, expandable",
    ),
}


def load(topic: str) -> dict[str, Any]:
    """A result file; one without rows where the topic was not measured yet."""
    try:
        found: dict[str, Any] = json.loads((RESULTS / f"{topic}.json").read_text())
    except FileNotFoundError:
        return {"runs": [], "rows": []}
    return found


def find(topic: str, names: Names, peer: str) -> dict[str, Any] | None:
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


def needed(topic: str, names: Names, peer: str) -> dict[str, Any]:
    """find() of a row that may not be missing."""
    row = find(topic, names, peer)
    if row is None:
        raise SystemExit(
            f"benchmarks/results/{topic}.json has no row {names!r} beside {peer!r}, which the "
            f"README shows: measure it with benchmarks/{topic}.py, or show another one"
        )
    return row


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(row: dict[str, Any]) -> str:
    """Of the two figures as they are shown, so that whoever divides them finds it."""
    ours, peer = (float(figure(row[side]).replace(",", "")) for side in ("ours", "peer"))
    found = ours / peer
    return f"{found:.1f}" if found >= 10 else f"{found:.2f}"


def goal_of(row: dict[str, Any]) -> str:
    """What a row's goal is, and whether it is met."""
    how, goal = row.get("judged", "ratio"), row["goal"]
    if goal is None:
        return ""
    said = {
        "at_least": f"at least {goal:.3g}",
        "difference": f"at most {goal:.3g} {row['unit']} more",
        "no_worse": "no worse",
        "ours": f"at most {goal:.3g} {row['unit']}",
    }.get(how, f"at most {goal:.3g}")
    if how == "mean_ratio" and "mean_ratio" in row:
        said += f"; the rounds' mean is {row['mean_ratio']:.3f}"
    return said + (", missed" if row.get("met") is False else "")


class Said(NamedTuple):
    """A row's two figures with their unit."""

    ours: str
    peer: str


def said(topic: str, names: Names, peer: str) -> Said:
    row = needed(topic, names, peer)
    return Said(*(f"{figure(row[side])} {row['unit']}" for side in ("ours", "peer")))


def machine(run: dict[str, Any]) -> str:
    return f"{run['gpu']}, driver {run['driver']}, torch {run['torch']}"


def bullets() -> str:
    return BULLETS.format(**{name: said(*which) for name, which in SAID.items()})


def few_rows() -> str:
    lines = ["| measured | esper_alloc | compared with | its figure | ratio |"]
    lines.append("|---|---|---|---|---|")
    runs = []
    for topic, names, peer, label, beside in FEW:
        row = needed(topic, names, peer)
        runs.append(row["run"])
        lines.append(
            f"| [{label}](benchmarks/results/{topic}.json) | {figure(row['ours'])} {row['unit']} "
            f"| {beside} | {figure(row['peer'])} {row['unit']} | {ratio(row)} |"
        )
    days = sorted({run["time"][:10] for run in runs})
    lines += [
        "",
        f"Medians on {'; '.join(sorted({machine(run) for run in runs}))}, measured from "
        f"{days[0]} to {days[-1]}. Both sides took turns in one command.",
    ]
    return "\n".join(lines)


def all_rows() -> str:
    lines = ["| | esper_alloc | compared with | its figure | ratio | goal |"]
    lines.append("|---|---|---|---|---|---|")
    machines: set[str] = set()
    commits: set[str] = set()
    left_out: set[tuple[str, str, str]] = set()
    for topic, names, peer, label in ALL:
        row = find(topic, names, peer)
        if row is None:
            continue
        run = row["run"]
        machines.add(machine(run))
        commits.add(run["commit"])
        left_out.update((topic, *one) for one in run.get("left_out", {}).items())
        lines.append(
            f"| {label} | {figure(row['ours'])} {row['unit']} | {peer} | {figure(row['peer'])} "
            f"{row['unit']} | {ratio(row)} | {goal_of(row)} |"
        )
    lines += [
        "",
        f"On {'; '.join(sorted(machines))}, at commits {', '.join(sorted(commits))};",
        "both sides took turns in one command. Figures are medians, and the ratio is",
        "theirs. Goals for step times are judged by the mean of the rounds' ratios.",
    ]
    lines += [
        f"Not measured by {topic}.py: {name} ({why})." for topic, name, why in sorted(left_out)
    ]
    return "\n".join(lines)


#: What stands between the marks, by document, from the first pair to the last.
DOCUMENTS = {"README.md": (bullets, few_rows), "docs/results.md": (all_rows,)}


def filled(text: str, parts: list[str]) -> str:
    """A document with `parts` between its marks, of which it must have as many pairs."""
    pieces = text.split(BEGIN)
    if len(pieces) != len(parts) + 1 or any(END not in piece for piece in pieces[1:]):
        raise SystemExit(f"{len(parts)} pairs of {BEGIN} and {END} are needed")
    rest = [
        f"{BEGIN}\n{part}\n{END}{piece.split(END, 1)[1]}" for part, piece in zip(parts, pieces[1:])
    ]
    return pieces[0] + "".join(rest)


def differences(shown: str, wanted: str) -> Iterator[str]:
    """What is stale, a cell of a table or a line at a time."""
    for old, new in zip_longest(shown.splitlines(), wanted.splitlines(), fillvalue=""):
        if old == new:
            continue
        before, after = (line.strip("|").split("|") for line in (old, new))
        if old.startswith("|") and before[0] == after[0] and len(before) == len(after):
            for was, now in zip(before, after):
                if was != now:
                    yield f"{before[0].strip()}: shows{was}and is{now.rstrip()}"
        else:
            yield f"shows {old!r}\n    and is {new!r}"


# --- the picture -------------------------------------------------------------


def layers() -> dict[str, Any]:
    """The newest row of pipeline.json that has memory by layer: a GPU's where there is one."""
    for name in ("peak active over base", "peak active over base, simulated device"):
        row = find("pipeline", name, "native, record_stream")
        if row and "ours_by_layer" in row:
            return row
    return needed("pipeline", "peak active over base, simulated device", "native, record_stream")


def caption(row: dict[str, Any]) -> str:
    """What the picture says of itself."""
    run = row["run"]
    ours, peer = (f"{figure(row[side])} {row['unit']}" for side in ("ours", "peer"))
    how = (
        "on the simulated device, where the host is ahead of all work"
        if run["gpu"].startswith("none")
        else f"on {run['gpu']}, torch {run['torch']}"
    )
    return (
        f"{len(row['ours_by_layer'])} layers, one after the other, {how}. "
        f"At most {peer} with record_stream, {ours} with esper_alloc."
    )


def draw(row: dict[str, Any], path: Path) -> None:
    """Two lines over the layers, and what they are."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "pipeline"  # the same bytes for the same figures
    sheet = Figure(figsize=(8, 3.6), layout="constrained")
    axis = sheet.subplots()
    count = len(row["ours_by_layer"])
    for side, label, colour, offset, ha in (
        ("peer", "record_stream, PyTorch's allocator", "#c4612b", (-12, 4), "right"),
        ("ours", "record_use, esper_alloc", "#2f6fb0", (0, 8), "center"),
    ):
        values = [mib / 1024 for mib in row[f"{side}_by_layer"]]
        axis.plot(range(1, count + 1), values, color=colour, linewidth=2.2)
        at = round(0.72 * count)
        axis.annotate(
            label, (at, values[at - 1]), offset, textcoords="offset points", ha=ha,
            va="bottom", color=colour, fontsize=12,
        )  # fmt: skip
    axis.set_title(
        "Memory of weights gathered on one stream and used on another", loc="left", pad=12
    )
    axis.set_xlabel("layers enqueued")
    sheet.supxlabel(caption(row).replace(". ", ".\n"), x=0.01, ha="left", fontsize=9, color="#444")
    axis.set_ylabel("GiB")
    axis.set_xlim(1, count)
    axis.set_ylim(0)
    axis.spines[["top", "right"]].set_visible(False)
    sheet.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr]
    sheet.savefig(path, metadata={"Date": None, "Description": caption(row)})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="readme.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, name what is stale")
    check = parser.parse_args().check
    stale = 0
    for name, parts in DOCUMENTS.items():
        text = (ROOT / name).read_text()
        wanted = filled(text, [part() for part in parts])
        if check:
            for difference in differences(text, wanted):
                print(f"{name}: {difference}")
            stale += wanted != text
        else:
            (ROOT / name).write_text(wanted)
    row, picture = layers(), RESULTS / PICTURE
    if check:
        if not picture.exists() or caption(row) not in picture.read_text():
            print(f"{PICTURE}: shows other figures than: {caption(row)}")
            stale += 1
        if stale:
            print("run benchmarks/readme.py")
        return int(stale > 0)
    try:
        draw(row, picture)
    except ImportError:
        print(f"{PICTURE} was not drawn: it needs matplotlib: python -m pip install matplotlib")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
