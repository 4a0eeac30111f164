"""Spans: memory that was there from one event to another, as columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..recorder import reading as box
from .places import Places

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Blocks, pending memory or pieces of segments. All int64, of one length.

    begin: the index of the event that brought it; -1: it was there at first. end: of the event that
    ended it; the number of events: none did. address and size: bytes. lane: the index into the
    recording's lanes.
    """

    begin: Ints
    end: Ints
    address: Ints
    size: Ints
    site: Ints
    lane: Ints

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, rows: NDArray[Any]) -> Spans:
        """Those rows: indices, or a mask."""
        return Spans(*(values[rows] for values in vars(self).values()))

    def by_begin(self) -> Spans:
        return self.take(np.argsort(self.begin, kind="stable"))


def column(values: memoryview[int], like: str) -> NDArray[Any]:
    """A column of the recording as an array, not copied."""
    return np.frombuffer(values, like)


def find_blocks(recording: box.BlackBox, places: Places) -> Spans:
    """Every allocation. One without a stack on another thread than the program's has the site
    `places.elsewhere`."""
    kinds = column(recording.kinds, "u1")
    begin = np.flatnonzero(kinds == box.ALLOC)
    partner = column(recording.partners, "i8")[begin]
    site = column(recording.site_numbers, "u4")[begin].astype(np.int64)
    thread = column(recording.threads, "u4")[begin]
    unknown = site == 0
    known = thread[~unknown][:1_000_000]
    main = int(np.argmax(np.bincount(known))) if len(known) else 1
    site[unknown & (thread != 0) & (thread != main)] = places.elsewhere
    return Spans(
        begin,
        np.where(partner < 0, len(kinds), partner),
        column(recording.addresses, "i8")[begin],
        column(recording.sizes, "i8")[begin],
        site,
        column(recording.lane_numbers, "u2")[begin].astype(np.int64),
    )


def find_pending(recording: box.BlackBox, blocks: Spans) -> Spans:
    """Every block that was freed and waited for marked uses: from its PENDING event to its
    AVAILABLE event, or to the next allocation at its address. A block whose allocation is not in
    the file has no known size, and is left out."""
    kinds = column(recording.kinds, "u1")
    events = np.flatnonzero((kinds == box.PENDING) | (kinds == box.AVAILABLE))
    partner = column(recording.partners, "i8")[events]
    events, partner = events[partner >= 0], partner[partner >= 0]
    order = np.lexsort((events, partner))
    events, partner = events[order], partner[order]
    is_pending, same = kinds[events] == box.PENDING, np.diff(partner, prepend=-1) == 0
    begins = is_pending & ~(same & np.roll(is_pending, 1))
    at = np.flatnonzero(begins)
    # AVAILABLE follows, if anything does, after further PENDING ones at most.
    ends = np.flatnonzero(~is_pending)
    following = np.searchsorted(ends, at)
    until = np.full(len(at), len(kinds), np.int64)
    there = following < len(ends)
    there[there] = partner[ends[following[there]]] == partner[at[there]]
    until[there] = events[ends[following[there]]]
    row = np.searchsorted(blocks.begin, partner[at])
    until = np.minimum(until, _next_at_address(blocks, row))
    return replace(blocks.take(row), begin=events[at], end=until).by_begin()


def last_users(recording: box.BlackBox, pending: Spans) -> Ints:
    """The lane of the stream that each was last marked for; 0: nothing tells."""
    uses = np.flatnonzero(column(recording.kinds, "u1") == box.USE)
    partners = column(recording.partners, "i8")
    uses = np.append(uses[np.argsort(partners[uses], kind="stable")], -1)
    of, asked = partners[uses[:-1]], partners[pending.begin]
    at = np.searchsorted(of, asked, side="right") - 1
    known = (at >= 0) & (np.append(of, -2)[at] == asked)
    return np.where(known, column(recording.lane_numbers, "u2")[uses[at]], 0).astype(np.int64)


def _next_at_address(blocks: Spans, rows: Ints) -> Ints:
    """For each of those blocks the event of the next allocation at its address; a great number:
    none."""
    among = np.flatnonzero(np.isin(blocks.address, np.unique(blocks.address[rows])))
    among = among[np.argsort(blocks.address[among], kind="stable")]
    following = np.full(len(blocks) if len(rows) else 0, np.iinfo(np.int64).max)
    same = blocks.address[among[1:]] == blocks.address[among[:-1]]
    following[among[:-1][same]] = blocks.begin[among[1:][same]]
    return following[rows]
