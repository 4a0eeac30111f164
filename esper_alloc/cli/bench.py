"""``python -m esper_alloc bench``: this allocator beside PyTorch's own, on this machine.

Every measurement runs in a fresh process (workers.py starts it, bench_worker.py is it), the
allocators in turn,
round by round. The medians go into a table, and if wanted into a plot and a file.
The larger benchmarks stand in the sources, under benchmarks/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from . import workers
from .complaint import complain
from .plots import PlotError, check_plot, write_plot
from .progress import Progress
from .workers import OURS, WorkerFailed

#: The allocators that are compared, ours first.
ALLOCATORS = (OURS, workers.NATIVE, workers.EXPANDABLE, workers.ASYNC)


@dataclass(frozen=True)
class Figure:
    """A row of the table. Less is better, of all of them."""

    key: str
    title: str
    unit: str


FIGURES = (
    Figure("pair_512b_ns", "make and drop a tensor, 512 B", "ns"),
    Figure("pair_1mib_ns", "make and drop a tensor, 1 MiB", "ns"),
    Figure("pair_64mib_ns", "make and drop a tensor, 64 MiB", "ns"),
    Figure("mark_ns", "make, mark for another stream, drop", "ns"),
    Figure("pipeline_step_ms", "gathered weights on two streams, a step", "ms"),
    Figure("pipeline_mib", "gathered weights on two streams, memory", "MiB"),
    Figure("lengths_step_ms", "training on random lengths, a step", "ms"),
    Figure("lengths_reserved_mib", "training on random lengths, memory reserved", "MiB"),
    Figure("lengths_allocated_mib", "training on random lengths, memory allocated", "MiB"),
)


class BenchError(Exception):
    """Nothing can be measured; the message is one line with the remedy."""


Measured = dict[str, list[dict[str, Any]]]  # by allocator, what each round's process said


def check_machine() -> None:
    """Raises BenchError where nothing can be measured. Imports no torch."""
    if importlib.util.find_spec("torch") is None:
        raise BenchError("PyTorch is not installed: install torch with CUDA")
    why = workers.gpu_missing()
    if why:
        raise BenchError(
            f"this needs an NVIDIA GPU, and {why}; `python -m esper_alloc doctor` says more"
        )


# ---- measuring ----------------------------------------------------------------


def run_worker(allocator: str, small: bool) -> dict[str, Any]:
    """What one fresh process measured. Raises WorkerFailed."""
    command = [sys.executable, "-m", "esper_alloc.cli.bench_worker", allocator]
    command += ["--small"] if small else []
    return workers.run_worker(command, workers.environment(workers.ENVIRONMENTS[allocator]))


def measure(rounds: int, small: bool) -> Measured:
    """A process for each allocator a round, in turn. An allocator that fails is named
    and left out from then on; raises BenchError where ours fails."""
    progress = Progress(rounds * len(ALLOCATORS), every_s=0)

    def one(turn: int, allocator: str) -> dict[str, Any]:
        progress.begin(f"round {turn + 1} of {rounds}: {allocator}")
        found = run_worker(allocator, small)
        progress.end()
        return found

    def failed(turn: int, allocator: str, error: WorkerFailed) -> None:
        why = f"{allocator}: {error.brief}"
        if allocator == OURS:
            raise BenchError(why)
        progress.clear()
        complain("bench", f"left out: {why}", 0)
        for _ in range(turn, rounds):
            progress.end()

    try:
        found = workers.alternate(ALLOCATORS, rounds, one, failed, patience=1)
    finally:
        progress.close()
    return {
        name: [one[name] for one in found if name in one] for name in ALLOCATORS if name in found[0]
    }


def medians(measured: Measured) -> dict[str, dict[str, float]]:
    """By allocator and figure."""
    return {
        allocator: {
            figure.key: statistics.median(one[figure.key] for one in found) for figure in FIGURES
        }
        for allocator, found in measured.items()
    }


# ---- what is shown ------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def as_table(measured: Measured) -> str:
    """A line for each figure, a column for each allocator, and ours / the best other."""
    found = medians(measured)
    others = [allocator for allocator in found if allocator != OURS]
    rows = [["", *found, *(["ours / best"] if others else [])]]
    for figure in FIGURES:
        row = [f"{figure.title}, {figure.unit}"]
        row += [_number(found[allocator][figure.key]) for allocator in found]
        if others:
            best = min(found[allocator][figure.key] for allocator in others)
            row.append(f"{found[OURS][figure.key] / best:.3f}" if best else "")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    first = measured[OURS][0]
    counted = len(measured[OURS])
    lines.append("")
    lines.append(
        f"{first['gpu']}, torch {first['torch']}; medians of {counted} "
        f"process{'es' if counted > 1 else ''} each, in turn; less is better"
    )
    return "\n".join(lines)


def as_json(measured: Measured) -> dict[str, Any]:
    """What --json prints: medians, and what every process measured."""
    first = measured[OURS][0]
    return {
        "gpu": first["gpu"],
        "torch": first["torch"],
        "medians": medians(measured),
        "processes": measured,
    }


def picture(measured: Measured) -> Any:
    """The matplotlib figure: a panel for each figure, with a bar for each allocator."""
    from matplotlib.figure import Figure as Drawing

    found = medians(measured)
    columns = 3
    rows = -(-len(FIGURES) // columns)
    drawing = Drawing(figsize=(12, 2.5 * rows), layout="constrained")
    axes = drawing.subplots(rows, columns, squeeze=False).flat
    colours = ["#2f6fb0", "#c9d3e0", "#9fb2c8", "#f0a35e"]
    for axis, figure in zip(axes, FIGURES):
        values = [found[allocator][figure.key] for allocator in found]
        bars = axis.barh(list(found), values, color=colours[: len(found)])
        axis.bar_label(bars, [_number(value) for value in values], padding=3, fontsize=8)
        # A panel is about 40 letters wide beside the names of the allocators.
        title = textwrap.fill(f"{figure.title},\u00a0{figure.unit}", 40)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlim(0, max(values) * 1.2 or 1)
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    return drawing


# ---- the command --------------------------------------------------------------

_EPILOG = """\
Takes about 15 seconds for each allocator and round. Nothing else should run on the GPU
meanwhile. The command `docs benchmarks` says what is measured.

Exit codes: 0 measured; 1 nothing could be measured, or the plot could not be written
(the message says why); 2 wrong usage, or a plot that cannot be drawn.
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``bench`` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure this allocator beside PyTorch's own on this machine",
        description="Measures esper_alloc, PyTorch's own allocator with and without "
        "expandable_segments, and cudaMallocAsync, in turn, each in fresh processes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=_count, default=3, help="processes for each allocator (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--plot", metavar="FILE.png|svg", help="draw the figures (needs matplotlib)"
    )
    parser.add_argument(
        "--small", action="store_true", help="do little work, only to see that everything runs"
    )
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds: use 1 or more")
    return int(text)


def run(args: Any) -> int:
    """The command; its exit code."""
    plot: str | None = args.plot
    try:
        if plot is not None:
            check_plot(plot)
        check_machine()
        measured = measure(args.rounds, args.small)
        if plot is not None:
            write_plot(picture(measured), plot)
    except (PlotError, BenchError, OSError) as error:
        return complain("bench", error, 2 if isinstance(error, PlotError) else 1)
    print(json.dumps(as_json(measured), indent=2) if args.json else as_table(measured))
    return 0
