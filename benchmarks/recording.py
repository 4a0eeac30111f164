"""What it takes to write a history, and to make of it what people look at."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import loops
import torch
from calls import LEAST
from common import NATIVE
from measuring import machine, use_allocator

LIVE, MOST, POWER = 1_000, 20, 2  # blocks, of up to 2^20 bytes


def written(allocator: str, events: int, small: bool = False) -> dict[str, Any]:
    """Mallocs and frees among 1,000 live blocks, `events` together, without stacks: s to write
    their history to a file, bytes an event, and s to read it and compute esper-alloc's page."""
    events = 20_000 if small else events
    use_allocator(allocator)
    torch.zeros(1, device="cuda")
    if allocator == NATIVE:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=events)
    loops.churn(LIVE, LEAST, MOST, POWER, events // 4, rounds=1, longest=60.0)  # and one before
    figures: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "history")
        begin = time.perf_counter()
        if allocator == NATIVE:
            torch.cuda.memory._dump_snapshot(str(path))
            count = events
        else:
            import esper_alloc

            esper_alloc.black_box(path)
        figures["write_s"] = time.perf_counter() - begin
        if allocator != NATIVE:
            count, figures["page_s"] = page_seconds(path)
        figures["bytes_an_event"] = os.path.getsize(path) / count
    torch.cuda.empty_cache()
    return figures


def page_seconds(path: Path) -> tuple[int, float]:
    """How many events a black box has; s to read it and write the page that shows it."""
    from esper_alloc.recorder.reading import load_black_box
    from esper_alloc.view.page import write_page

    begin = time.perf_counter()
    recording = load_black_box(path)
    write_page(recording, path.with_suffix(".html"))
    return len(recording), time.perf_counter() - begin
