"""vLLM's sleep mode over tags and sleep.

vLLM allocates weights, the KV cache and the like under tags of an allocator of its own,
``CuMemAllocator``, and puts that to sleep. Where a process runs on esper_alloc, :func:`register`,
which vLLM calls as a plug-in (entry point group ``vllm.general_plugins``), puts
:class:`SleepAllocator` in its place. Elsewhere vLLM keeps its own.

A vLLM with ``--sleep-mode-backend`` still allocates through ``CuMemAllocator``, and its default
backend puts that to sleep. So the default serves there, too. The name ``esper_alloc`` stands for
the same backend, but is refused where esper_alloc does not serve.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from ..installation.pytorch import untyped
from .enabling import is_enabled
from .sleep import Keep, names_of, sleep_or_warn, tag as tagged, tag_stats, wake

__all__ = ["SleepAllocator", "register"]

_MODULE = "vllm.device_allocator.cumem"
_BACKENDS = "vllm.device_allocator.sleep_mode_backend"
_BACKEND = "SleepBackend"
_GRAPHS = "cudagraph"


class SleepAllocator:
    """The interface of vLLM's ``CuMemAllocator``. Its tags are esper_alloc's tags, by names that a
    trainer in the same process does not use: "vLLM's weights".

    Memory keeps to the streams and graphs that use it as any of esper_alloc's, free memory is
    shared with what has no tag, and live bytes are kept, not whole allocations.
    """

    instance: ClassVar[SleepAllocator | None] = None
    default_tag: ClassVar[str] = "default"

    def __init__(self) -> None:
        self._tags: set[str] = set()
        self._graph_pool: tuple[int, int] | None = None

    @staticmethod
    def get_instance() -> SleepAllocator:
        if SleepAllocator.instance is None:
            SleepAllocator.instance = SleepAllocator()
        return SleepAllocator.instance

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What this thread allocates inside has the tag."""
        tag = self.default_tag if tag is None else tag
        with tagged(_name(tag)):
            self._tags.add(tag)
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """The pool of all graphs that are captured inside; their memory has a tag, too."""
        import torch

        if self._graph_pool is None:
            self._graph_pool = untyped(torch.cuda.graph_pool_handle)()
        with self.use_memory_pool(_GRAPHS):
            yield self._graph_pool

    def sleep(self, offload_tags: Iterable[str] | str | None = None) -> None:
        """Puts all tags to sleep. The contents of `offload_tags` are kept, others are dropped."""
        kept = self._tags & set(
            names_of(self.default_tag if offload_tags is None else offload_tags)
        )
        self._put_to_sleep(kept, "host")
        self._put_to_sleep(self._tags - kept, "nothing")
        _give_back()

    def discard(self, tags: Iterable[str] | str) -> None:
        """Puts tags to sleep and drops their contents. What sleeps already stays as it is."""
        self._put_to_sleep(self._tags & set(names_of(tags)), "nothing")

    def wake_up(self, tags: Iterable[str] | str | None = None) -> None:
        """Wakes these tags (None: all), and those that vLLM does not wake one by one. What was
        dropped is full of zeros."""
        chosen = None if tags is None else names_of(tags)
        deferrable = getattr(
            importlib.import_module("vllm.device_allocator"), "DEFERRABLE_TAGS", self._tags
        )
        wanted = [
            one for one in self._tags if chosen is None or one in chosen or one not in deferrable
        ]
        if wanted:
            wake([_name(one) for one in wanted])

    def get_current_usage(self) -> int:
        """Live bytes of all tags on the current device, whether they sleep or not."""
        stats = tag_stats()
        names = {_name(one) for one in self._tags} & stats.keys()
        return sum(stats[one]["allocated_bytes"] for one in names)

    def release_pools(self) -> None:
        """Nothing to do: there are no pools that could outlive their allocator."""

    def close(self) -> None:
        """As release_pools()."""

    def _put_to_sleep(self, tags: Iterable[str], keep: Keep) -> None:
        if chosen := sorted(tags):
            sleep_or_warn([_name(one) for one in chosen], keep)


def _name(tag: str) -> str:
    return f"vLLM's {tag}"


def register() -> None:
    """Lets vLLM's sleep mode use esper_alloc, if this process runs on it. Warns where this vLLM
    asks for what is not known here; then its own sleep mode stays."""
    _register_backend()
    if not is_enabled():
        return
    try:
        cumem: Any = importlib.import_module(_MODULE)
        theirs = cumem.CuMemAllocator
    except (ImportError, AttributeError) as error:
        _leave(f"it has no {_MODULE}.CuMemAllocator ({error})")
        return
    unknown = sorted(_public(theirs) - _public(SleepAllocator))
    if unknown:
        _leave(f"its allocator has {', '.join(unknown)}, which esper_alloc does not know")
    elif theirs is not SleepAllocator and getattr(theirs, "instance", None) is not None:
        _leave("its allocator is in use already")
    else:
        cumem.CuMemAllocator = SleepAllocator
        cumem.cumem_available = True


def _register_backend() -> None:
    try:
        factory = importlib.import_module(_BACKENDS).SleepModeBackendFactory
    except (ImportError, AttributeError):  # a vLLM without --sleep-mode-backend
        return
    with contextlib.suppress(ValueError):  # it has the name from an earlier call
        factory.register_backend("esper_alloc", __name__, _BACKEND)


def __getattr__(name: str) -> Any:
    """vLLM's factory asks this module for the backend, whose base comes from vLLM."""
    if name != _BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = importlib.import_module(_BACKENDS).CuMemBackend
    members = {"__module__": __name__, "is_supported": classmethod(lambda _: _serves())}
    return type(_BACKEND, (base,), members)


def _serves() -> bool:
    """Whether vLLM's allocator is ours. If not, warns why."""
    if importlib.import_module(_MODULE).CuMemAllocator is SleepAllocator:
        return True
    if not is_enabled():
        _leave("this process does not run on it; start vLLM with `python -m esper_alloc run`")
    return False


def _leave(why: str) -> None:
    warnings.warn(
        f"vLLM's sleep mode does not use esper_alloc: {why}", RuntimeWarning, stacklevel=3
    )


def _public(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def _give_back() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
