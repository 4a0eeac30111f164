"""The command line: ``esper-alloc COMMAND``, or ``python -m esper_alloc COMMAND``.

Each command is a module with ``add_parser(subparsers)``; the namespace it
parses has ``run(args) -> int``, the exit code. Only the module of the command
that was asked for is imported, so that ``--help`` is instant and ``doctor``
works where another command cannot be loaded.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from .complaint import complain

COMMANDS = {
    "run": "run a Python script or module, unmodified, on esper_alloc",
    "audit": "run a Python script or module, and find unordered uses of GPU memory",
    "replay": "run recorded memory histories through the allocator",
    "explain": "say why memory ran out, and which changes replay shows to help",
    "view": "show what a recording of the black box tells, in a browser",
    "top": "watch the memory of a running program",
    "bench": "measure this allocator beside PyTorch's own on this machine",
    "doctor": "say what esper_alloc found on this machine and what is wrong",
    "docs": "print a page of the documents",
}

EXIT_CODES = """\
exit codes:
  0    success
  1    the command found or met a problem, which it names
  2    wrong usage, or an input file that cannot be used
  130  interrupted
  141  whoever read the output has ended, as `head` does
  `run` ends with the exit code, or by the signal, of what it runs; so does `audit`,
  except that 0 becomes 1 if something was found, or nothing was audited.
"""


def program() -> str:
    """What the user typed to come here."""
    typed = os.path.basename(sys.argv[0])
    return typed if typed == "esper-alloc" else "python -m esper_alloc"


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, complete for `command` and in outline for the others.

    Raises ImportError where the module of `command` cannot be loaded.
    """
    from esper_alloc import __version__

    parser = argparse.ArgumentParser(
        prog=program(),
        description="A CUDA allocator for PyTorch that knows when memory was last used.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"esper_alloc {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="{" + ",".join(COMMANDS) + "}", required=True
    )
    for name, summary in COMMANDS.items():
        if name == command:
            importlib.import_module(f"esper_alloc.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. `argv` is without the program."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser = build_parser(command)
    except ImportError as error:
        from ..installation.pytorch import not_built

        why = not_built() or f"{error}\n`{program()} doctor` says what is missing."
        return complain(f"{command}", f"cannot be loaded: {why}", 1)
    if command not in COMMANDS and command is not None and command.endswith(".py"):
        parser.error(f"{command} is no command: did you mean `{program()} run {command}`?")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        follow = "; options of the program follow SCRIPT" if command in ("run", "audit") else ""
        parser.error(f"{unknown[0]} is not understood: see `{program()} {command} --help`{follow}")
    is_ours = command not in ("run", "audit")  # else the output and its errors are the program's
    if is_ours and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(args.run(args))
        if sys.stdout is not None and not sys.stdout.closed:  # `audit` runs who may close it
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if not is_ours:
            raise
        return complain(f"{command}", _in_words(error), 1)


def _drop_output() -> None:
    """The interpreter flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_words(error: OSError) -> str:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_output()
    if error.filename is not None:
        return str(error)
    return f"the output cannot be written: {error.strerror or error}"
