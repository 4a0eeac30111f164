"""The lines whose marks last until the free, and why: recorded on request."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator

from ..installation.callers import user_stacklevel
from ..installation.pytorch import UnavailableError, load_shim

__all__ = ["is_on", "lines", "note", "warn_about_marks"]

_is_on = False
_lock = threading.Lock()
#: By file and line: how often for each set of reasons.
_lines: dict[tuple[str, int], dict[str, int]] = {}


def warn_about_marks(on: bool = True) -> None:
    """From now on names the lines whose marks last until the free.

    In grad mode a mark by ``record_use`` lasts until its memory is freed if anybody but the
    caller can reach that memory, and one by ``using`` if autograd recorded an operation in the
    scope. While this is on, each such line gives one warning, which says why, and
    :func:`report` lists all of them with how often it happened. It does not look at compiled
    functions. Turning it on forgets earlier lines.

    Args:
        on: False: from now on nothing is recorded, which costs nothing. A process begins
            that way.
    """
    global _is_on
    with _lock:
        if on:
            _lines.clear()
        _is_on = on
    try:
        load_shim().watch_marks(on)
    except UnavailableError:
        pass  # marks are made in Python, which asks is_on()


def is_on() -> bool:
    return _is_on


def note(reasons: str) -> None:
    """A mark on the user's line lasts until the free, for these reasons."""
    level = user_stacklevel()
    frame = sys._getframe(level - 1)
    place = frame.f_code.co_filename, frame.f_lineno
    with _lock:
        is_new = place not in _lines
        counts = _lines.setdefault(place, {})
        counts[reasons] = counts.get(reasons, 0) + 1
    if is_new:
        warnings.warn(
            f"this mark lasts until the memory is freed: {reasons}",
            RuntimeWarning,
            stacklevel=level,
        )


def lines() -> Iterator[str]:
    """What was recorded, as lines for a report."""
    with _lock:
        found = sorted((place, sorted(counts.items())) for place, counts in _lines.items())
    if found:
        yield "marks that last until the free:"
    for (file, line), counts in found:
        for reasons, count in counts:
            yield f"  {file}:{line} ({count} {'mark' if count == 1 else 'marks'}): {reasons}"
