"""A recorded job up to the request that failed, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..replay.history import History, pool_beside, rounded
from ..replay.operations import make_operations
from ..replay.ranges import Range, Ranges
from ..replay.reader import ACTIONS, DEFAULT_POOL, GROW, SHRINK, PoolId
from ..replay.replay import MOST_RESERVED, Segments
from ..replay.snapshot import Snapshot, Trace
from ..view.places import CATEGORIES, NO_STACK, category_of, line_of

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

ALLOC, FREE, FREE_PENDING, DONE, RELEASE, EMPTY = range(6)
#: As ``_core.replay`` takes it.
OPERATION = np.dtype([(one, "u4") for one in ("kind", "slot", "stream", "pool")] + [("size", "u8")])
#: A moment after all entries.
NEVER = 1 << 62
_OOM = list(ACTIONS).index("oom")
#: By so much a device's memory comes.
GRANULE = 2 << 20


@dataclass(frozen=True)
class Room:
    """The device when the request failed. Bytes.

    taken: what others hold: other processes, other libraries, CUDA itself; None: the recording does
    not tell, and `total` is without it. limit: what this process may reserve; None: there is none.
    """

    total: int
    taken: int | None
    limit: int | None

    @property
    def capacity(self) -> int:
        """What this process could reserve."""
        return min(self.total - (self.taken or 0), self.limit or self.total)


@dataclass(frozen=True)
class Request:
    """The request that failed: bytes, the stream's handle, the line of code, and the entry."""

    size: int
    stream: int
    line: int
    stack: tuple[str, ...]
    entry: int


@dataclass(frozen=True)
class Job:
    """One device's history up to a request.

    By slot, and at last for the request: sizes (bytes), born (entry; -1: before the first), freed
    and over (entries; NEVER), addresses, pool (index into pools), line (index into lines), category
    (index into CATEGORIES). operations: up to the request, without it; slots: of each. ranges: the
    segments when the request failed. by_us: a black box is the source. lost_beginning: entries are
    missing at the start. waited_for: bytes that were freed while streams, by their handles, used
    them.
    """

    path: str
    device: int
    by_us: bool
    lost_beginning: bool
    waited_for: dict[int, int]
    request: Request
    room: Room
    kind: Segments
    sizes: Ints
    born: Ints
    freed: Ints
    over: Ints
    addresses: Ints
    pool: Ints
    line: Ints
    category: Ints
    lines: list[str]
    pools: list[PoolId]
    operations: NDArray[Any]
    slots: Ints
    streams: int
    request_stream: int
    uses: int
    ranges: list[Range]

    @cached_property
    def live(self) -> Mask:
        """The slots that are live when the request fails; not the request."""
        at = self.request.entry
        return np.append(((self.born < at) & (self.freed >= at))[:-1], False)

    @cached_property
    def pending(self) -> Mask:
        """The slots that were freed and are still used by another stream then."""
        at = self.request.entry
        return np.append(((self.freed < at) & (self.over >= at))[:-1], False)

    @cached_property
    def reserved(self) -> int:
        return sum(one.end - one.start for one in self.ranges)

    def reserved_by_unknown_pools(self, but: PoolId | None = None) -> int:
        """Bytes of the pools, but for one, of which the history has no block."""
        known = {None, DEFAULT_POOL, but, *self.pools}
        return sum(one.end - one.start for one in self.ranges if one.pool not in known)

    @property
    def segments(self) -> Literal["classic", "mapped", "auto"]:
        """With which the replay does as the program did: created pools may be classic."""
        in_pools = any(one.mapped and one.pool not in (None, DEFAULT_POOL) for one in self.ranges)
        return "auto" if self.kind == "mapped" and not in_pools else self.kind

    def in_category(self, *names: str) -> Mask:
        return np.isin(self.category, [CATEGORIES.index(one) for one in names])

    def held_by_line(self) -> Ints:
        """Live bytes of each line."""
        held = np.bincount(self.line[self.live], self.sizes[self.live], len(self.lines))
        return held.astype(np.int64)

    @cached_property
    def gaps(self) -> dict[PoolId, list[int]]:
        """The free ranges of each pool's segments, in bytes."""
        found: dict[PoolId, list[int]] = {}
        for one, gaps in zip(self.ranges, self._gaps_by_range):
            found.setdefault(one.pool or DEFAULT_POOL, []).extend(gaps)
        return found

    @cached_property
    def own_gaps(self) -> list[int]:
        """The free ranges of the default pool's segments that are of the request's stream, as far
        as the recording tells: a segment is of the stream that last made a block there."""
        made = self.operations["kind"] == ALLOC
        stream = np.full(len(self.sizes), self.request_stream)
        stream[self.slots[made]] = self.operations["stream"][made]
        used = np.unique(self.slots[made])
        used = used[np.argsort(self.addresses[used], kind="stable")]
        at, found = self.addresses[used], []
        for one, gaps in zip(self.ranges, self._gaps_by_range):
            first, last = np.searchsorted(at, [one.start, one.end])
            here = used[first:last]
            is_own = (
                not len(here) or stream[here[np.argmax(self.born[here])]] == self.request_stream
            )
            if is_own and one.pool in (None, DEFAULT_POOL):
                found += gaps
        return found

    @cached_property
    def _gaps_by_range(self) -> list[list[int]]:
        active = np.flatnonzero(self.live | self.pending)
        active = active[np.argsort(self.addresses[active])]
        begins = self.addresses[active]
        ends = begins + rounded(self.sizes[active])
        found = []
        for one in self.ranges:
            first, last = np.searchsorted(begins, [one.start, one.end])
            edges = np.concatenate([[one.start], ends[first:last]])
            gaps = np.concatenate([begins[first:last], [one.end]]) - edges
            found.append(gaps[gaps >= 512].tolist())
        return found


def failures(trace: Trace) -> list[int]:
    """The entries at which memory ran out."""
    return [entry for entry, action in enumerate(trace.actions) if action == _OOM]


def job_of(snapshot: Snapshot, trace: Trace, history: History, entry: int) -> Job:
    """The job up to the entry at which memory ran out. Raises SnapshotError."""
    ranges = _ranges_at(trace, entry)
    reserved = sum(one.end - one.start for one in ranges)
    size, place, room = _as_told(snapshot, trace, entry, reserved)
    if room.total > MOST_RESERVED:
        history.contradiction(entry, f"{room.total} bytes are more than any device has")
    lines: dict[str, int] = {}
    stacks = [one or (NO_STACK,) for one in trace.stacks] or [(NO_STACK,)]
    line_of_place = np.array([lines.setdefault(line_of(one), len(lines)) for one in stacks])
    category_of_place = np.array([CATEGORIES.index(category_of(one)) for one in stacks])
    count = len(history.sizes)
    born, addresses, places = np.full(count, -1), np.zeros(count, np.int64), np.zeros(count, int)
    for number, (code, address, _, slot) in enumerate(history.steps):
        if code == ALLOC:
            born[slot], addresses[slot], places[slot] = number, address, trace.places[number]
    for block in history.start:
        addresses[block.slot] = block.address
        places[block.slot] = trace.older_places.get(block.address, 0)
    places = np.append(places, place if place < len(stacks) else 0)
    made = make_operations(history)
    kept = made.start + int(np.searchsorted(np.array(made.entries, np.int64), entry))
    operations = np.frombuffer(made.packed, OPERATION)[:kept]
    slots = operations["slot"].astype(np.int64)
    handles = {handle: number for number, handle in enumerate(dict.fromkeys(history.streams))}
    stream = handles.setdefault(trace.streams[entry], len(handles))
    return Job(
        path=snapshot.path,
        device=trace.device,
        by_us=snapshot.info is not None,
        lost_beginning=bool(history.start),
        waited_for=trace.waited_for,
        request=Request(
            size, trace.streams[entry], int(line_of_place[places[-1]]), stacks[places[-1]], entry
        ),
        room=room,
        kind=_kind(history, ranges),
        sizes=np.append(np.array(history.sizes, np.int64), size),
        born=np.append(born, entry),
        freed=np.append(_moments(history.requested_at), NEVER),
        over=np.append(_moments(history.completed_at), NEVER),
        addresses=np.append(addresses, 0),
        pool=np.append(np.array(history.pool_indexes, np.int64), 0),
        line=line_of_place[places],
        category=category_of_place[places],
        lines=list(lines),
        pools=history.pools,
        operations=operations,
        slots=slots,
        streams=len(handles),
        request_stream=stream,
        uses=made.uses,
        ranges=ranges,
    )


def _moments(entries: list[int]) -> Ints:
    """Entries, where those before the first are -1, and those that never come NEVER."""
    found = np.array(entries, np.int64)
    return np.where(found == -1, NEVER, np.maximum(found, -1))


def _kind(history: History, ranges: list[Range]) -> Segments:
    mapped = history.mapped_steps or any(one.mapped for one in (*ranges, *history.start_ranges))
    return "mapped" if mapped or (not ranges and history.settings.expandable) else "classic"


def _ranges_at(trace: Trace, entry: int) -> list[Range]:
    """The segments before an entry, from those at the end."""
    codes, names = tuple(ACTIONS.values()), tuple(ACTIONS)
    ranges = Ranges(Range(*one[1:5]) for one in trace.segments)
    for number in range(len(trace.actions) - 1, entry - 1, -1):
        action = trace.actions[number]
        if codes[action] not in (GROW, SHRINK):
            continue
        start, mapped = trace.addresses[number], names[action].endswith("map")
        end = start + trace.sizes[number]
        if codes[action] == GROW:
            ranges.remove(start, end, mapped)
        else:
            ranges.add(Range(start, end, pool_beside(ranges, start, end, mapped), mapped))
    return list(ranges)


def _as_told(snapshot: Snapshot, trace: Trace, entry: int, reserved: int) -> tuple[int, int, Room]:
    """The request's bytes and place, and the device's room."""
    free, size = trace.addresses[entry], max(trace.sizes[entry], 1)
    told = (snapshot.info or {}).get("oom")
    told = told if isinstance(told, dict) else {}
    number = {key: value for key, value in told.items() if type(value) is int and value >= 0}
    asked, total = number.get("requested", 0), number.get("device_total", 0)
    is_last = entry == failures(trace)[-1] and number.get("device") == trace.device
    if is_last and asked and asked <= size and free + reserved <= total:
        limit = max(number.get("limit", total), 1)
        room = Room(total, total - free - reserved, limit if limit < total else None)
        return asked, number.get("site", 0), room
    # If more was free than it needs, it was not the device that refused.
    by_limit = free >= rounded(size) + GRANULE
    room = Room(reserved + free, None, max(reserved, 1) if by_limit else None)
    return size, trace.places[entry], room
