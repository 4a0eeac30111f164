"""Snapshots: reading the files that ``torch.cuda.memory._dump_snapshot`` writes,
and attaching pending uses to their blocks, tags to their segments and the allowance to the
settings (:func:`with_uses`).

A snapshot is a pickle, plain or gzip-compressed, and a hostile pickle can do more harm than run
code. So ``reader.py`` loads it in a process of its own, and hands over numbers only.
"""

from __future__ import annotations

import marshal
import os
import signal
import subprocess
import sys
from array import array
from dataclasses import dataclass, field
from typing import Any, cast

from ..recorder.words import printable
from . import reader

#: The name of an annotation that stands for a use (csrc/torch/reporting/snapshot.cpp).
_USE = "esper_alloc.use"
#: And of one that stands for a segment's tag, and how much of it sleeps.
_TAG = "esper_alloc.tag"
#: And of the one that stands for the allowance, among the settings.
_ALLOWANCE = "esper_alloc.allowance"


class SnapshotError(Exception):
    """The file cannot be replayed; the message is one line that says why."""


@dataclass(frozen=True)
class Trace:
    """What a snapshot tells of one device that has entries. All numbers are in their ranges;
    whether they fit together is not known yet.

    segments, blocks: the state at the end; blocks are those in use (see reader.py).
    For each entry, oldest first: its position in reader.ACTIONS, its address and bytes (0 where the
    action has none; of an "oom" the device's free bytes, and those asked for), its stream's handle,
    its time in microseconds, and its place: an index into stacks. Those are frames, the innermost
    first; 0 is unknown. older_places: by address, of memory that no entry allocates. waited_for:
    bytes that waited, freed, for uses by streams, by their handles.
    """

    device: int
    segments: list[reader.Segment]
    blocks: list[reader.Block]
    actions: bytes
    addresses: array[int]
    sizes: array[int]
    streams: array[int]
    times: array[int]
    places: array[int]
    stacks: list[tuple[str, ...]]
    older_places: dict[int, int] = field(default_factory=dict)
    waited_for: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot file holds.

    path: for messages. traces: one for each device that has entries.
    expandable, max_split_size (bytes), roundup (divisions of each power of two of MiB): the
    recording allocator's options; None and empty where unknown. info: what a black box says of the
    program; None: PyTorch wrote the file.
    """

    path: str
    traces: list[Trace]
    expandable: bool | None
    max_split_size: int | None
    roundup: dict[int, int]
    info: dict[str, Any] | None = None


def load_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Loads one file. Raises SnapshotError; its message is one line and names the file."""
    name = printable(os.fsdecode(path))
    try:
        found = _read(path)
    except SnapshotError as error:
        raise SnapshotError(f"{name}: {printable(str(error))}") from None
    options, traces = found
    return Snapshot(name, [_trace(*one) for one in traces], *options)


def _trace(
    device: int,
    segments: list[reader.Segment],
    blocks: list[reader.Block],
    columns: reader.Columns,
    stacks: list[reader.Stack],
) -> Trace:
    actions, addresses = columns[0], _numbers("Q", columns[1])
    older = {address: place for address, *_, place in blocks if place}
    for action, address in zip(actions, addresses):
        if action == 0:
            older.pop(address, None)
    return Trace(
        device,
        segments,
        blocks,
        actions,
        addresses,
        _numbers("Q", columns[2]),
        _numbers("q", columns[3]),
        _numbers("q", columns[4]),
        _numbers("I", columns[5]),
        [tuple(stack) for stack in stacks],
        older,
    )


def memory_limit() -> int:
    """Bytes that a loaded snapshot may take: three quarters of this machine's."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        physical = 16 << 30
    return physical * 3 // 4


def _read(path: str | os.PathLike[str]) -> reader.Found:
    """What the reader, in its own process, finds in the file."""
    # -I and -S: nothing of the environment, and no packages.
    command = [sys.executable or "", "-I", "-S", reader.__file__, str(memory_limit())]
    try:
        with open(path, "rb") as file:
            done = subprocess.run(command, stdin=file, capture_output=True)
    except OSError as error:
        why = error.strerror or str(error)
        if error.filename == command[0]:
            why = f"sys.executable, {command[0]!r}, does not start: {why}"
        raise SnapshotError(f"cannot be read: {why}") from None
    if done.returncode < 0:
        raise SnapshotError(
            "not a memory snapshot: loading it was ended by a signal "
            f"({signal.strsignal(-done.returncode)}), as by a damaged or hostile file, or by too "
            f"little memory; {reader.REMEDY}"
        )
    try:
        found = marshal.loads(done.stdout)
    except (EOFError, TypeError, ValueError):
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SnapshotError(f"cannot be read: {command[0]} answers {why!r}") from None
    if isinstance(found, str):
        raise SnapshotError(found)
    return cast(reader.Found, found)


def _numbers(typecode: str, data: bytes) -> array[int]:
    numbers: array[int] = array(typecode)
    numbers.frombytes(data)
    return numbers


def with_uses(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot whose blocks say which uses they still owe, and whose segments say what sleeps.

    PyTorch's structure has no room for that, so ``torch.cuda.memory._snapshot()``
    lists it among ``external_annotations``. In what this returns each block that owes
    some has a key ``uses``, a list of dicts: ``stream`` (its handle), ``device`` (the
    stream's), ``number`` (of the stream's event that ends the use; ``held``: the first
    event number that would end it; 0: there is none) and ``kind``:
    ``record_use``, ``until_free`` (it lasts until the free: such a mark, ``record_stream``,
    an automatic use or a loan), ``held``, or ``captured``.
    Each segment with a tag, or with memory that sleeps, has the keys ``tag`` (``""``: none) and
    ``asleep_size``, the bytes of it that are not on the device. Its ``total_size`` contains them.
    Its ``allocator_settings`` have the key ``esper_alloc_allowance``: bytes, or None if the host is
    never held back. Viewers that do not know a key pass over it.

    Args:
        snapshot: of ``torch.cuda.memory._snapshot()``; it is not changed, and
            what has neither is shared with the result.
    """
    uses: dict[int, list[dict[str, Any]]] = {}
    tags: dict[int, dict[str, Any]] = {}
    settings = dict(snapshot.get("allocator_settings", {}))
    others = []
    for entry in snapshot.get("external_annotations", ()):
        if entry.get("name") == _USE:
            uses.setdefault(int(entry["address"]), []).append(
                {
                    "stream": int(entry["stream"]),
                    "device": int(entry["stream_device"]),
                    "number": int(entry["number"]),
                    "kind": entry["kind"],
                }
            )
        elif entry.get("name") == _TAG:
            tags[int(entry["address"])] = {
                "tag": entry["tag"],
                "asleep_size": int(entry["asleep_size"]),
            }
        elif entry.get("name") == _ALLOWANCE:
            allowance = entry["stage"]
            settings["esper_alloc_allowance"] = None if allowance == "off" else int(allowance)
        else:
            others.append(entry)
    return {
        **snapshot,
        "allocator_settings": settings,
        "segments": [
            {**_segment_with(segment, uses), **tags.get(segment["address"], {})}
            for segment in snapshot["segments"]
        ],
        "external_annotations": others,
    }


def _segment_with(segment: dict[str, Any], uses: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    blocks = [
        {**block, "uses": uses[block["address"]]} if block["address"] in uses else block
        for block in segment["blocks"]
    ]
    return {**segment, "blocks": blocks}
