"""Doing something once another module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls `then` with module `name` once it has been imported, or now."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    if not _waiting:
        sys.meta_path.insert(0, _Watch())
    _waiting.setdefault(name, []).append(then)


class _Watch(importlib.abc.MetaPathFinder):
    """A finder that finds nothing of its own: it lets the others find a module
    that is waited for, and calls back once that has been executed."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:  # importlib skips old finders, too
                continue
            spec: importlib.machinery.ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                self._watch(name, spec)
                return spec
        return None

    def _watch(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        # The loader stays what it is, since sources are read through it. Each
        # search makes a fresh one.
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(loader).pop("exec_module", None)
            waiting = _waiting.pop(name, [])
            if not _waiting and self in sys.meta_path:
                sys.meta_path.remove(self)
            for then in waiting:
                then(module)

        loader.exec_module = exec_module
