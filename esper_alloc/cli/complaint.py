"""What a command says when it ends because of a mistake or a problem."""

from __future__ import annotations

import sys


def complain(command: str, what: object, code: int) -> int:
    """Says what is wrong in one line; returns the exit code."""
    if sys.stderr is not None:  # it is where it was closed, and print() would take stdout
        print(f"esper_alloc {command}: {what}", file=sys.stderr)
    return code
