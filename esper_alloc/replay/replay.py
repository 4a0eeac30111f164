"""Runs recorded jobs through the core.

A file that torch.cuda.memory._dump_snapshot or a black box wrote is rebuilt into histories
(history.py), checked against native's blocks (pytorch_peaks.py), and its operations
are run by ``_core.replay`` on the simulated device or on the GPU.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .. import _core
from ..recorder.reading import BlackBoxError, is_black_box, load_black_box
from .black_boxes import snapshot_of
from .history import History, rebuild
from .operations import Operations, make_operations
from .pytorch_peaks import NativePeaks, native_peaks
from .recorded import Recorded, Usage, add_up
from .snapshot import Snapshot, SnapshotError, load_snapshot

Device = Literal["sim", "cuda"]
DEVICES: tuple[Device, ...] = ("sim", "cuda")

Segments = Literal["mapped", "classic"]
SEGMENTS: tuple[Segments, ...] = ("mapped", "classic")

#: Bytes. The simulated device takes seconds for so much, and hours for ten times as much.
MOST_RESERVED = 1 << 40


class ReplayError(Exception):
    """The core could not run a history; the message is one line."""


@dataclass(frozen=True)
class Recording:
    """One device of one file, with all that is known before it is replayed."""

    history: History
    recorded: Recorded
    native: NativePeaks
    operations: Operations


@dataclass(frozen=True)
class Replayed:
    """One recording with one kind of segments. Bytes; device_calls by function."""

    kind: Segments
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    segments: int
    operations: int
    ns_per_operation: float
    device_calls: dict[str, int]
    usage: Usage


def load_recordings(
    path: str | os.PathLike[str], report: Callable[[str], None] = lambda what: None
) -> list[Recording]:
    """All devices of a file that have entries. Tells `report` what it is doing.
    Raises SnapshotError."""
    report(f"reading {path}")
    snapshot = load(path)
    entries = sum(len(trace.actions) for trace in snapshot.traces)
    report(f"rebuilding {path}: {entries:,} entries")
    recordings = []
    try:
        for history in rebuild(snapshot):
            name = f"{path}, device {history.device}"
            report(f"checking {name} against native's blocks")
            native = native_peaks(history)
            report(f"adding up {name}")
            recorded = add_up(history)
            if recorded.peak_reserved > MOST_RESERVED:
                most = f"{recorded.peak_reserved} bytes"
                history.contradiction(None, f"{most} were reserved, more than any device has")
            report(f"preparing {name}")
            recordings.append(Recording(history, recorded, native, make_operations(history)))
    except MemoryError:
        raise SnapshotError(f"{snapshot.path}: too large for this machine's memory") from None
    return recordings


def load(path: str | os.PathLike[str]) -> Snapshot:
    """What a file of a black box, or a snapshot of PyTorch's, tells. Raises SnapshotError."""
    try:
        if is_black_box(path):
            return snapshot_of(load_black_box(path))
    except BlackBoxError as error:
        raise SnapshotError(str(error)) from None
    except OSError:
        pass  # which load_snapshot() will say
    return load_snapshot(path)


def replay(recording: Recording, kind: Segments = "mapped", device: Device = "sim") -> Replayed:
    """Runs the recording through a fresh core, whose segments are of this kind. Raises
    ReplayError."""
    operations, history = recording.operations, recording.history
    try:
        ran = _core.replay(
            operations.packed,
            start=operations.start,
            slots=operations.slots,
            streams=operations.streams,
            uses=operations.uses,
            pools=operations.pools,
            segments=kind,
            device=device,
        )
    except RuntimeError as error:
        message, _, operation = error.args
        entry = operations.entry_of(operation)
        where = "" if entry is None else f", entry {entry}"
        raise ReplayError(
            f"{history.path}: device {history.device}{where}: {kind} on {device}: {message}"
        ) from None
    curve = array("q", ran["curve"])
    return Replayed(
        kind=kind,
        peak_allocated=ran["peak_allocated"],
        peak_active=ran["peak_active"],
        peak_reserved=ran["peak_reserved"],
        segments=ran["segments"],
        operations=ran["operations"],
        ns_per_operation=ran["nanoseconds"] / max(ran["operations"], 1),
        device_calls=ran["device_calls"],
        usage=Usage(curve[0::3], curve[1::3], curve[2::3]),
    )


def fragmentation(peak_active: int, peak_reserved: int) -> float:
    """The share of the most reserved bytes that the most active ones leave."""
    return 1 - peak_active / peak_reserved if peak_reserved else 0.0
