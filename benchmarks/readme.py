#!/usr/bin/env python3
"""Writes the figures of benchmarks/results into the documents that show them.

    python benchmarks/readme.py            # write
    python benchmarks/readme.py --check    # name what is stale; exit status 1 if anything is

README.md has a few rows, docs/results-PAGE.md have the tables, docs/results.md what was measured
on which machine, docs/real-programs.md one more table, and benchmarks/results/pipeline.svg is the
README's picture, which needs matplotlib. shown.py says which figures, and what they are called.
What stands outside of the marks "figures: begin" and "figures: end" is left alone.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, read
from shown import ACTIVE, FEW, RECORD_STREAM, TABLES, Column, Row, Table
from stacks import table as programs_table

PAGES = dict.fromkeys(shown.page for shown in TABLES)
BEGIN, END = "<!-- figures: begin (benchmarks/readme.py) -->", "<!-- figures: end -->"
PICTURE = "pipeline.svg"


def find(topic: str, name: str, peer: str) -> dict[str, Any] | None:
    """A row, with its run in place of the run's id; None: not measured yet."""
    rows, runs_of = read(RESULTS / f"{topic}.json")
    runs = {run["id"]: run for run in runs_of}
    for row in rows:
        if row["name"] == name and row["peer_name"] == peer:
            return {**row, "run": runs[row["run"]]}
    return None


def needed(topic: str, name: str, peer: str) -> dict[str, Any]:
    """find() of a row that may not be missing."""
    row = find(topic, name, peer)
    if row is None:
        raise SystemExit(
            f"benchmarks/results/{topic}.json has no row {name!r} beside {peer!r}, which the "
            f"README shows: measure it with benchmarks/run.py, or show another one"
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
    """What a row's goal is."""
    goal, unit = row["goal"], row["unit"]
    return {
        "at_least": f": at least {goal:.3g}",
        "difference": f": at most {goal:.3g} {unit} more",
        "no_more": "",  # it stands above the table of step times
        "no_worse": ": no worse",
        "ours": f": at most {goal:.3g} {unit}",
    }.get(row.get("judged", "ratio"), f": at most {goal:.4g}")


def verdict(row: dict[str, Any]) -> str:
    """The ratio, in brackets: the rounds' mean where the goal is about that, with its interval
    where it counts; and the goal where it is missed."""
    said, judged = ratio(row), row.get("judged")
    if judged in ("mean_ratio", "no_more") and "mean_ratio" in row:
        said = f"{row['mean_ratio']:.3f}"
    if judged == "no_more" and "interval" in row:
        low, high = row["interval"]
        digits = 3 if high - low >= 0.001 else 4
        said += f", {low:.{digits}f} to {high:.{digits}f}"
    if row.get("met") is False:
        said += f"; missed{goal_of(row)}"
    return f" ({said})" if said else ""


def few_rows() -> str:
    lines = [
        "| measured | esper_alloc | PyTorch | PyTorch's figure | ratio |",
        "|---|---|---|---|---|",
    ]
    gpus, rounds = set(), dict[str, set[int]]()
    for topic, name, peer, label, beside in FEW:
        row = needed(topic, name, peer)
        gpus.add(row["run"]["gpu"].replace("NVIDIA ", ""))
        rounds.setdefault(topic, set()).add(row["rounds"])
        ours, theirs = (f"{figure(row[side])} {row['unit']}" for side in ("ours", "peer"))
        shown = f"[{label}](benchmarks/results/{topic}.json)"
        lines.append(f"| {shown} | {ours} | {beside} | {theirs} | {ratio(row)} |")
    few = [
        f"{topic}: {'one' if max(these) == 1 else f'1-{max(these)}'}"
        for topic, these in sorted(rounds.items())
        if min(these) == 1
    ]
    but = f" ({', '.join(few)})" if few else ""
    lines += ["", f"Medians of alternating rounds{but} on {', '.join(sorted(gpus))}."]
    return "\n".join(lines)


def cells(shown: Row, columns: tuple[Column, ...]) -> tuple[list[str], list[dict[str, Any]]]:
    """A row's own figure and its cells, and the rows of result files that they are of: for each
    column that of the first of its peers that there is."""
    wanted = columns or (Column("", (shown.peer,)),)
    rows = [
        next(filter(None, (find(shown.topic, shown.name, peer) for peer in column.peers)), None)
        for column in wanted
    ]
    found = [row for row in rows if row]
    if not found:
        return [], []
    said = [f"{figure(found[0]['ours'])} {found[0]['unit']}".strip()]
    for row in rows:
        if row is None or row["peer_name"] == "nothing":
            said.append("")
            continue
        first = f"{shown.peer}: " if not columns else ""
        ours = figure(row["ours"])
        if ours != figure(found[0]["ours"]):  # another run's
            first = f"{ours} / "
        said.append(f"{first}{figure(row['peer'])}{verdict(row)}")
    return said, found


def table(shown: Table) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """A table's lines, and the rows that it shows, with their topics."""
    filled = [(row, *cells(row, shown.columns)) for row in shown.rows]
    filled = [one for one in filled if one[2]]
    if not filled:
        return [], []  # not measured yet
    topics = {row.topic for row, _, _ in filled}
    headings = [column.heading for column in shown.columns] or ["compared with"]
    by = "build" if len(topics) == 1 else "script, build"
    lines = [f"| | esper_alloc | {' | '.join(headings)} | {by} |"]
    lines.append("|---" * (len(headings) + 3) + "|")
    shows = []
    for row, said, found in filled:
        for name in row.also:
            more, also = cells(row._replace(name=name), shown.columns)
            if not also:
                continue
            more = [one.removeprefix(f"{row.peer}: ") for one in more]
            said, found = ["; ".join(filter(None, two)) for two in zip(said, more)], found + also
        builds = ", ".join(dict.fromkeys(one["run"]["commit"] for one in found))
        first = "" if len(topics) == 1 else f"{row.topic}, "
        lines.append(f"| {row.label} | {' | '.join(said)} | {first}{builds} |")
        shows += [(row.topic, one) for one in found]
    script = f"`{topics.pop()}.py`. " if len(topics) == 1 else ""
    return [f"## {shown.heading}", "", f"{script}{shown.about}", "", *lines, ""], shows


def page(name: str) -> str:
    """The tables of docs/results-NAME.md."""
    lines = [line for shown in TABLES if shown.page == name for line in table(shown)[0]]
    return "\n".join(lines).rstrip()


def machines() -> str:
    """What all tables were measured on."""
    builds: dict[str, dict[str, set[str]]] = {}
    left_out: dict[tuple[str, str], set[str]] = {}
    for shown in TABLES:
        for topic, row in table(shown)[1]:
            run = row["run"]
            machine = f"{run['gpu']}, driver {run['driver']}, torch {run['torch']}"
            days = builds.setdefault(machine, {})
            days.setdefault(run["time"][:10], set()).add(run["commit"])
            for one in run.get("left_out", {}).items():
                if one[1] == "not asked for":
                    continue
                left_out.setdefault(one, set()).add(topic)
    lines = []
    for name, days in sorted(builds.items()):
        said = "; ".join(f"{day}: {', '.join(sorted(of))}" for day, of in sorted(days.items()))
        lines.append(f"- {name}. {said}.")
    for (name, why), topics in sorted(left_out.items()):
        lines.append(f"- Without {name} ({why}): {', '.join(sorted(topics))}.")
    return "\n".join(lines)


#: What stands between the marks of each document.
DOCUMENTS = {
    "README.md": few_rows,
    "docs/results.md": machines,
    **{f"docs/results-{name}.md": partial(page, name) for name in PAGES},
    "docs/real-programs.md": lambda: programs_table(find),
}


def filled(text: str, figures: str) -> str:
    """A document with `figures` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{BEGIN} and {END} are needed")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


# --- the picture -------------------------------------------------------------
def layers() -> dict[str, Any]:
    """The row of pipeline.json that has memory by layer."""
    return needed("pipeline", ACTIVE, RECORD_STREAM)


def caption(row: dict[str, Any]) -> str:
    """What the picture says of itself."""
    run = row["run"]
    ours, peer = (figure(max(row[f"{side}_by_layer"])) for side in ("ours", "peer"))
    return (
        f"{len(row['ours_by_layer'])} layers, one after the other, on {run['gpu']}, "
        f"torch {run['torch']}. "
        f"After a layer at most {peer} MiB with record_stream, {ours} MiB with esper_alloc."
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
    axis.set(xlabel="layers enqueued", ylabel="GiB", xlim=(1, count), ylim=(0, None))
    sheet.supxlabel(caption(row).replace(". ", ".\n"), x=0.01, ha="left", fontsize=9, color="#444")
    axis.spines[["top", "right"]].set_visible(False)
    sheet.savefig(path, metadata={"Date": None, "Description": caption(row)})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="readme.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, name what is stale")
    check = parser.parse_args().check
    stale = []
    for name, figures in DOCUMENTS.items():
        text = (ROOT / name).read_text()
        wanted = filled(text, figures())
        if check:
            lines = text.splitlines(), wanted.splitlines()
            stale += difflib.unified_diff(*lines, name, "is stale", lineterm="", n=0)
        else:
            (ROOT / name).write_text(wanted)
    row, picture = layers(), RESULTS / PICTURE
    if check:
        if not picture.exists() or caption(row) not in picture.read_text():
            stale.append(f"{PICTURE}: shows other figures than: {caption(row)}")
        if stale:
            print(*stale, "run benchmarks/readme.py", sep="\n")
        return int(bool(stale))
    try:
        draw(row, picture)
    except ImportError:
        print(f"{PICTURE} was not drawn: it needs matplotlib: python -m pip install matplotlib")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
