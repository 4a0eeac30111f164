"""A black box's file as the snapshot that a replay begins with.

The replay begins where no event is missing any more. Memory that was live by then has no entry that
allocates it, as in a history of PyTorch's whose beginning was overwritten.
"""

from __future__ import annotations

from array import array

from ..recorder import reading
from ..recorder.reading import BlackBox
from . import reader
from .history import rounded
from .snapshot import Snapshot, SnapshotError, Trace

_POSITIONS = {name: position for position, name in enumerate(reader.ACTIONS)}
_NAMES = {
    reading.SEGMENT_ALLOC: "segment_alloc",
    reading.SEGMENT_FREE: "segment_free",
    reading.SEGMENT_MAP: "segment_map",
    reading.SEGMENT_UNMAP: "segment_unmap",
    reading.OOM: "oom",
}


def snapshot_of(box: BlackBox) -> Snapshot:
    """The snapshot. Raises SnapshotError."""
    if box.why.startswith("signal"):
        raise SnapshotError(
            f"{box.path}: written by a signal, so it lacks the segments that a replay needs: write "
            "it by esper_alloc.black_box(), or at the end of the program by `run --record`"
        )
    traces = [_Device(box, device).run() for device in box.devices]
    if not any(len(trace.actions) for trace in traces):
        raise SnapshotError(f"{box.path}: it has no events: record a program that allocates memory")
    return Snapshot(box.path, traces, None, None, {}, box.info)


class _Device:
    """Builds the trace of one device."""

    def __init__(self, box: BlackBox, device: int) -> None:
        self.box = box
        self.device = device
        self.actions = bytearray()
        self.addresses, self.sizes = array("Q"), array("Q")
        self.streams, self.times, self.places = array("q"), array("q"), array("I")

    def run(self) -> Trace:
        box = self.box
        mine = [lane.device == self.device for lane in box.lanes]
        ends = self.find_ends()
        waiting: dict[int, int] = {}  # address: a freed allocation that waits for uses
        older: dict[int, int] = {}
        users: dict[int, int] = {}  # of an allocation, the stream that was marked last
        waited_for: dict[int, int] = {}
        for index, kind in enumerate(box.kinds):
            if not mine[box.lane_numbers[index]]:
                continue
            if box.times[index] < box.complete:
                if kind == reading.ALLOC:
                    older[box.addresses[index]] = box.site_numbers[index]
                continue
            address, partner = box.addresses[index], box.partners[index]
            if kind == reading.ALLOC:
                if address in waiting:
                    self.add("free_completed", index, waiting.pop(address))
                self.add("alloc", index, index)
            elif kind == reading.FREE:
                self.add("free_requested", index, partner)
                if partner in ends:
                    waiting[address] = partner
                    user = users.get(partner, 0)
                    waited_for[user] = waited_for.get(user, 0) + box.sizes[partner]
                else:
                    self.add("free_completed", index, partner)
            elif kind == reading.USE:
                users[partner] = box.lanes[box.lane_numbers[index]].stream
            elif kind == reading.AVAILABLE:
                if ends.get(partner) == index:
                    waiting.pop(address, None)
                    self.add("free_completed", index, partner)
            elif kind in _NAMES:
                self.add(_NAMES[kind], index, index)
        return Trace(
            self.device,
            [
                (number, one.address, one.address + one.size, one.pool, one.mapped, one.stream)
                for number, one in enumerate(box.segments)
                if one.device == self.device
            ],
            self.blocks(mine, set(waiting.values())),
            bytes(self.actions),
            self.addresses,
            self.sizes,
            self.streams,
            self.times,
            self.places,
            box.sites,
            older,
            waited_for,
        )

    def find_ends(self) -> dict[int, int]:
        """For allocations that waited for uses when they had been freed: the event after which they
        did no more; -1: they still do."""
        ends: dict[int, int] = {}
        for index, kind in enumerate(self.box.kinds):
            if kind == reading.PENDING:
                ends[self.box.partners[index]] = -1
            elif kind == reading.AVAILABLE:
                ends[self.box.partners[index]] = index
        ends.pop(-1, None)  # both the malloc and the free were overwritten
        return ends

    def add(self, name: str, index: int, of: int) -> None:
        """An entry: when `index` happened, with the memory of the event `of`."""
        box = self.box
        self.actions.append(_POSITIONS[name])
        self.addresses.append(box.addresses[of])
        self.sizes.append(box.sizes[of])
        stream = box.lanes[box.lane_numbers[of]].stream
        self.streams.append(min(stream, (1 << 63) - 1))
        self.times.append(box.times[index] // 1000)
        self.places.append(box.site_numbers[of])

    def blocks(self, mine: list[bool], pending: set[int]) -> list[reader.Block]:
        """What is in use at the end, or waits."""
        box = self.box
        sizes = {one.address: one.size for one in box.blocks}
        found = []
        for index, kind in enumerate(box.kinds):
            if kind != reading.ALLOC or not mine[box.lane_numbers[index]]:
                continue
            if box.partners[index] < 0 or index in pending:
                address, requested = box.addresses[index], box.sizes[index]
                size = max(sizes.get(address, 0), rounded(requested))
                stream = box.lanes[box.lane_numbers[index]].stream
                place = box.site_numbers[index]
                found.append((address, size, requested, stream, index in pending, place))
        return found
