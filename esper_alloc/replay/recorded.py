"""What a recording itself says of its memory, entry by entry."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .history import History, rounded
from .reader import ALLOC, COMPLETE, GROW, REQUEST, SHRINK


@dataclass(frozen=True)
class Usage:
    """Bytes after each entry or operation; traced sizes, each up to 512."""

    allocated: array[int]
    active: array[int]
    reserved: array[int]


@dataclass(frozen=True)
class Recorded:
    """Peaks in bytes, segments at their most, and the course of it."""

    peak_allocated: int
    peak_active: int
    peak_reserved: int
    segments: int
    usage: Usage


def add_up(history: History) -> Recorded:
    """From the state at the start on. Mapped pages that touch are one segment."""
    live = active = 0
    for block in history.start:
        size = rounded(history.sizes[block.slot])
        active += size
        live += 0 if block.pending else size
    reserved = sum(one.end - one.start for one in history.start_ranges)
    peak_live, peak_active, peak_reserved = live, active, reserved
    usage = Usage(array("q"), array("q"), array("q"))
    note_live, note_active = usage.allocated.append, usage.active.append
    note_reserved = usage.reserved.append
    for code, _, size, _ in history.steps:
        if code <= COMPLETE:
            size = (size + 511) & -512  # rounded(); a call for each entry would take longer
            if code == ALLOC:
                live += size
                active += size
                if live > peak_live:
                    peak_live = live
                if active > peak_active:
                    peak_active = active
            elif code == REQUEST:
                live -= size
            else:
                active -= size
        elif code == GROW:
            reserved += size
            peak_reserved = max(peak_reserved, reserved)
        elif code == SHRINK:
            reserved -= size
        note_live(live)
        note_active(active)
        note_reserved(reserved)
    return Recorded(peak_live, peak_active, peak_reserved, history.peak_segments, usage)
