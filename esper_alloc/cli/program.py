"""The program that a command runs: SCRIPT, or -m MODULE, with its ARGS."""

from __future__ import annotations

import argparse


def add_program(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds SCRIPT and ARGS, and -m. `what` describes SCRIPT."""
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    # With SCRIPT and ARGS apart argparse would swallow a "--" between them.
    parser.add_argument("command", metavar="SCRIPT", nargs=argparse.PARSER, help=what)


def program_of(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The program's name, and its arguments."""
    words = list(args.command)
    if words[0] == "--" and len(words) > 1:  # the end of the command's own options
        words.pop(0)
    return words[0], words[1:]
