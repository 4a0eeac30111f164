"""How far a command has come: a bar on the terminal, drawn by tqdm (the extra `progress`)."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any


class Progress:
    """A bar of `total` steps on stderr. Without tqdm or a terminal, a line for each step that
    begins `every_s` seconds or more after the last line. Nothing where stderr is closed."""

    def __init__(self, total: int, every_s: float = 5.0) -> None:
        self._bar: Any = None
        self._every_s = every_s
        self._last = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                tqdm = importlib.import_module("tqdm").tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, leave=False, delay=0.2, file=sys.stderr)

    def begin(self, what: str) -> None:
        """`what` is done from now on."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_description_str(what)
        elif sys.stderr is not None and now - self._last >= self._every_s:
            print(what, file=sys.stderr, flush=True)
            self._last = now

    def end(self) -> None:
        """A step is done."""
        if self._bar is not None:
            self._bar.update()

    def clear(self) -> None:
        """Makes room for what the command prints; the bar comes back with the next step."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Nothing of the bar stays."""
        if self._bar is not None:
            self._bar.close()
