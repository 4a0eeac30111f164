"""Whose line a warning names: the user's, not one of this package."""

from __future__ import annotations

import os
import sys

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def user_stacklevel() -> int:
    """The `stacklevel` with which the caller's warnings.warn() names the user's line:
    the nearest one outside this package and torch."""
    torch = sys.modules.get("torch")
    folders = [_PACKAGE]
    if torch is not None and torch.__file__:
        folders.append(os.path.dirname(os.path.abspath(torch.__file__)))
    ours = tuple(folder + os.sep for folder in folders)
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
        level += 1
    return level
