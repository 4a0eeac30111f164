"""The numbers of a device that change while a program runs."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from .. import _core
from ..installation.pytorch import untyped


class Figure(NamedTuple):
    """counter: it only rises, from 0 at the process's start."""

    counter: bool
    about: str


FIGURES = {
    "device_total_bytes": Figure(False, "Memory of the device."),
    "device_free_bytes": Figure(False, "Memory of the device that no process has."),
    "reserved_bytes": Figure(False, "Memory that this process took from the driver for tensors."),
    "allocated_bytes": Figure(False, "Live memory."),
    "allocated_peak_bytes": Figure(False, "Peak of live memory since peaks were reset."),
    "pending_bytes": Figure(False, "Freed memory that waits for marked uses on other streams."),
    "mallocs": Figure(True, "Allocations."),
    "frees": Figure(True, "Frees."),
    "grown_bytes": Figure(True, "Memory that was taken from the driver."),
    "held_back": Figure(True, "How often the host was held back before memory would have grown."),
    "held_back_seconds": Figure(True, "How long the host was held back."),
    "out_of_memory": Figure(True, "Requests that failed for lack of memory."),
}


def used_devices() -> list[int]:
    """The devices on which this process has memory, or else the current one. Empty before it uses
    CUDA, and on a pluggable allocator."""
    torch = _torch()
    if torch is None or not _stats(torch, torch.cuda.current_device()):
        return []
    devices = range(torch.cuda.device_count())
    used = [device for device in devices if _stats(torch, device).get("reserved_bytes")]
    return used or [torch.cuda.current_device()]


def figures_of(device: int) -> dict[str, float]:
    """The figures that are known of a device, in bytes and seconds. Empty before the process uses
    CUDA, and on a pluggable allocator. Starts no device, and may be called during a capture on
    esper_alloc."""
    torch = _torch()
    found = {} if torch is None else _stats(torch, device)
    if not found:
        return {}
    ours = is_ours()
    if found["reserved_bytes"]:  # else asking might start the device
        ask = _core.memory_info if ours else torch.cuda.mem_get_info
        found["device_free_bytes"], found["device_total_bytes"] = ask(device)
    counters = _core.counters(device) if ours else dict.fromkeys(_core.COUNTERS, 0)
    found["pending_bytes"] = counters["bytes_pending"]
    found["held_back"] = counters["held_back"]
    found["held_back_seconds"] = counters["held_back_us"] / 1e6
    return {name: found[name] for name in FIGURES if name in found}


def is_ours() -> bool:
    """Whether PyTorch runs on esper_alloc, and not by way of a pluggable allocator."""
    shim = sys.modules.get("esper_alloc._torch")
    return shim is not None and bool(untyped(shim).is_current())


def _torch() -> Any:
    """PyTorch, if it uses CUDA."""
    torch = untyped(sys.modules.get("torch"))
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _stats(torch: Any, device: int) -> dict[str, float]:
    """What PyTorch has; nothing on a pluggable allocator."""
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device)
    except RuntimeError:
        return {}
    return {
        "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
        "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
        "allocated_peak_bytes": stats["allocated_bytes"]["all"]["peak"],
        "mallocs": stats["allocation"]["all"]["allocated"],
        "frees": stats["allocation"]["all"]["freed"],
        "grown_bytes": stats["reserved_bytes"]["all"]["allocated"],
        "out_of_memory": stats["num_ooms"],
    }
