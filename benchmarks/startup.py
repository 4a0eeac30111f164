"""What it costs to be there."""

from __future__ import annotations

import time
from typing import Any

from measuring import choose_allocator, device_used_mib, machine

ELEMENTS = 1 << 20  # of float32: 4 MiB


def first(allocator: str) -> dict[str, Any]:
    """Milliseconds and MiB of this process, in which CUDA was not used before."""
    import torch

    choose_allocator(allocator)
    torch.cuda.init()
    torch.cuda.synchronize()  # makes the context
    figures: dict[str, Any] = {"idle_mib": device_used_mib()}
    begin = time.perf_counter()
    x = torch.empty(ELEMENTS, device="cuda")
    allocated = time.perf_counter()
    x.fill_(1.0)
    torch.cuda.synchronize()
    figures["first_ms"] = (time.perf_counter() - begin) * 1e3
    figures["first_allocation_us"] = (allocated - begin) * 1e6
    return {"machine": machine(), **figures}
