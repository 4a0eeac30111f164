"""A snapshot of PyTorch's as the recording that `view` shows. Needs numpy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..recorder import reading as box
from ..recorder.reading import BlackBox, Lane
from .history import NEVER, History, rebuild
from .reader import ACTIONS, DEFAULT_POOL, PoolId
from .replay import MOST_RESERVED
from .snapshot import Snapshot, SnapshotError, Trace, load_snapshot

_NAMED = {
    "alloc": box.ALLOC,
    "free_requested": box.FREE,
    "free_completed": box.AVAILABLE,
    "segment_alloc": box.SEGMENT_ALLOC,
    "segment_free": box.SEGMENT_FREE,
    "segment_map": box.SEGMENT_MAP,
    "segment_unmap": box.SEGMENT_UNMAP,
    "oom": box.OOM,
}
#: By position in ACTIONS; 0: it changes nothing.
_KINDS = np.array([_NAMED.get(one, 0) for one in ACTIONS])
_COLUMNS = ("kind", "us", "address", "size", "stream", "pool", "site", "device", "slot")
_EVENT = np.dtype([(one, "i8") for one in _COLUMNS])
Events = NDArray[Any]

_MOST_LANES = 1 << 16  # a recording numbers them in 16 bits
_LATEST = 1 << 52  # microseconds: as nanoseconds they fit into 64 bits
_OLDER = -1  # the time of what was in use before the first entry
_BEFORE = "(allocated before the recording)"


def load_for_view(path: str | os.PathLike[str]) -> BlackBox:
    """What a snapshot tells. Raises SnapshotError."""
    snapshot = load_snapshot(path)
    try:
        return _recording(snapshot)
    except MemoryError:
        raise SnapshotError(f"{snapshot.path}: too large for this machine's memory") from None


def _recording(snapshot: Snapshot) -> BlackBox:
    pools: dict[PoolId, int] = {DEFAULT_POOL: 0}
    sites: list[tuple[str, ...]] = [(), (_BEFORE,)]
    tables, segments, blocks, slots = [], [], [], 0
    for trace, history in zip(snapshot.traces, rebuild(snapshot)):
        table = _events(trace, history, pools)
        change = 1.0 * (table["kind"] == box.ALLOC) - (table["kind"] == box.FREE)
        if np.cumsum(change * table["size"]).max(initial=0) > MOST_RESERVED:
            history.contradiction(None, "more was live at once than any device has")
        table["slot"][table["slot"] >= 0] += slots
        table["site"][table["site"] > 0] += len(sites) - 1
        table["site"][(table["us"] == _OLDER) & (table["site"] == 0)] = 1
        slots += len(history.sizes)
        sites += trace.stacks[1:]
        tables.append(table)
        for _, start, end, pool, mapped, stream in trace.segments:
            large = end - start > 2 << 20
            segments.append(
                box.Segment(start, end - start, trace.device, mapped, large, stream, pool)
            )
        blocks += [box.Block(*one[:5]) for one in trace.blocks]
    events = np.concatenate(tables)
    events = events[np.argsort(events["us"], kind="stable")]
    kinds, of = events["kind"], events["slot"]
    lanes, lane_numbers = _lanes(snapshot.path, events, list(pools), segments)
    times, has_times = _times(events["us"])
    born, freed = np.full(slots + 1, NEVER), np.full(slots + 1, NEVER)  # the last: of no slot
    for at, kind in ((born, box.ALLOC), (freed, box.FREE)):
        at[of[kinds == kind]] = np.flatnonzero(kinds == kind)
    end = int(times[-1]) if len(times) else 0
    begin = int(np.min(times[np.count_nonzero(events["us"] == _OLDER) :], initial=end))
    return BlackBox(
        path=snapshot.path,
        why="",
        pid=0,
        begin=begin,
        complete=begin,
        end=end,
        lost=0,
        info={},
        lanes=lanes,
        sites=sites,
        segments=segments,
        blocks=blocks,
        kinds=kinds.astype("u1").data,
        times=times.data,
        addresses=events["address"].astype("u8").data,
        sizes=events["size"].astype("u8").data,
        lane_numbers=lane_numbers.astype("u2").data,
        site_numbers=events["site"].astype("u4").data,
        threads=np.zeros(len(events), "u4").data,
        partners=np.where(kinds == box.ALLOC, freed[of], born[of]).data,
        is_snapshot=True,
        has_times=has_times,
    )


def _events(trace: Trace, history: History, pools: dict[PoolId, int]) -> Events:
    """A device's events, in order: first what was in use before the first entry."""
    older = []
    for block in history.start:
        slot, site = block.slot, trace.older_places.get(block.address, 0)
        kinds = (box.ALLOC, box.FREE, box.PENDING) if block.pending else (box.ALLOC,)
        memory = block.address, history.sizes[slot], history.streams[slot]
        older += [(kind, _OLDER, *memory, 0, site, trace.device, slot) for kind in kinds]
    count = len(trace.actions)
    table, entry = np.zeros(count, _EVENT), np.arange(count)
    table["kind"] = _KINDS[np.frombuffer(trace.actions, "u1")]
    table["us"] = np.maximum.accumulate(np.clip(np.array(trace.times), 0, _LATEST))
    table["address"], table["size"] = trace.addresses, trace.sizes
    table["stream"], table["site"], table["device"] = trace.streams, trace.places, trace.device
    slots = np.fromiter((step[3] for step in history.steps), np.int64, count)
    table["slot"] = slots
    for number, pool in history.segment_pools.items():
        table["pool"][number] = pools.setdefault(pool, len(pools))
    requested = np.array([*history.requested_at, NEVER])[slots]
    completed = np.array([*history.completed_at, NEVER])[slots]
    table["kind"][(table["kind"] == box.AVAILABLE) & (requested == entry - 1)] = 0
    waits = (table["kind"] == box.FREE) & (completed != entry + 1)
    row = np.repeat(entry, 1 + waits)
    table = table[row]
    table["kind"][np.diff(row, prepend=-1) == 0] = box.PENDING
    return np.concatenate([np.array(older, _EVENT), table[table["kind"] > 0]])


def _lanes(
    path: str, events: Events, pools: list[PoolId], segments: list[box.Segment]
) -> tuple[list[Lane], NDArray[np.int64]]:
    """All lanes, their own segments unknown, and the lane of each event."""
    streams, stream = np.unique(events["stream"], return_inverse=True)
    key = (events["device"] * len(streams) + stream) * len(pools) + events["pool"]
    keys, number = np.unique(key, return_inverse=True)
    lanes = {(-1, 0, DEFAULT_POOL): 0}
    for rest, pool in (divmod(one, len(pools)) for one in keys.tolist()):
        device, at = divmod(rest, len(streams))
        lanes[device, int(streams[at]), pools[pool]] = len(lanes)
    for one in segments:
        lanes.setdefault((one.device, one.stream, one.pool), len(lanes))
    if len(lanes) > _MOST_LANES:
        raise SnapshotError(
            f"{path}: {len(lanes) - 1} streams and pools: `view` cannot show so many"
        )
    return [Lane(*one, before=0) for one in lanes], number + 1


def _times(us: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
    """Nanoseconds, rising by one at least where a microsecond has not more than a thousand events;
    or the numbers of events as seconds, where all have one time: then False."""
    older = np.count_nonzero(us == _OLDER)
    count = np.arange(len(us)) - older
    recorded = us[older:]
    if len(recorded) > 1 and recorded[0] == recorded[-1]:
        return count * 10**9, False
    first = recorded[0] if len(recorded) else 0
    rank = count + older - np.searchsorted(us, us)
    times = us * 1000 + np.minimum(rank, 999)
    times[:older] = first * 1000 + count[:older]
    return times, True
