"""What the allocator says about itself, beside ``torch.cuda.memory_stats()``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from ..installation.devices import check_device_name, device_index
from ..installation.pytorch import untyped
from .enabling import is_enabled, why_off
from .sleep import tag_stats

if TYPE_CHECKING:
    import torch

__all__ = ["memory_stats", "report"]


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, float]:
    """Figures of uses on a device; None: the current device.

    Uses of freed memory that have completed are not counted any more. Since the
    process began:

    - ``held_back``: how often the host was held back before memory would have grown;
    - ``held_back_seconds``: how long in all;
    - ``held_back_in_vain``: how often it gave up, because nothing on any device
      completed for a second, or after ten seconds;
    - ``loans``: blocks that were handed out on another stream than their own;
    - ``events_created``: events that were created; in a steady loop this does not grow;
    - ``pages_moved``: pages that moved from where they were free to where memory
      was wanted; in most steady loops this does not grow;
    - ``captured_uses``: marks made inside a capture, of memory that was handed out outside
      it; a snapshot shows such a use as ``held``, and a use of the capture's own memory as
      ``captured``;
    - ``captured_frees``: frees of memory from outside that was marked in a capture; replays
      may still read it;
    - ``marks_exact``: marks whose use ends at the mark;
    - ``marks_until_free``: marks whose use lasts until the free, those by ``record_stream``
      among them.

    At this moment:

    - ``allowance``: bytes of a stream's free memory that may wait for other streams' work before
      the host is held back; more than was asked for, if that left streams idle; 0: the host is
      never held back;
    - ``uses_pending``: uses that may not be over; those of live memory are counted until the
      memory's next mark, even if they have completed;
    - ``bytes_pending``: bytes that were freed while a use of them was not over;
    - ``blocks_held``: freed blocks with a use for which no event could be recorded; they can
      be reused once its stream is seen again, or its device has been synchronised;
    - ``events_alive``: events that exist, in use or kept for later marks;
    - ``bytes_asleep``: bytes of device memory that waking needs, and ``bytes_asleep_peak``, their
      peak since peaks were reset;
    - ``metadata_bytes``: host memory that the allocator uses for itself.

    All but the seconds are integers. All are 0 while PyTorch does not run on esper_alloc, or has
    not used CUDA.

    Raises:
        ValueError: this process has no such CUDA device. Before CUDA is used only the name is
            checked.
        TypeError: `device` is neither index, name nor torch.device.

    Example::

        seconds = esper_alloc.memory_stats()["held_back_seconds"]
    """
    if not _is_running():
        check_device_name(device)
        return _in_seconds(dict.fromkeys(_core.COUNTERS, 0))
    return _in_seconds(_core.counters(device_index(device)))


def _in_seconds(counters: dict[str, int]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, value in counters.items():
        if name.endswith("_us"):
            figures[f"{name.removesuffix('_us')}_seconds"] = value / 1e6
        else:
            figures[name] = value
    return figures


def report() -> str:
    """What the allocator waits for, as text.

    For a program that is slow or hangs. Waits for nothing and uses no stream, so any
    thread may call it, also one that was started beforehand::

        timer = threading.Timer(60, lambda: print(esper_alloc.report()))
        timer.daemon = True  # the program may end before
        timer.start()

    It says for each device how often and how long the host was held back, how often in vain, and
    what the allowance is. It lists the freed blocks for whose uses no event could be recorded,
    which can be reused once the uses' streams are seen again or their devices have been
    synchronised. While memory sleeps, the report also lists its tags. Streams are named
    by their handles, as in ``stream.cuda_stream``. Where :func:`enable` did nothing, it says why.
    """
    if not _is_running():
        if (why := why_off()) is not None:
            return f"esper_alloc is off: {why}\n"
        return "esper_alloc: PyTorch does not run on it, or has not used CUDA yet\n"
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [f"esper_alloc: report of process {os.getpid()}, {when}"]
    for device in range(untyped(sys.modules["torch"]).cuda.device_count()):
        lines += _of_device(device, _in_seconds(_core.counters(device)), _core.pending(device))
        if "esper_alloc._torch" in sys.modules:  # without it nothing sleeps
            lines += _asleep(tag_stats(device))
    return "\n".join(lines) + "\n"


def _is_running() -> bool:
    return is_enabled() and bool(untyped(sys.modules["torch"]).cuda.is_initialized())


# The report's lines


def _of_device(device: int, figures: dict[str, float], blocks: list[Any]) -> Iterator[str]:
    held = [(b, u) for b in blocks if not b["live"] for u in b["uses"] if u["held"]]
    times = int(figures["held_back"])
    back = "the host was never held back"
    if times:
        back = (
            f"the host was held back {_count(times, 'time')}, "
            f"{figures['held_back_seconds']:.3f} s in all, "
            f"{figures['held_back_in_vain']} of them in vain"
        )
    allowance = _size(int(figures["allowance"])) if figures["allowance"] else "off"
    yield f"device {device}: {back}; allowance {allowance}"
    if held:
        yield "  held until its stream is seen again, or its device has been synchronised:"
    for block, use in held:
        yield _of_use(block, use)


def _asleep(tags: dict[str, dict[str, Any]]) -> Iterator[str]:
    asleep = {tag: one for tag, one in tags.items() if one["asleep"] or one["sleeping_bytes"]}
    if asleep:
        yield "  asleep:"
    for tag, one in asleep.items():
        name = f"tag {tag!r}" if tag else "memory without a tag"
        yield (
            f"    {name}: waking needs {_size(one['sleeping_bytes'])}, "
            f"{_size(one['host_bytes'])} on the host"
        )


def _of_use(block: Any, use: Any) -> str:
    by = ", until its free" if use["until_free"] else ""
    return (
        f"    block {block['address']:#x} of {_size(block['size'])}, used on "
        f"{_stream(use['stream'], use['stream_device'])}{by}"
    )


def _stream(handle: int, device: int) -> str:
    name = f"stream {handle:#x}" if handle else "the default stream"
    return f"{name} of device {device}"


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size} bytes"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
