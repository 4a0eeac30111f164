"""What the page shows, computed from a recording: facts for JSON, and columns of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..recorder import reading as box
from . import timeline
from .places import CATEGORIES, RULES_IN_WORDS, Places
from .segments import find_pieces, lanes_around
from .spans import Ints, Spans, column, find_blocks, find_pending, last_users

#: Lines of code that the timeline tells apart.
MOST_LINES = 9
#: Streams and pools of one device that can be told apart.
MOST_OWNERS = 12
#: Blocks of one device whose lifetimes are told.
MOST_BLOCKS = 800_000
#: Marks of a host that was held back; the longest.
MOST_MARKS = 2000
#: Lines and streams that are looked at to say for which it waited.
MOST_WAITED_FOR = 50
KIB = 1024
SECOND = 10**9


class Columns:
    """Numbers one after the other, as the page reads them."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._at = 0

    def add(self, values: NDArray[Any], kind: str) -> dict[str, Any]:
        """Where the page finds them. kind: u1, u2, u4, i4 or f8."""
        data = values.astype("<" + kind).tobytes()
        told = {"kind": kind, "at": self._at, "count": values.size}
        padding = -len(data) % 8
        self.parts += [data, bytes(padding)]
        self._at += len(data) + padding
        return told

    def spans(
        self, spans: Spans, owner: Ints, slot: timeline.Slots, places: Ints
    ) -> dict[str, Any]:
        """Those that are there at a moment, from the first to before the last. owner: of each."""
        first = np.where(spans.begin < 0, 0, slot[spans.begin])
        last = slot[spans.end]
        seen = last > first
        kept = spans.take(seen)
        sizes, size = np.unique(kept.size, return_inverse=True)
        return {
            "begin": self.add(np.diff(first[seen], prepend=0), "u4"),
            "moments": self.add((last - first)[seen], "u4"),
            "page": self.add(kept.address >> 9 & 0xFFFFFFFF, "u4"),
            "above": self.add(kept.address >> 41, "u2"),
            "sizes": self.add(sizes, "f8"),
            "size": self.add(size, "u4"),
            "place": self.add(places[kept.site], "u4"),
            "owner": self.add(owner[seen], "u1"),
        }


class Content:
    """facts: for JSON; text as it is in the file. columns: the numbers it refers to."""

    def __init__(self, recording: box.BlackBox) -> None:
        self.recording = recording
        self.columns = Columns()
        self.places = Places(recording.sites)
        self.kinds = column(recording.kinds, "u1")
        self.times = column(recording.times, "i8")
        self.count = len(self.kinds)
        self.start = int(np.searchsorted(self.times, recording.complete))
        self.start = min(self.start, max(self.count - 1, 0))
        self.blocks = find_blocks(recording, self.places)
        self.pending = find_pending(recording, self.blocks)
        self.pieces = find_pieces(recording, self.kinds)
        self._before = np.array([one.before for one in recording.lanes])
        if recording.is_snapshot:
            there = self.pieces.take(self.pieces.begin < 0)
            np.add.at(self._before, there.lane, there.size)
        self.owners = _Owners(recording, self.blocks, self.pending, self.pieces)
        self._used = np.zeros(len(self.places.stacks), bool)
        self._used[self.blocks.site] = True
        self._place = np.cumsum(self._used) - 1  # number in the page
        devices = recording.devices if self.count else []
        told = [self._device(device) for device in devices]
        self.facts = {**self._file(), **self._stacks(), "devices": [one for one in told if one]}

    def _file(self) -> dict[str, Any]:
        one = self.recording
        return {
            "path": one.path,
            "why": one.why,
            "pid": one.pid,
            "begin": one.begin / SECOND,
            "end": one.end / SECOND,
            "lost": one.lost,
            "events": self.count,
            "older": self.start,
            "urgent": one.why.startswith("signal"),
            "snapshot": one.is_snapshot,
            "clock": one.has_times,
            "info": {name: value for name, value in one.info.items() if name != "oom"},
            "categories": CATEGORIES,
            "rules": RULES_IN_WORDS,
        }

    def _stacks(self) -> dict[str, Any]:
        frames: dict[str, int] = {}
        used = np.flatnonzero(self._used).tolist()
        stacks = [
            [frames.setdefault(one, len(frames)) for one in self.places.stacks[site]]
            for site in used
        ]
        return {
            "frames": list(frames),
            "stacks": stacks,
            "has_stacks": any(not self.places.stacks[site][0].startswith("(") for site in used),
            "lines": self.places.lines,
            "line": [self.places.line[site] for site in used],
            "category": [self.places.category[site] for site in used],
        }

    def _seconds(self, events: Ints) -> NDArray[np.float64]:
        """Of events, since the recording began."""
        return (self.times[events] - self.recording.begin) / SECOND

    def _device(self, device: int) -> dict[str, Any] | None:
        """None: nothing was ever allocated on it."""
        number, owners = self.owners.of_device(device)
        lanes = self.owners.lane_is_of(device)

        def mine(spans: Spans, owner: Ints) -> tuple[Spans, Ints]:
            rows = lanes[spans.lane]
            if rows.all():  # what is long is not copied
                return spans, number[owner]
            return spans.take(rows), number[owner[rows]]

        blocks, block_owner = mine(self.blocks, self.owners.block)
        if not len(blocks):
            return None
        pending, pending_owner = mine(self.pending, self.owners.pending)
        pieces, piece_owner = mine(self.pieces, self.owners.piece)
        groups = len(CATEGORIES) + MOST_LINES + 1
        most = timeline.MOST_NUMBERS // (groups * len(owners))
        most = min(max(most, timeline.FEWEST_STEPS), timeline.MOST_STEPS)
        live = np.cumsum(timeline.signed(blocks, self.count))
        steps = timeline.find_steps(live, timeline.step_edges(self.times, self.start, most))
        reserved = [self._reserved(number, one, device) for one in range(len(owners))]
        waiting = [self._waiting(pending.take(pending_owner == one)) for one in range(len(owners))]
        all_reserved = timeline.total(reserved, self.count)
        peak = self.start + int(np.argmax(live[self.start :]))
        idle = self.start + int(np.argmax((all_reserved - live)[self.start :]))
        all_waiting = timeline.total(waiting, self.count)
        freed = self.start + int(np.argmax(all_waiting[self.start :]))
        marks, told_events = self._marks(device, pending, all_reserved)
        wanted = [peak, idle, freed, self.count - 1, *told_events]
        moments = timeline.chosen_moments(steps, wanted, blocks, MOST_BLOCKS)
        slot = timeline.slots(moments, self.count)
        add = self.columns.add
        return {
            "device": device,
            "owners": owners,
            "peak": int(np.searchsorted(moments, peak)),
            "idle": int(np.searchsorted(moments, idle)),  # most was reserved, but not live
            "freed": int(np.searchsorted(moments, freed)),  # most was pending
            "moments": add(self._seconds(moments), "f8"),
            "moment_live": add(live[moments], "f8"),
            "blocks": self.columns.spans(blocks, block_owner, slot, self._place),
            "pending": self.columns.spans(pending, pending_owner, slot, self._place),
            "pieces": self.columns.spans(pieces, piece_owner, slot, self._place * 0),
            "steps": add(self._seconds(steps.moments), "f8"),
            "exact": len(steps.edges) == self.count - self.start,
            "highest": add(steps.highest, "f8"),
            "lowest": add(steps.lowest, "f8"),
            "reserved": add(np.array([one.highest(steps.edges) for one in reserved]), "f8"),
            "waiting": add(np.array([one.highest(steps.edges) for one in waiting]), "f8"),
            "moment_reserved": add(np.array([one.after(moments) for one in reserved]), "f8"),
            **self._stacked(blocks, block_owner, len(owners), steps),
            **marks,
        }

    def _stacked(
        self, blocks: Spans, owner: Ints, owners: int, steps: timeline.Steps
    ) -> dict[str, Any]:
        """The bytes of each owner's groups at each step's highest moment, in KiB, as differences
        from one step to the next."""
        slot, moments = timeline.slots(steps.moments, self.count), len(steps.moments)
        line = np.array(self.places.line)[blocks.site]
        line_count = len(self.places.lines)
        top = timeline.largest_groups(blocks, line, line_count, slot, MOST_LINES)
        rank = np.full(line_count, len(top))
        rank[top] = np.arange(len(top))
        told: dict[str, Any] = {"top_lines": top.tolist()}
        for name, group, count in (
            ("by_category", np.array(self.places.category)[blocks.site], len(CATEGORIES)),
            ("by_line", rank[line], len(top) + 1),
        ):
            rows = timeline.stack(blocks, owner * count + group, owners * count, slot, moments)
            rows = (rows + KIB // 2) // KIB
            told[name] = self.columns.add(np.diff(rows, axis=1, prepend=0), "i4")
        return told

    def _reserved(self, number: Ints, owner: int, device: int) -> timeline.Sum:
        """Bytes of an owner's segments."""
        mine = self.owners.lane_is_of(device) & (number[self.owners.of_lane] == owner)
        grows = np.isin(self.kinds, (box.SEGMENT_ALLOC, box.SEGMENT_MAP))
        events = np.flatnonzero(grows | np.isin(self.kinds, (box.SEGMENT_FREE, box.SEGMENT_UNMAP)))
        events = events[mine[column(self.recording.lane_numbers, "u2")[events]]]
        size = column(self.recording.sizes, "u8")[events].astype(np.int64)
        before = int(self._before[mine].sum())
        values = before + np.cumsum(np.where(grows[events], size, -size))
        return timeline.Sum(events, values, before)

    def _waiting(self, pending: Spans) -> timeline.Sum:
        """Pending bytes."""
        change = timeline.signed(pending, self.count)
        events = np.flatnonzero(change)
        return timeline.Sum(events, np.cumsum(change[events]), 0)

    def _marks(
        self, device: int, pending: Spans, reserved: Ints
    ) -> tuple[dict[str, Any], list[int]]:
        """Where memory ran out, and where the host was held back; the events of the former."""
        mine = self.owners.lane_is_of(device)[column(self.recording.lane_numbers, "u2")]
        ooms = np.flatnonzero((self.kinds == box.OOM) & mine)[:MOST_MARKS]
        held = np.flatnonzero((self.kinds == box.HELD_BACK) & mine)
        us = column(self.recording.addresses, "u8")[held].astype(np.int64) // 512
        longest = np.sort(np.argsort(-us, kind="stable")[:MOST_MARKS])
        began = (self.times[held] - us * 1000 - self.recording.begin) / SECOND
        add, size = self.columns.add, column(self.recording.sizes, "u8")
        told = {
            "oom_time": add(self._seconds(ooms), "f8"),
            "oom_free": add(column(self.recording.addresses, "u8")[ooms], "f8"),
            "oom_asked": add(size[ooms], "f8"),
            "last_oom": self._told_of(int(ooms[-1]), device, reserved) if len(ooms) else None,
            "held_time": add(self._seconds(held[longest]), "f8"),
            "held_us": add(us[longest], "f8"),
            "held_asked": add(size[held[longest]], "f8"),
            **self._waited_for(pending, self.times[held[longest]] - us[longest] * 1000),
            "held_count": len(held),
            "held_total_us": int(us.sum()),
            "held_between": [np.min(began), self._seconds(held[-1:])[0]] if len(held) else [],
        }
        return told, [int(one) for one in ooms if one >= self.start][:100]

    def _told_of(self, event: int, device: int, reserved: Ints) -> dict[str, Any] | None:
        """What the file tells of a device's last failure; None: nothing, or of another one."""
        told = self.recording.info.get("oom")
        told = told if isinstance(told, dict) else {}
        number = {key: value for key, value in told.items() if type(value) is int and value >= 0}
        asked, total = number.get("requested", 0), number.get("device_total", 0)
        free, size = self.recording.addresses[event], max(self.recording.sizes[event], 1)
        had, limit, site = int(reserved[event]), number.get("limit", total), number.get("site", 0)
        if number.get("device") != device or not 0 < asked <= size or free + had > total:
            return None
        site = site if site < self.places.elsewhere else 0
        return {
            "line": self.places.lines[self.places.line[site]] if site else None,
            "stack": self.places.stacks[site] if site else [],
            "requested": asked,
            "reserved": had,
            "limit": max(limit, 1) if limit < total else None,
        }

    def _waited_for(self, pending: Spans, times: Ints) -> dict[str, Any]:
        """For each time the bytes that were pending, and the index into `held_for` of most of them:
        there are the index of a line, and the stream that it was marked for."""
        at = np.maximum(np.searchsorted(self.times, times) - 1, 0)
        pending = pending if len(times) else pending.take(np.arange(0))
        moments, row = np.unique(at, return_inverse=True)
        slot, lines = timeline.slots(moments, self.count), len(self.places.lines)
        line = np.array(self.places.line)[pending.site]
        keys, group = np.unique(
            last_users(self.recording, pending) * lines + line, return_inverse=True
        )
        top, rank = np.zeros(0, np.int64), np.zeros(len(keys), np.int64)
        if len(moments):
            top = timeline.largest_groups(pending, group, len(keys), slot, MOST_WAITED_FOR)
        rank[:] = len(top)
        rank[top] = np.arange(len(top))
        rows = timeline.stack(pending, rank[group], len(top) + 1, slot, len(moments))
        names = [divmod(one, lines) for one in keys[top].tolist()]
        lanes = self.recording.lanes
        return {
            "held_pending": self.columns.add(rows.sum(axis=0)[row], "f8"),
            "held_most": rows.argmax(axis=0)[row].tolist(),
            "held_for": [
                [line, _stream(lanes[lane].stream) if lane else ""] for lane, line in names
            ],
        }


class _Owners:
    """Owners: a stream and a pool of a device, as the page filters by them.

    block, pending, piece: the owner of each span. of_lane: the owner of each lane as a segment's.
    """

    def __init__(
        self, recording: box.BlackBox, blocks: Spans, pending: Spans, pieces: Spans
    ) -> None:
        self._lanes = recording.lanes
        self._numbers: dict[tuple[int, int, tuple[int, int]], int] = {}
        self.of_lane = np.array([self._number(one) for one in self._lanes], np.int64)
        self.piece = self.of_lane[pieces.lane]
        self.block = self._around(blocks, pieces)
        self.pending = self._around(pending, pieces)
        self.bytes = np.bincount(self.block, blocks.size, len(self._numbers))

    def _number(self, lane: box.Lane, of_pool: box.Lane | None = None) -> int:
        key = (lane.device, lane.stream, (of_pool or lane).pool)
        return self._numbers.setdefault(key, len(self._numbers))

    def _around(self, spans: Spans, pieces: Spans) -> Ints:
        """A block has its own stream, and the pool of the segment around it."""
        if all(lane.pool == (0, 0) for lane in self._lanes):
            return self.of_lane[spans.lane]
        around = lanes_around(pieces, spans.address, spans.begin)
        pairs, pair = np.unique(
            spans.lane * (len(self._lanes) + 1) + around + 1, return_inverse=True
        )
        numbers = []
        for lane, segment in (divmod(one, len(self._lanes) + 1) for one in pairs.tolist()):
            numbers.append(
                self._number(self._lanes[lane], self._lanes[segment - 1] if segment else None)
            )
        return np.array(numbers, np.int64)[pair]

    def lane_is_of(self, device: int) -> NDArray[np.bool_]:
        return np.array([lane.device == device for lane in self._lanes])

    def of_device(self, device: int) -> tuple[Ints, list[dict[str, Any]]]:
        """For each owner its number in the page, and those numbers' streams and pools. Beyond the
        most, those with the fewest bytes share the last number."""
        keys = [(key, n) for key, n in self._numbers.items() if key[0] == device]
        keys.sort(key=lambda item: (-self.bytes[item[1]], item[0]))
        number = np.zeros(len(self._numbers), np.int64)
        told: list[dict[str, Any]] = []
        for place, ((_, stream, pool), n) in enumerate(keys):
            number[n] = min(place, MOST_OWNERS - 1)
            if place < MOST_OWNERS:
                told.append({"stream": _stream(stream), "pool": _pool(pool)})
        if len(keys) > MOST_OWNERS:
            told[-1] = {"stream": "other streams", "pool": "other pools"}
        return number, told


def _stream(handle: int) -> str:
    return f"stream {handle:#x}" if handle else "default stream"


def _pool(pool: tuple[int, int]) -> str:
    return f"pool ({pool[0]}, {pool[1]})" if any(pool) else "default pool"
