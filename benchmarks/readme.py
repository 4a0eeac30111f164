#!/usr/bin/env python3
"""Writes the figures of benchmarks/results into the documents that show them.

    python benchmarks/readme.py            # write
    python benchmarks/readme.py --check    # name what is stale; exit status 1 if anything is

README.md has a few rows and five sentences with figures, docs/results.md has all rows, and
benchmarks/results/pipeline.svg is the README's picture, which needs matplotlib. shown.py says
which figures, and what they are called. What stands outside of the marks "figures: begin" and
"figures: end" is left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from common import NO_MORE_ABOVE
from shown import ALL, BULLETS, FEW, SAID, Names

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin (benchmarks/readme.py) -->", "<!-- figures: end -->"
PICTURE = "pipeline.svg"


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
    """Of the two figures as they are shown, so that whoever divides them finds it. None of zero."""
    ours, peer = (float(figure(row[side]).replace(",", "")) for side in ("ours", "peer"))
    if not peer:
        return ""
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
    if how == "no_more":
        said += f", {goal + NO_MORE_ABOVE:.3g} at the interval's upper end"
    if how in ("mean_ratio", "no_more") and "mean_ratio" in row:
        said += f"; the rounds' mean is {row['mean_ratio']:.3f}"
    if how == "no_more" and "interval" in row:
        low, high = row["interval"]
        digits = 3 if high - low >= 0.001 else 4
        said += f" (95% interval: {low:.{digits}f} to {high:.{digits}f})"
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
    lines = ["| | esper_alloc | compared with | its figure | ratio | goal | build |"]
    lines.append("|---|---|---|---|---|---|---|")
    machines: set[str] = set()
    left_out: set[tuple[str, str, str]] = set()
    for topic, names, peer, label in ALL:
        row = find(topic, names, peer)
        if row is None:
            continue
        run = row["run"]
        machines.add(machine(run))
        left_out.update((topic, *one) for one in run.get("left_out", {}).items())
        lines.append(
            f"| {label} | {figure(row['ours'])} {row['unit']} | {peer} | {figure(row['peer'])} "
            f"{row['unit']} | {ratio(row)} | {goal_of(row)} | {run['commit']} |"
        )
    lines += [
        "",
        f"On {'; '.join(sorted(machines))}.",
        "The build is the commit that was measured. Both sides took turns in one command. Figures",
        "are medians, and the ratio is theirs as they are shown. Goals for step times are judged by the",
        "mean of the rounds' ratios. The step time over a whole job is a mean.",
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
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    matplotlib.rcParams["svg.hashsalt"] = "pipeline"  # the same bytes for the same figures
    margins = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches
    sheet = Figure(figsize=(8, 3.6), layout=margins)
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
