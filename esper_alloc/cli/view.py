"""``python -m esper_alloc view``: a recording or a snapshot as a page for a browser."""

from __future__ import annotations

import argparse
import os
import webbrowser
from pathlib import Path
from typing import Any

from ..recorder.reading import BlackBox, BlackBoxError, is_black_box, load_black_box
from ..recorder.words import printable
from ..replay.snapshot import SnapshotError
from .complaint import complain


def add_parser(subparsers: Any) -> None:
    """Adds ``view`` to the command line."""
    parser = subparsers.add_parser(
        "view",
        help="show what a recording tells, as a page for a browser",
        description="Makes one HTML file from a file of the black box, or from a snapshot written "
        "by torch.cuda.memory._dump_snapshot (plain or gzip) with a history: memory over time by "
        "category and by line of code, the peak explained, segments, and which lines grew. "
        "It needs no network.",
        epilog="Exit codes: 0 the page was written; 1 it could not be written; 2 wrong usage, "
        "numpy is missing, or a file that cannot be read. `docs black-box` says what is shown.",
    )
    parser.add_argument("file", metavar="FILE", help="a black box's file, or a snapshot")
    parser.add_argument(
        "--output", metavar="PAGE.html", help="the page (default: FILE with the suffix .html)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    output = args.output or os.path.splitext(args.file)[0] + ".html"
    try:
        from ..view.page import write_page
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        return complain("view", "needs numpy: python -m pip install numpy", 2)
    try:
        recording = _load(args.file, output)
    except (BlackBoxError, SnapshotError) as error:
        return complain("view", error, 2)
    name = printable(output)
    try:
        size = write_page(recording, output)
    except OSError as error:
        return complain("view", f"{name}: cannot be written: {error.strerror or error}", 1)
    print(f"{name}: {size / 2**20:.1f} MiB, {len(recording):,} events")
    if args.open and not webbrowser.open(Path(output).resolve().as_uri()):
        return complain("view", f"{name}: no browser was found: open it yourself", 1)
    return 0


def _load(file: str, output: str) -> BlackBox:
    """Raises BlackBoxError or SnapshotError: it cannot be read, or would be overwritten."""
    from ..replay.for_view import load_for_view

    name = printable(file)
    try:
        if os.path.exists(output) and os.path.samefile(file, output):
            raise BlackBoxError(f"{name}: the page would overwrite it: name another --output")
        load = load_black_box if is_black_box(file) else load_for_view
    except OSError as error:
        raise BlackBoxError(f"{name}: cannot be read: {error.strerror or error}") from None
    recording = load(file)
    if not len(recording):
        raise BlackBoxError(f"{name}: it has no events: there is nothing to show")
    return recording
