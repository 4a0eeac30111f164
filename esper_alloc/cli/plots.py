"""Whether a picture can be drawn: said before anything is measured or read."""

from __future__ import annotations

import os

#: What a picture's name may end in.
FORMATS = (".png", ".svg")


class PlotError(Exception):
    """The picture cannot be drawn; the message is one line with the remedy."""


def check_plot(path: str) -> None:
    """Raises PlotError where a picture could not be drawn into `path`."""
    folder = os.path.dirname(path) or "."
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
