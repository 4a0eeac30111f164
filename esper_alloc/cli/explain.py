"""``python -m esper_alloc explain``: why memory ran out, and what would have helped."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..recorder.words import printable
from ..replay.replay import ReplayError
from ..replay.snapshot import SnapshotError
from .complaint import complain
from .progress import Progress

_EPILOG = """\
Exit codes: 0 it was explained, whether something helps or not; 1 memory did not
run out in the recording, or the replay failed; 2 wrong usage, numpy is missing,
or a file that cannot be read. The command `docs black-box` says more.
"""


def add_parser(subparsers: Any) -> None:
    """Adds ``explain`` to the command line."""
    parser = subparsers.add_parser(
        "explain",
        help="say why memory ran out, and which changes replay shows to help",
        description="Reads a file that a black box wrote when memory ran out or later, or a "
        "snapshot of PyTorch's with a history. Says what the last request that failed met, and "
        "tries changes by replaying the history at the memory that the device had. Needs numpy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a black box's file, or a snapshot")
    parser.add_argument("--all", action="store_true", help="also list changes that do not help")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    try:
        from ..explain import words
        from ..explain.explanation import explain_file
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        return complain("explain", "needs numpy: python -m pip install numpy", 2)
    progress = Progress(1)
    try:
        found = explain_file(args.file, progress.begin)
    except SnapshotError as error:
        return complain("explain", error, 2)
    except ReplayError as error:
        return complain("explain", error, 1)
    finally:
        progress.close()
    if args.json:
        print(json.dumps([words.as_json(one) for one in found], indent=2))
    elif found:
        print("\n\n".join(words.in_words(one, args.all) for one in found))
    if found:
        return 0
    return complain(
        "explain",
        f"{printable(args.file)}: memory did not run out in it, and only that is explained. Record "
        "until it does: a black box is written then; for a snapshot call _dump_snapshot() where "
        "the OutOfMemoryError is caught. `view` shows what this file has",
        1,
    )
