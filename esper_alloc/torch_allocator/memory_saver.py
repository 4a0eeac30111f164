"""The interface of the package ``torch_memory_saver``, over tags and sleep.

A program that says ``from torch_memory_saver import torch_memory_saver`` can say
``from esper_alloc.torch_allocator.memory_saver import torch_memory_saver`` instead, and enable
esper_alloc. A framework that says so is left as it is: ``run --memory-saver`` lets it find this one
(:func:`stand_in`). No library is preloaded, and contents of captured graphs are kept as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from ..installation.pytorch import untyped
from .sleep import Keep, sleep_or_warn, tag as tagged, wake

__all__ = ["MemorySaver", "stand_in", "torch_memory_saver"]

_PACKAGE = "torch_memory_saver"
_KEEPS: tuple[Keep, ...] = ("host", "nothing")


class MemorySaver:
    """Regions of memory that are paused and resumed by their tag.

    With ``TMS_INIT_ENABLE=1`` in the environment, all memory outside of regions is a region with
    the tag "default", whose contents are kept with ``TMS_INIT_ENABLE_CPU_BACKUP=1``.
    """

    _impl = None  # slime asks: no library of the package's is at work

    def __init__(self) -> None:
        #: By the regions' tag: the tags of esper_alloc that stand for it, and what each keeps.
        self._regions: dict[str, dict[str, Keep]] = {}
        if os.environ.get("TMS_INIT_ENABLE") == "1":
            kept = os.environ.get("TMS_INIT_ENABLE_CPU_BACKUP") == "1"
            self._regions["default"] = {"": _keep(kept)}

    @property
    def enabled(self) -> bool:
        return True

    @contextlib.contextmanager
    def region(
        self, tag: str = "default", enable_cpu_backup: bool = False, **others: Any
    ) -> Iterator[None]:
        """What this thread allocates inside can be paused.

        Args:
            tag: whose memory is paused together.
            enable_cpu_backup: keeps the contents in host memory while it is paused. Without it
                the memory is full of zeros afterwards.

        Raises:
            NotImplementedError: another option than these is given and not false.
            TypeError: `tag` is no name.
        """
        _refuse(others)
        with self._tagged(tag, enable_cpu_backup):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        **others: Any,
    ) -> Iterator[None]:
        """``torch.cuda.graph(cuda_graph, ...)`` whose memory can be paused. Raises: as region()."""
        import torch

        _refuse(others)
        graph = untyped(torch.cuda.graph)
        with (
            self._tagged(tag, enable_cpu_backup),
            graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
        ):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """What this thread allocates inside is not paused; what is free of it afterwards goes back
        to the driver."""
        import torch

        with tagged("never paused"):
            yield
        torch.cuda.empty_cache()

    def pause(self, tag: str | None = None) -> None:
        """Puts the memory of the regions with this tag (None: all regions) to sleep. Warns of what
        stays. Raises: as :func:`esper_alloc.sleep`. No contents are lost after an error: what is
        kept goes to sleep first."""
        names = self._names(tag)
        for keep in _KEEPS:
            if chosen := [name for name, kept in names.items() if kept == keep]:
                sleep_or_warn(chosen, keep)

    def resume(self, tag: str | None = None) -> None:
        """Wakes it. Raises: as :func:`esper_alloc.wake`."""
        names = tuple(self._names(tag))
        if names:
            wake(names)

    @contextlib.contextmanager
    def _tagged(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        _check_name(tag)
        keep = _keep(enable_cpu_backup)
        name = f"{tag}, keeps {keep}"
        with tagged(name):
            # Only now: pause() and resume() name the tags that were entered.
            self._regions.setdefault(tag, {})[name] = keep
            yield

    def _names(self, tag: str | None) -> dict[str, Keep]:
        if tag is not None:
            _check_name(tag)
            return dict(self._regions.get(tag, {}))
        return {name: keep for region in self._regions.values() for name, keep in region.items()}


def _keep(enable_cpu_backup: bool) -> Keep:
    return "host" if enable_cpu_backup else "nothing"


def _check_name(tag: str) -> None:
    if not isinstance(tag, str):
        raise TypeError(f"tag={tag!r}: pass a name")


def _refuse(others: dict[str, Any]) -> None:
    given = sorted(name for name, value in others.items() if value)
    if given:
        raise NotImplementedError(
            f"esper_alloc's memory saver has no {', '.join(given)}: leave it out"
        )


torch_memory_saver = MemorySaver()


def stand_in() -> None:
    """Lets later imports of the package ``torch_memory_saver`` find :data:`torch_memory_saver` of
    this module. Does nothing where the package is not installed."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ValueError:  # the program made a module of that name, which has none
        spec = None
    if spec is None:
        return
    package = untyped(importlib.util.module_from_spec(spec))  # slime looks for files beside it
    package.torch_memory_saver = torch_memory_saver
    package.configure_subprocess = contextlib.nullcontext
    sys.modules[_PACKAGE] = package
