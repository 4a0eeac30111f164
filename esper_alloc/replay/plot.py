"""Draws what was recorded beside what was replayed, with matplotlib.

Each device of each file has a group of panels: its recording and its replays, on common
scales.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .recorded import Usage
from .replay import Recording, Replayed

Results = Sequence[tuple[Recording, Sequence[Replayed]]]

MIB = 1 << 20
BUCKETS = 500  # along the time axis; each keeps its extremes
SERIES = ("reserved", "active", "allocated")  # painted in this order
COLOURS = {"reserved": "#c9d3e0", "active": "#f0a35e", "allocated": "#2f6fb0"}
MOST_COLUMNS = 4


@dataclass(frozen=True)
class Panel:
    """One course of events: x in the row's unit, y in bytes, thinned out.

    peaks: bytes, by series, of the whole course.
    """

    title: str
    x: list[float]
    y: dict[str, list[int]]
    peaks: dict[str, int]


@dataclass(frozen=True)
class Row:
    """One device of one file."""

    title: str
    unit: str
    panels: list[Panel]

    @property
    def right(self) -> float:
        return max((panel.x[-1] for panel in self.panels if panel.x), default=1.0) or 1.0

    @property
    def top(self) -> int:
        return max(max(panel.peaks.values()) for panel in self.panels) or 1


# ---- what is drawn ------------------------------------------------------------


def _rows(results: Results) -> list[Row]:
    return [_row(recording, runs) for recording, runs in results]


def _row(recording: Recording, runs: Sequence[Replayed]) -> Row:
    history = recording.history
    times, unit = _axis(history.times)
    recorded = recording.recorded
    panels = [_panel("recorded", times, recorded.usage, recorded)]
    at_operations = [times[entry] for entry in recording.operations.entries]
    for run in runs:
        panels.append(_panel(f"replayed, {run.kind}", at_operations, run.usage, run))
    name = os.path.basename(history.path).replace("$", r"\$")  # matplotlib's mathematics
    return Row(f"{name}, device {history.device}", unit, panels)


def _axis(times: array[int]) -> tuple[Sequence[float], str]:
    """Seconds since the first entry; its number where the clock went back."""
    if times and times[-1] > times[0] and all(a <= b for a, b in zip(times, times[1:])):
        first = times[0]
        return [(one - first) / 1e6 for one in times], "seconds"
    return [float(number) for number in range(len(times))], "entries"


def _panel(title: str, x: Sequence[float], usage: Usage, peaks: Any) -> Panel:
    kept = _thinned(x, usage)
    return Panel(
        title,
        [x[index] for index in kept],
        {name: [getattr(usage, name)[index] for index in kept] for name in SERIES},
        {name: getattr(peaks, f"peak_{name}") for name in SERIES},
    )


def _thinned(x: Sequence[float], usage: Usage) -> list[int]:
    """Indexes that keep each bucket's extremes, and its last value, which may
    stand for a long time."""
    if len(x) <= 4 * BUCKETS:
        return list(range(len(x)))
    kept = {0}
    first, width = 0, (x[-1] - x[0]) / BUCKETS
    for bucket in range(BUCKETS):
        end = bisect_right(x, x[0] + width * (bucket + 1)) if bucket + 1 < BUCKETS else len(x)
        if first < end:
            for name in SERIES:
                value = getattr(usage, name).__getitem__
                kept.update((max(range(first, end), key=value), min(range(first, end), key=value)))
            kept.add(end - 1)
        first = end
    return sorted(kept)


# ---- the picture --------------------------------------------------------------


def picture(results: Results) -> Any:
    """The matplotlib figure: a group for each recording, at most MOST_COLUMNS panels wide."""
    from matplotlib.figure import Figure

    rows = _rows(results)
    columns = min(MOST_COLUMNS, max(len(row.panels) for row in rows))
    lines = [-(-len(row.panels) // columns) for row in rows]
    figure = Figure(
        figsize=(4.6 * columns + 0.6, 3.2 * sum(lines) + 0.5 * len(rows) + 0.5),
        layout="constrained",
    )
    groups = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=lines)[:, 0]
    for row, group, count in zip(rows, groups, lines):
        group.suptitle(row.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        axes = group.subplots(count, columns, squeeze=False, sharex=True, sharey=True).flat
        scale, unit = (1 << 30, "GiB") if row.top >= 4 << 30 else (MIB, "MiB")
        for number, axis in enumerate(axes):
            if number >= len(row.panels):
                axis.set_axis_off()
                continue
            _draw_panel(axis, row.panels[number], scale, unit)
            axis.set_xlim(0, row.right)
            axis.set_ylim(0, row.top * 1.06 / scale)
            # The panel below may be missing.
            axis.tick_params(labelsize=9, labelbottom=number + columns >= len(row.panels))
            if number % columns == 0:
                axis.set_ylabel(unit)
            if number + columns >= len(row.panels):
                axis.set_xlabel(row.unit, fontsize=9)
        handles, labels = group.axes[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower center", ncols=len(SERIES), frameon=False
    )
    return figure


def _draw_panel(axis: Any, panel: Panel, scale: int, unit: str) -> None:
    for name in SERIES:
        values = [value / scale for value in panel.y[name]]
        # The outline keeps peaks visible that last for less than a pixel.
        axis.fill_between(
            panel.x, values, step="post", color=COLOURS[name], linewidth=0.7, label=name
        )
    axis.axhline(panel.peaks["reserved"] / scale, color="#5b6b80", linewidth=0.8, linestyle=":")
    axis.spines[["top", "right"]].set_visible(False)
    digits = 2 if unit == "GiB" else 0
    peaks = [f"{name} {panel.peaks[name] / scale:,.{digits}f}" for name in reversed(SERIES)]
    axis.set_title(f"{panel.title}\npeak {unit}: {', '.join(peaks)}", fontsize=8.5, loc="left")
