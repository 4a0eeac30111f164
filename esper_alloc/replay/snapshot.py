"""Snapshots: reading the files that ``torch.cuda.memory._dump_snapshot`` writes,
and attaching pending uses to their blocks, tags to their segments and the allowance to the
settings (:func:`with_uses`).

A snapshot is a pickle, plain or gzip-compressed, and a pickle may ask to run
anything. Nothing of that kind is admitted here, twice over: the bytes are
checked before they are loaded (``_core.check_pickle`` knows only the opcodes
of plain containers and scalars, bounds how deep they are nested, and says what
loading them can cost), and the unpickler that then loads them refuses every
look-up by name.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from .. import _core

_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20

#: The name of an annotation that stands for a use (csrc/torch/reporting/snapshot.cpp).
_USE = "esper_alloc.use"
#: And of one that stands for a segment's tag, and how much of it sleeps.
_TAG = "esper_alloc.tag"
#: And of the one that stands for the allowance, among the settings.
_ALLOWANCE = "esper_alloc.allowance"

NO_TRACE_REMEDY = (
    "call torch.cuda.memory._record_memory_history() before the job and _dump_snapshot() after it"
)


class SnapshotError(Exception):
    """The file cannot be replayed; the message is one line that says why."""


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot file holds. Its entries are not believed yet.

    path: as given. segments: the state at the end, a list of dicts.
    traces: for each device the list of its entries, oldest first.
    settings: the recording allocator's options; empty where unknown.
    """

    path: str
    segments: list[Any]
    traces: list[list[Any]]
    settings: dict[Any, Any]


def load_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Loads one file. Raises SnapshotError; its message names the file."""
    name = os.fspath(path)
    try:
        return _shaped(name, _unpickled(_contents(name)))
    except SnapshotError as error:
        raise SnapshotError(f"{name}: {error}") from None
    except OSError as error:
        raise SnapshotError(f"{name}: cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise SnapshotError(f"{name}: too large for this machine's memory") from None


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


def memory_limit() -> int:
    """Bytes that a loaded snapshot may take: three quarters of this machine's."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        physical = 16 << 30
    return physical * 3 // 4


def _refuse_size(size: int) -> None:
    limit = memory_limit()
    if size > limit:
        raise SnapshotError(
            f"loading it could take more than {limit / 2**30:.1f} GiB, "
            "three quarters of this machine's memory"
        )


def _contents(name: str) -> bytes:
    """The file's bytes, decompressed where they are gzip, whatever its name."""
    with open(name, "rb") as file:
        compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if compressed:
            return b"".join(_gunzipped(file))
        return file.read()


def _gunzipped(file: BinaryIO) -> Iterator[bytes]:
    """The members of a gzip file, in pieces; stops before memory runs out."""
    total = 0
    data = file.read(_CHUNK_BYTES)
    try:
        while data:
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                if not data:
                    raise SnapshotError("truncated: its gzip data ends early")
                piece = member.decompress(data, 16 * _CHUNK_BYTES)
                total += len(piece)
                _refuse_size(total)
                yield piece
                data = member.unconsumed_tail or (b"" if member.eof else file.read(_CHUNK_BYTES))
            data = (member.unused_data or file.read(_CHUNK_BYTES)).lstrip(b"\0")
    except zlib.error as error:
        raise SnapshotError(f"its gzip data is damaged: {error}") from None


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers and scalars; whatever has a name is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which no memory snapshot contains"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(
            "it asks for an object outside the file, which no memory snapshot does"
        )


def _unpickled(data: bytes) -> Any:
    if not data:
        raise SnapshotError("not a memory snapshot: the file is empty")
    try:
        _refuse_size(_core.check_pickle(data, memory_limit()))
    except ValueError as error:
        raise SnapshotError(str(error)) from None
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        why = " ".join(str(error).split())
        raise SnapshotError(f"not a memory snapshot: a damaged pickle ({why})") from None


def _shaped(name: str, loaded: Any) -> Snapshot:
    """Checks the outermost containers; the entries are history's business."""
    if not isinstance(loaded, dict):
        raise SnapshotError(
            f"not a memory snapshot: it holds a {type(loaded).__name__}, not a dict "
            "with 'segments' and 'device_traces'"
        )
    for key in ("segments", "device_traces"):
        if not isinstance(loaded.get(key), list):
            raise SnapshotError(f"not a memory snapshot: it has no list of {key!r}")
    traces = loaded["device_traces"]
    for device, trace in enumerate(traces):
        if not isinstance(trace, list):
            raise SnapshotError(f"not a memory snapshot: device_traces[{device}] is not a list")
    if not any(traces):
        raise SnapshotError(f"no trace in it: {NO_TRACE_REMEDY}")
    settings = loaded.get("allocator_settings")
    return Snapshot(
        path=name,
        segments=loaded["segments"],
        traces=traces,
        settings=settings if isinstance(settings, dict) else {},
    )
