"""Whether a picture can be drawn, which is said before anything is measured or read; and its
file."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: What a picture's name may end in.
FORMATS = (".png", ".svg")


class PlotError(Exception):
    """The picture cannot be drawn; the message is one line with the remedy."""


def check_plot(path: str, read: Sequence[str] = ()) -> None:
    """Raises PlotError where a picture could not be drawn into `path`, or would replace one of
    the files that are `read`."""
    folder = os.path.dirname(path) or "."
    if any(os.path.realpath(path) == os.path.realpath(one) for one in read):
        raise PlotError(f"--plot {path}: the picture would overwrite it: name another file")
    if not os.path.isdir(folder):
        raise PlotError(f"--plot {path}: there is no folder {folder}")
    if os.path.splitext(path)[1].lower() not in FORMATS:
        raise PlotError(f"--plot {path}: the name must end in {' or '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise PlotError(
            f"--plot {path}: needs matplotlib: python -m pip install matplotlib "
            "(without --plot it is not needed)"
        ) from None


def write_plot(picture: Any, path: str) -> None:
    """Draws a matplotlib figure, in the format that the name ends in. Drawing takes long: the file
    is as it was until it is over. Raises OSError."""
    drawn = io.BytesIO()
    picture.savefig(drawn, dpi=130, format=os.path.splitext(path)[1][1:].lower())
    Path(path).write_bytes(drawn.getvalue())
