"""What the allocator says about itself, beside ``torch.cuda.memory_stats()``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from ..installation.pytorch import untyped
from . import lasting_marks
from .devices import device_index
from .enabling import is_enabled
from .sleep import tag_stats

if TYPE_CHECKING:
    import torch

__all__ = ["memory_stats", "report"]


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Figures of uses and gates on a device; None: the current device.

    Uses of freed memory that have completed are not counted any more. Since the
    process began:

    - ``gates_issued``: waits that were put on streams, so that memory could be
      reused earlier;
    - ``gates_skipped``: waits that were not needed, because the stream waited
      for that point or a later one already;
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
    - ``marks_until_free``: marks whose use lasts until the free, because others could reach the
      memory. Calls of ``record_stream`` are not counted.

    At this moment:

    - ``uses_pending``: uses that may not be over; those of live memory are counted until the
      memory's next mark, even if they have completed;
    - ``bytes_pending``: bytes that were freed while a use of them was not over;
    - ``blocks_held``: freed blocks with a use for which no event could be recorded; they can
      be reused once its stream is seen again, or its device has been synchronised;
    - ``events_alive``: events that exist, in use or kept for later marks;
    - ``bytes_orphaned``: bytes of pages that the driver neither mapped nor took back;
      0 unless the driver fails;
    - ``bytes_asleep``: bytes of device memory that waking needs, and ``bytes_asleep_peak``, their
      peak since peaks were reset;
    - ``metadata_bytes``: host memory that the allocator uses for itself.

    All are 0 while PyTorch does not run on esper_alloc, or has not used CUDA. Then `device` is not
    looked at.

    Raises:
        ValueError: this process has no such CUDA device.
        TypeError: `device` is neither index, name nor torch.device.
    """
    if not _is_running():
        return dict.fromkeys(_core.COUNTERS, 0)
    return _core.counters(device_index(device))


def report() -> str:
    """The waits that the allocator added to streams, as text.

    For a program that hangs: if a gate is the reason, it is listed here, with the
    two streams and its age. Waits for nothing and uses no stream, so it may
    be called from any thread, or from a Python signal handler::

        signal.signal(signal.SIGUSR1, lambda *_: print(esper_alloc.report()))

    It has three lists for each device: the gates that may still be waiting; the freed blocks
    for whose uses no event could be recorded, which can be reused once the uses' streams are
    seen again or their devices have been synchronised; and the uses that no stream is made to
    wait for (``gate=False``, or on a stream with the trait ``rendezvous``). While memory sleeps,
    the report also lists its tags. After :func:`warn_about_marks` it lists the lines whose marks
    last until the free. Streams are named by their handles, as in ``stream.cuda_stream``. Sizes of
    blocks are in bytes.
    """
    if not _is_running():
        return "esper_alloc: PyTorch does not run on it, or has not used CUDA yet\n"
    now = time.time()
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    lines = [f"esper_alloc: report of process {os.getpid()}, {when}"]
    for device in range(untyped(sys.modules["torch"]).cuda.device_count()):
        lines += _of_device(device, _core.gates(device), _core.pending(device), now)
        if "esper_alloc._torch" in sys.modules:  # without it nothing sleeps
            lines += _asleep(tag_stats(device))
    lines += lasting_marks.lines()
    return "\n".join(lines) + "\n"


def _is_running() -> bool:
    return is_enabled() and bool(untyped(sys.modules["torch"]).cuda.is_initialized())


# The report's lines


def _of_device(device: int, gates: list[Any], blocks: list[Any], now: float) -> Iterator[str]:
    held = [(b, u) for b in blocks if not b["live"] for u in b["uses"] if u["held"]]
    ungated = [(b, u) for b in blocks for u in b["uses"] if u["no_gate"] and not u["held"]]
    yield (
        f"device {device}: {_count(len(gates), 'gate')} pending, "
        f"{_count(len({b['address'] for b, _ in held}), 'block')} held, "
        f"{_count(len(ungated), 'use')} without gate"
    )
    if gates:
        yield "  gates, oldest first:"
    for gate in gates:
        seconds = max(0.0, now - gate["issued_us"] / 1e6)
        yield (
            f"    {_stream(gate['waiting'], gate['device'])} waits for "
            f"{_stream(gate['stream'], gate['stream_device'])}, event "
            f"{gate['number']}, since {seconds:.3f} s, for a block of "
            f"{_size(gate['size'])}"
        )
    if held:
        yield "  held until its stream is seen again, or its device has been synchronised:"
    for block, use in held:
        yield _of_use(block, use)
    if ungated:
        yield "  uses that nobody is made to wait for:"
    for block, use in ungated:
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
    state = "live" if block["live"] else "freed"
    by = ", by record_stream" if use["at_free"] else ", until its free" if use["until_free"] else ""
    event = f", event {use['number']}" if use["number"] and not use["held"] else ""
    return (
        f"    block {block['address']:#x} of {_size(block['size'])}, {state}, used on "
        f"{_stream(use['stream'], use['stream_device'])}{event}{by}"
    )


def _stream(handle: int, device: int) -> str:
    name = f"stream {handle:#x}" if handle else "the default stream"
    return f"{name} of device {device}"


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size} bytes"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
