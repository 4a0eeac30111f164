"""Draws what was recorded beside what was replayed.

A PNG through matplotlib, or an HTML page that needs nothing but a browser and
shows the values under the pointer. Each device of each file is a row; its
recording and its replays stand side by side on common scales.
"""

from __future__ import annotations

import html
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .recorded import Usage
from .replay import Recording, Replayed

Results = Sequence[tuple[Recording, Sequence[Replayed]]]

MIB = 1 << 20
BUCKETS = 500  # along the time axis; each keeps its extremes
SERIES = ("reserved", "active", "allocated")  # painted in this order
COLOURS = {"reserved": "#c9d3e0", "active": "#f0a35e", "allocated": "#2f6fb0"}


class PlotError(Exception):
    """The plot cannot be drawn; the message is one line with the remedy."""


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


def drawer(path: str) -> Callable[[Results], None]:
    """A function that draws results into `path`, by its suffix. Raises
    PlotError where that cannot be done, before there is anything to draw."""
    suffix = os.path.splitext(path)[1].lower()
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise PlotError(f"--plot {path}: there is no folder {folder}")
    if suffix in (".html", ".htm"):
        return lambda results: _write_html(path, _rows(results))
    if suffix == ".png":
        _require_matplotlib(path)
        return lambda results: _write_png(path, _rows(results))
    raise PlotError(f"--plot {path}: the name must end in .png or .html")


def _require_matplotlib(path: str) -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise PlotError(
            f"--plot {path}: PNG needs matplotlib: python -m pip install matplotlib "
            "(a name that ends in .html does not need it)"
        ) from None


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
        panels.append(_panel(f"replayed, {run.policy}", at_operations, run.usage, run))
    name = os.path.basename(history.path)
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


def _size(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"


# ---- PNG ----------------------------------------------------------------------


def _write_png(path: str, rows: Sequence[Row]) -> None:
    from matplotlib.figure import Figure

    columns = max(len(row.panels) for row in rows)
    figure = Figure(figsize=(5.6 * columns + 0.6, 3.3 * len(rows) + 0.5), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for row, axes in zip(rows, grid):
        scale, unit = (1 << 30, "GiB") if row.top >= 4 << 30 else (MIB, "MiB")
        for column, axis in enumerate(axes):
            if column < len(row.panels):
                _draw_panel(axis, row, row.panels[column], scale)
            else:
                axis.set_axis_off()
            if column == 0:
                axis.set_ylabel(unit)
        # Above the first panel's two lines of title.
        axes[0].annotate(
            row.title,
            (0, 1),
            (0, 34),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=11,
            fontweight="bold",
        )
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside lower center",
        ncols=len(SERIES),
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _draw_panel(axis: Any, row: Row, panel: Panel, scale: int) -> None:
    for name in SERIES:
        values = [value / scale for value in panel.y[name]]
        # The outline keeps peaks visible that last for less than a pixel.
        axis.fill_between(
            panel.x, values, step="post", color=COLOURS[name], linewidth=0.7, label=name
        )
    axis.axhline(panel.peaks["reserved"] / scale, color="#5b6b80", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, row.right)
    axis.set_ylim(0, row.top * 1.06 / scale)
    axis.set_xlabel(row.unit, fontsize=9)
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    peaks = ", ".join(f"{name} {_size(panel.peaks[name])}" for name in reversed(SERIES))
    axis.set_title(f"{panel.title}\npeak {peaks}", fontsize=8.5, loc="left")


# ---- HTML ---------------------------------------------------------------------


def _write_html(path: str, rows: Sequence[Row]) -> None:
    data = [
        {
            "title": row.title,
            "unit": row.unit,
            "right": row.right,
            "top": row.top,
            "panels": [
                {"title": panel.title, "x": panel.x, "y": panel.y, "peaks": panel.peaks}
                for panel in row.panels
            ],
        }
        for row in rows
    ]
    # "<" cannot end the script element when it is written as an escape.
    text = json.dumps({"series": SERIES, "rows": data}, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(_page(text, ", ".join(row.title for row in rows)))


def _page(data: str, title: str) -> Iterator[str]:
    colours = "".join(f".{name}{{--c:{colour}}}" for name, colour in COLOURS.items())
    yield _HEAD.replace("TITLE", html.escape(title)).replace("COLOURS", colours)
    yield f'<script id="data" type="application/json">{data}</script>\n'
    yield _SCRIPT


_HEAD = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem; max-width: 110rem; }
h1 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; overflow-wrap: anywhere; }
.row { display: flex; flex-wrap: wrap; gap: 1.2rem; }
figure { margin: 0; flex: 1 1 26rem; min-width: 0; }
figcaption { font-size: .85rem; }
svg { width: 100%; height: auto; display: block; overflow: visible; touch-action: none; }
svg text { fill: currentColor; font-size: 11px; opacity: .75; }
.axis { stroke: currentColor; opacity: .2; }
.cursor { stroke: currentColor; stroke-dasharray: 2 2; visibility: hidden; }
path { fill: var(--c); stroke: var(--c); stroke-width: .7; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  background: var(--c); margin: 0 .35em 0 .9em; vertical-align: -.06em; }
.value { font-variant-numeric: tabular-nums; min-height: 1.45em; }
COLOURS
</style>
<body>
"""

_SCRIPT = """\
<script>
"use strict";
const { series, rows } = JSON.parse(document.getElementById("data").textContent);
const W = 560, H = 250, L = 64, R = 8, T = 8, B = 34;
const size = b => (b / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 1,
  minimumFractionDigits: 1 }) + " MiB";
const svg = (name, attributes, parent) => {
  const e = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  return parent.appendChild(e);
};
const html = (name, text, parent) => {
  const e = document.createElement(name);
  e.textContent = text;
  return parent.appendChild(e);
};
const legend = (parent, values) => {
  parent.replaceChildren();
  for (const name of [...series].reverse()) {
    const s = html("span", "", parent);
    s.className = "swatch " + name;
    html("span", name + (values ? " " + size(values[name]) : ""), parent);
  }
};
/* Round steps: about `count` of them up to `top`. */
const ticks = (top, count) => {
  const raw = top / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, i) => i * step);
};
for (const row of rows) {
  html("h1", row.title, document.body);
  const box = html("div", "", document.body);
  box.className = "row";
  const px = x => L + (W - L - R) * x / row.right;
  const py = y => H - B - (H - T - B) * y / (row.top * 1.06);
  const drawn = [];
  for (const panel of row.panels) {
    const figure = html("figure", "", box);
    const caption = html("figcaption", "", figure);
    html("strong", panel.title, caption);
    html("span", ": peak", caption);
    legend(html("span", "", caption), panel.peaks);
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
      "aria-label": panel.title }, figure);
    for (const t of ticks(row.top / 2 ** 20, 5)) {
      const y = py(t * 2 ** 20);
      svg("line", { x1: L, x2: W - R, y1: y, y2: y, class: "axis" }, picture);
      svg("text", { x: L - 6, y: y + 4, "text-anchor": "end" }, picture).textContent =
        t.toLocaleString("en");
    }
    for (const t of ticks(row.right, 6))
      svg("text", { x: px(t), y: H - B + 15, "text-anchor": "middle" }, picture).textContent =
        +t.toPrecision(6);
    svg("text", { x: W - R, y: H - 4, "text-anchor": "end" }, picture).textContent = row.unit;
    svg("text", { x: 0, y: H - 4 }, picture).textContent = "MiB";
    for (const name of series) {
      const y = panel.y[name];
      let d = `M${px(panel.x[0] ?? 0).toFixed(2)} ${py(0).toFixed(2)}`;
      panel.x.forEach((x, i) => { d += `H${px(x).toFixed(2)}V${py(y[i]).toFixed(2)}`; });
      svg("path", { d: d + `V${py(0).toFixed(2)}Z`, class: name }, picture);
    }
    const cursor = svg("line", { y1: T, y2: H - B, class: "cursor" }, picture);
    const value = html("div", "", figure);
    value.className = "value";
    drawn.push({ panel, picture, cursor, value });
    /* The pointer over one panel shows the same moment in all of the row. */
    const show = event => {
      const r = picture.getBoundingClientRect();
      const at = ((event.clientX - r.left) * W / r.width - L) / (W - L - R) * row.right;
      const x = Math.min(Math.max(at, 0), row.right);
      for (const one of drawn) {
        let low = 0, high = one.panel.x.length - 1;
        while (low < high) {
          const middle = (low + high + 1) >> 1;
          if (one.panel.x[middle] <= x) low = middle; else high = middle - 1;
        }
        one.cursor.setAttribute("x1", px(x));
        one.cursor.setAttribute("x2", px(x));
        one.cursor.style.visibility = "visible";
        const now = Object.fromEntries(series.map(n => [n, one.panel.y[n][low] ?? 0]));
        legend(one.value, now);
        one.value.prepend(`${+x.toPrecision(6)} ${row.unit}:`);
      }
    };
    picture.addEventListener("pointermove", show);
    picture.addEventListener("pointerdown", show);
  }
}
</script>
</body>
</html>
"""
