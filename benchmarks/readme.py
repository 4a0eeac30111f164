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
BEGIN, END = "<!-- figures: begin (benchmarks/readme.py) -->", "<!-- figures: end -->"

#: Topic, name of the row, peer, and what the README calls it.
SHOWN = [
    ("train", "gpt2: step time", "native", "GPT-2 124M training, step time"),
    ("train", "gpt2: peak reserved", "native", "GPT-2 124M training, peak reserved"),
    ("train", "resnet50: step time", "native", "ResNet-50 training, step time"),
    ("train", "resnet50: peak reserved", "native", "ResNet-50 training, peak reserved"),
    ("pair", "raw_alloc + raw_delete, 512 B", "native", "`raw_alloc` + `raw_delete`, 512 B"),
    ("pair", "raw_alloc + raw_delete, 1 MiB", "native", "`raw_alloc` + `raw_delete`, 1 MiB"),
    ("pair", "raw_alloc + raw_delete, 64 MiB", "native", "`raw_alloc` + `raw_delete`, 64 MiB"),
    ("pair", "churn among 10000 live blocks", "native", "the same among 10,000 live blocks"),
    (
        "precision",
        "dropped memory serves again after, 50 ms of work queued",
        "native, record_stream",
        "a dropped tensor's memory serves again after, with 50 ms of other work queued on its reader",
    ),
    (
        "record_use_cost",
        "record_use, cycle",
        "native, record_stream",
        "allocate, mark for another stream, drop (Python)",
    ),
]


def load(topic: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{topic}.json").read_text())


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def render() -> str:
    lines = ["| | esper_alloc | native | | ratio |", "|---|---|---|---|---|"]
    machines, commits = set(), set()
    for topic, name, peer, label in SHOWN:
        results = load(topic)
        row = next(r for r in results["rows"] if (r["name"], r["peer_name"]) == (name, peer))
        run = next(r for r in results["runs"] if r["id"] == row["run"])
        machines.add(f"{run['gpu']}, driver {run['driver']}, torch {run['torch']}")
        commits.add(run["commit"])
        beside = peer.removeprefix("native").removeprefix(", ")
        lines.append(
            f"| {label} | {figure(row['ours'])} {row['unit']} | {figure(row['peer'])} "
            f"{row['unit']} | {beside} | {row['ratio']:.3f} |"
        )
    lines += [
        "",
        f"On {'; '.join(sorted(machines))}, at commit {' and '.join(sorted(commits))};",
        "esper_alloc and the peer alternated in one command.",
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
