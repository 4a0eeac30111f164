"""Names and sizes as they are printed."""

from __future__ import annotations


def printable(text: object) -> str:
    """Without line breaks, control characters, and bytes that are no text."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text))


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
