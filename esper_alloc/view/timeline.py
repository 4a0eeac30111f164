"""A device's memory over time, in at most so many steps, each shown by its highest moment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .spans import Ints, Spans

#: For each event, and for the end, a number of a moment.
Slots = NDArray[np.int32]
#: Of one device.
MOST_STEPS = 65536
FEWEST_STEPS = 2048
FEWEST_MOMENTS = 16
#: Numbers of the stacks of one device: steps x groups.
MOST_NUMBERS = 2_000_000


def signed(spans: Spans, count: int) -> Ints:
    """Bytes by which each of `count` events changes the sum of spans, not those that were there
    at first."""
    change = np.zeros(count, np.int64)
    brought, ended = spans.begin >= 0, spans.end < count
    # An event ends one span at most, but a segment's event can end and begin several pieces.
    np.add.at(change, spans.begin[brought], spans.size[brought])
    np.subtract.at(change, spans.end[ended], spans.size[ended])
    return change


def step_edges(times: Ints, start: int, most: int) -> Ints:
    """The first event of each step, from event `start` on: half of them after equal numbers of
    events, half after equal times; each event its own step where there are at most `most`."""
    count = len(times)
    if count - start <= most:
        return np.arange(start, count)
    ranks = np.linspace(start, count, most // 2, endpoint=False).astype(np.int64)
    grid = np.linspace(times[start], times[-1], most // 2, endpoint=False)
    return np.union1d(ranks, start + np.searchsorted(times[start:], grid.astype(np.int64)))


class Steps(NamedTuple):
    """At each step of the timeline: its highest moment (an index of an event: the state just after
    it is meant), and the highest and lowest sum of live bytes."""

    edges: Ints
    moments: Ints
    highest: Ints
    lowest: Ints


def find_steps(live: Ints, edges: Ints) -> Steps:
    """live: bytes after each event."""
    highest = np.maximum.reduceat(live, edges)
    lowest = np.minimum.reduceat(live, edges)
    lengths = np.diff(edges, append=len(live))
    hits = edges[0] + np.flatnonzero(live[edges[0] :] == np.repeat(highest, lengths))
    _, first = np.unique(np.searchsorted(edges, hits, side="right"), return_index=True)
    return Steps(edges, hits[first], highest, lowest)


class Sum(NamedTuple):
    """A sum of bytes that few events change: `values` after `events`, `before` at first."""

    events: Ints
    values: Ints
    before: int

    def after(self, events: Ints) -> Ints:
        """Just after each of any events."""
        known = np.concatenate([[self.before], self.values])
        found: Ints = known[np.searchsorted(self.events, events, side="right")]
        return found

    def highest(self, edges: Ints) -> Ints:
        """In each step."""
        found = self.after(edges)
        inside = self.events >= edges[0]
        step = np.searchsorted(edges, self.events[inside], side="right") - 1
        np.maximum.at(found, step, self.values[inside])
        return found


def total(sums: list[Sum], count: int) -> Ints:
    """All of them together, after each of `count` events."""
    change = np.zeros(count, np.int64)
    for one in sums:
        change[one.events] += np.diff(one.values, prepend=one.before)
    return sum(one.before for one in sums) + np.cumsum(change)


def slots(moments: Ints, count: int) -> Slots:
    """For each of `count` events, and for the end, the first of the sorted moments that is not
    before it: where it first counts."""
    steps = np.zeros(count + 1, np.int32)
    steps[moments + 1] = 1
    return np.cumsum(steps, dtype=np.int32, out=steps)


def stack(spans: Spans, groups: Ints, group_count: int, slot: Slots, moments: int) -> Ints:
    """Bytes of each group at each moment: shape (group_count, moments). slot: of each event."""
    first = np.where(spans.begin < 0, 0, slot[spans.begin])
    last = slot[spans.end]
    seen = last > first
    row = groups[seen] * (moments + 1)
    size, bins = spans.size[seen].astype(np.float64), group_count * (moments + 1)
    change = np.bincount(row + first[seen], size, bins) - np.bincount(row + last[seen], size, bins)
    rows = change.reshape(group_count, moments + 1)[:, :moments]
    return np.cumsum(rows, axis=1).astype(np.int64)


def largest_groups(spans: Spans, groups: Ints, group_count: int, slot: Slots, n: int) -> Ints:
    """The groups that ever held most at some of 64 moments, the largest first; at most `n`."""
    moments = int(np.max(slot))
    coarse = np.unique(np.linspace(0, moments - 1, min(64, moments)).astype(np.int64))
    per_moment = slots(coarse, moments)
    held = stack(spans, groups, group_count, per_moment[slot], len(coarse)).max(axis=1)
    largest: Ints = np.argsort(-held, kind="stable")[:n]
    return largest[: np.count_nonzero(held[largest] > 0)]


def chosen_moments(steps: Steps, wanted: list[int], crossing: Spans, most: int) -> Ints:
    """The moments whose state is kept exactly: the highest ones of as many steps as about `most`
    spans can tell, but of a few at least; and those that are wanted."""
    each = max(1, len(crossing) // 100_000)
    begin, end = (one[::each] for one in (np.maximum(crossing.begin, 0), crossing.end))
    step_count, live = len(steps.edges), steps.highest
    while True:
        edges = np.linspace(0, len(live), step_count, endpoint=False).astype(np.int64)
        picked = steps.moments[find_steps(live, edges).moments]
        moments = np.union1d(picked, np.array(wanted, np.int64))
        told = np.searchsorted(moments, end) > np.searchsorted(moments, begin)
        if np.count_nonzero(told) * each <= most or step_count <= FEWEST_MOMENTS:
            return moments
        step_count = max(FEWEST_MOMENTS, step_count * 3 // 4)
