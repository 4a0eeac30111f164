"""Where segments were, and which pool an address belonged to."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..recorder import reading as box
from .spans import Ints, Spans

GROWS = (box.SEGMENT_ALLOC, box.SEGMENT_MAP)


class _Piece(NamedTuple):
    """Memory of a segment that came and will go at once. Bytes; events as in Spans."""

    begin: int
    address: int
    size: int
    lane: int

    @property
    def end(self) -> int:
        return self.address + self.size


class _Pieces:
    """The pieces of now, not overlapping, and all that were before."""

    def __init__(self) -> None:
        self._now: dict[int, _Piece] = {}
        self._starts: list[int] = []  # sorted
        self.rows: list[tuple[_Piece, int]] = []  # each with its end

    def add(self, piece: _Piece) -> None:
        self._now[piece.address] = piece
        bisect.insort(self._starts, piece.address)

    def cut(self, address: int, end: int, event: int) -> list[tuple[int, int]]:
        """An event removes the memory between two addresses. Returns the stretches that no piece
        covered."""
        uncovered, at = [], address
        first = max(bisect.bisect_right(self._starts, address) - 1, 0)
        for start in self._starts[first : bisect.bisect_left(self._starts, end)]:
            piece = self._now[start]
            if piece.end <= address:
                continue
            self._remove(start)
            if start > at:
                uncovered.append((at, start))
            begin, at = max(start, address), min(piece.end, end)
            self.rows.append((piece._replace(address=begin, size=at - begin), event))
            for rest, to in ((start, address), (end, piece.end)):
                if to > rest:
                    self.add(piece._replace(address=rest, size=to - rest))
        return [*uncovered, (at, end)] if at < end else uncovered

    def _remove(self, start: int) -> None:
        del self._now[start]
        del self._starts[bisect.bisect_left(self._starts, start)]

    def close(self, event: int) -> None:
        """What is left stays until that event."""
        self.rows += [(piece, event) for piece in self._now.values()]


def find_pieces(recording: box.BlackBox, kinds: NDArray[np.uint8]) -> Spans:
    """Every piece of memory that was in a segment, from its arrival to its end.

    What was there when the events begin is known by the events that remove it, and by the segments
    of the file's end. site is 0.
    """
    pieces, count = _Pieces(), len(kinds)
    for event in np.flatnonzero((kinds >= box.SEGMENT_ALLOC) & (kinds <= box.SEGMENT_UNMAP)):
        at = int(event)
        address, size = recording.addresses[at], recording.sizes[at]
        lane = recording.lane_numbers[at]
        uncovered = pieces.cut(address, address + size, at)
        if kinds[at] in GROWS:
            pieces.add(_Piece(at, address, size, lane))
        else:
            pieces.rows += [(_Piece(-1, one, to - one, lane), at) for one, to in uncovered]
    lanes = {(one.device, one.stream, one.pool): n for n, one in enumerate(recording.lanes)}
    for segment in recording.segments:
        lane = lanes.get((segment.device, segment.stream, segment.pool), 0)
        for one, to in pieces.cut(segment.address, segment.address + segment.size, count):
            pieces.rows.append((_Piece(-1, one, to - one, lane), count))
    pieces.close(count)
    columns = [(one.begin, end, one.address, one.size, one.lane) for one, end in pieces.rows]
    begin, end, address, size, lane = np.array(columns, np.int64).reshape(-1, 5).T
    return Spans(begin, end, address, size, np.zeros_like(lane), lane).by_begin()


def lanes_around(pieces: Spans, addresses: Ints, events: Ints) -> Ints:
    """The lane of the piece that was around each address just after each event; -1: none known."""
    found = np.full(len(addresses), -1, np.int64)
    # Addresses between two edges have been in the same pieces at all times. A binary tree stands
    # above these stretches: a piece is cut into few of its nodes, however many stretches it has.
    edges = np.unique(np.concatenate([pieces.address, pieces.address + pieces.size]))
    first = np.searchsorted(edges, pieces.address)
    last = np.searchsorted(edges, pieces.address + pieces.size)
    node = np.searchsorted(edges, addresses, side="right") - 1
    row, asked = np.arange(len(pieces)), np.arange(len(addresses))
    after = np.int64(max(np.max(pieces.end, initial=0), np.max(events, initial=0)) + 3)
    while len(row) and len(asked):
        left, right = first % 2 == 1, last % 2 == 1
        here = np.concatenate([row[left], row[right]])
        key = np.concatenate([first[left], last[right] - 1]) * after + pieces.begin[here] + 1
        order = np.argsort(key)
        at = np.searchsorted(key[order], node * after + events[asked] + 1, side="right") - 1
        match = order[at[at >= 0]]
        fits = np.zeros(len(asked), bool)
        fits[at >= 0] = (key[match] // after == node[at >= 0]) & (
            pieces.end[here[match]] > events[asked[at >= 0]]
        )
        found[asked[fits]] = pieces.lane[here[order[at[fits]]]]
        asked, node = asked[~fits], node[~fits] // 2
        first, last = (first + 1) // 2, last // 2
        row, first, last = row[first < last], first[first < last], last[first < last]
    return found
