"""Forks while another thread imports this package, a part of it, or PyTorch for it.

The lock of a module that is being imported is not released in a forked child, where the importing
thread does not exist: the child would wait for ever at its first use of that module. So a fork
waits until such imports are over.

logging and concurrent.futures register pairs of hooks for forks. If a fork waited while they are
first imported, it would run the second of each pair alone, so they are imported here.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401
import importlib
import logging  # noqa: F401
import os
import threading
from typing import Any

_PACKAGES = ("esper_alloc", "torch")
_bootstrap: Any = importlib._bootstrap


def _imported_by_others() -> list[str]:
    """The modules of these packages that other threads are importing."""
    me = threading.get_ident()
    found = []
    for name, reference in list(getattr(_bootstrap, "_module_locks", {}).items()):
        owner = getattr(reference(), "owner", None)
        if owner not in (None, me) and name.partition(".")[0] in _PACKAGES:
            found.append(name)
    return found


def _wait_for_imports() -> None:
    waited_for: set[str] = set()
    while names := set(_imported_by_others()) - waited_for:
        for name in names:
            # Returns at once where the import waits for one of this thread's.
            _bootstrap._lock_unlock_module(name)
        waited_for |= names


# At the package's import, and before its other modules: other threads may fork while it goes on.
os.register_at_fork(before=_wait_for_imports)
