"""``python -m esper_alloc replay``: recorded and replayed peaks, side by side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..recorder.words import mib
from ..replay import plot
from ..replay.recorded import Recorded
from ..replay.replay import (
    DEVICES,
    SEGMENTS,
    Recording,
    Replayed,
    ReplayError,
    Segments,
    fragmentation,
    load_recordings,
    replay,
)
from ..replay.snapshot import SnapshotError
from .complaint import complain
from .plots import PlotError, check_plot, write_plot
from .progress import Progress

# ---- what is printed ----------------------------------------------------------


def as_json(recording: Recording, replayed: Replayed) -> dict[str, Any]:
    """One object of the --json list. Bytes and nanoseconds."""
    recorded, native = recording.recorded, recording.native
    return {
        "file": recording.history.path,
        "device": recording.history.device,
        "segments": replayed.kind,
        "recorded": {
            "peak_allocated": recorded.peak_allocated,
            "peak_active": recorded.peak_active,
            "peak_reserved": recorded.peak_reserved,
        },
        "native": {
            "peak_allocated": native.allocated,
            "peak_active": native.active,
        },
        "replayed": {
            "peak_allocated": replayed.peak_allocated,
            "peak_active": replayed.peak_active,
            "peak_reserved": replayed.peak_reserved,
        },
        "operations": replayed.operations,
        "ns_per_operation": round(replayed.ns_per_operation, 1),
        "device_calls": replayed.device_calls,
    }


_COLUMNS = (
    "",
    "peak allocated",
    "peak active",
    "peak reserved",
    "fragmentation",
    "segments",
    "ns/operation",
    "device calls",  # with --verbose
)


def _peak_cells(peaks: Recorded | Replayed) -> tuple[str, ...]:
    return (
        mib(peaks.peak_allocated),
        mib(peaks.peak_active),
        mib(peaks.peak_reserved),
        f"{fragmentation(peaks.peak_active, peaks.peak_reserved):.1%}",
        f"{peaks.segments:,}",
    )


def _rows(recording: Recording, runs: Sequence[Replayed]) -> Iterator[Sequence[str]]:
    yield _COLUMNS
    recorded, native = recording.recorded, recording.native
    yield "recorded", *_peak_cells(recorded), "", ""
    for run in runs:
        calls = sum(run.device_calls.values())
        time_each = f"{run.ns_per_operation:,.0f}"
        yield f"replayed {run.kind}", *_peak_cells(run), time_each, f"{calls:,}"
    yield ("native's blocks", mib(native.allocated), mib(native.active), "", "", "", "", "")


def as_table(
    recording: Recording, runs: Sequence[Replayed], device: str, verbose: bool = False
) -> str:
    """A heading, a row for the recording, one for each run, and native's. The calls of
    the driver only if `verbose`."""
    history = recording.history
    rows = [row if verbose else row[:-1] for row in _rows(recording, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{history.path}, device {history.device}: {len(history.steps):,} entries, "
        f"{runs[0].operations if runs else 0:,} operations"
        + (", on the GPU" if device == "cuda" else "")
    ]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        cells[0] = row[0].ljust(widths[0])
        lines.append(("  " + "  ".join(cells)).rstrip())
    for run in runs if verbose else ():
        calls = ", ".join(f"{name} {count:,}" for name, count in sorted(run.device_calls.items()))
        lines.append(f"  device calls of {run.kind}: {calls or 'none'}")
    if len(runs) > 1:
        lines.append("  Compare peak reserved.")
    return "\n".join(lines)


# ---- the command --------------------------------------------------------------

_EPILOG = """\
Exit codes: 0 everything was replayed; 1 the replay failed (no GPU, out of
memory, a plot that could not be written at the end); 2 wrong usage, a plot that
cannot be drawn, or a file that is not a complete snapshot with a consistent
trace. All files are checked before any is replayed. The command `docs replay` says
what the figures mean and what a recording cannot show.
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``replay`` to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="run a recorded job's memory history through the allocator",
        description="Replays the files of black boxes, and snapshots written by "
        "torch.cuda.memory._dump_snapshot (plain or gzip), and prints recorded and replayed peaks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="a snapshot, or a black box's file"
    )
    parser.add_argument(
        "--segments",
        action="append",
        choices=(*SEGMENTS, "all"),
        help="where memory comes from, mapped or classic; `run --segments` explains them; may be "
        "repeated; all: both "
        f"(default: {SEGMENTS[0]})",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="sim",
        help="the simulated device, or the first GPU (default: sim)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--plot",
        metavar="FILE.png|svg",
        help="draw allocated, active and reserved over time, recorded beside replayed "
        "(needs matplotlib)",
    )
    parser.add_argument("--verbose", action="store_true", help="also count the driver's calls")
    parser.set_defaults(run=run)


def _chosen(asked: Sequence[str] | None) -> list[Segments]:
    if not asked:
        return [SEGMENTS[0]]
    return [kind for kind in SEGMENTS if kind in asked or "all" in asked]


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    try:
        if args.plot is not None:
            check_plot(args.plot, args.files)
        recordings = _load(args.files)
    except (PlotError, SnapshotError) as error:
        return complain("replay", error, 2)
    kinds = _chosen(args.segments)
    results: list[tuple[Recording, list[Replayed]]] = []
    progress = Progress(len(recordings) * len(kinds))
    try:
        for recording in recordings:
            runs = []
            for kind in kinds:
                history = recording.history
                progress.begin(f"replaying {history.path}, device {history.device}, {kind}")
                runs.append(replay(recording, kind, args.device))
                progress.end()
            results.append((recording, runs))
            if not args.json:
                progress.clear()
                print(as_table(recording, runs, args.device, args.verbose), end="\n\n", flush=True)
        if args.plot is not None:
            progress.begin(f"drawing {args.plot}")
            write_plot(plot.picture(results), args.plot)
    except OSError:  # main() says it
        progress.close()
        raise
    except ReplayError as error:
        progress.close()
        return complain("replay", error, 1)
    progress.close()
    if args.json:
        print(json.dumps([as_json(one, ran) for one, runs in results for ran in runs], indent=2))
    return 0


def _load(files: Sequence[str]) -> list[Recording]:
    """What the files have recorded. Raises SnapshotError."""
    recordings: list[Recording] = []
    progress = Progress(len(files))
    try:
        for path in files:
            recordings += load_recordings(path, progress.begin)
            progress.end()
    finally:
        progress.close()
    return recordings
