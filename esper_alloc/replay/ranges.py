"""Reserved address ranges: which addresses the device has given, to which pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .reader import PoolId


class Range(NamedTuple):
    """[start, end) in bytes.

    pool: None where nothing tells whose it was. mapped: pages of an
    expandable segment, which join their neighbours; otherwise one allocation
    of the device's, which comes and goes whole.
    """

    start: int
    end: int
    pool: PoolId | None
    mapped: bool


class RangeError(ValueError):
    """Such a range cannot come or go; the message says why."""


class Ranges:
    """Disjoint ranges, ordered by address."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        self._starts: list[int] = []
        for one in ranges:
            self.add(one)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def total(self) -> int:
        """Bytes of all ranges."""
        return sum(one.end - one.start for one in self._ranges)

    def find(self, address: int) -> Range | None:
        """The range that has the address."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._ranges[index].end:
            return self._ranges[index]
        return None

    def add(self, new: Range) -> None:
        """Mapped ranges of one pool join where they touch; one whose pool nothing told
        is of the pool of the one that it touches."""
        index = bisect_right(self._starts, new.start)
        before = self._ranges[index - 1] if index else None
        after = self._ranges[index] if index < len(self._ranges) else None
        for other in (before, after):
            if other and new.start < other.end and other.start < new.end:
                raise RangeError(
                    f"it overlaps the segment of {other.end - other.start} bytes "
                    f"at {other.start:#x}"
                )
        first, last = index, index
        if before and _join(before, new):
            first, new = index - 1, _joined(before, new)
        if after and _join(new, after):
            last, new = index + 1, _joined(new, after)
        self._replace(first, last, [new])

    def remove(self, start: int, end: int, mapped: bool) -> Range:
        """Takes [start, end) away and returns it, with the pool it had."""
        index = bisect_right(self._starts, start) - 1
        one = self._ranges[index] if index >= 0 else None
        if one is None or start >= one.end:
            raise RangeError("no segment is there")
        whole = start == one.start and end == one.end
        if mapped != one.mapped or end > one.end or not (mapped or whole):
            raise RangeError(f"the segment there has {one.end - one.start} bytes at {one.start:#x}")
        rest = [
            part
            for part in (one._replace(end=start), one._replace(start=end))
            if part.start < part.end
        ]
        self._replace(index, index + 1, rest)
        return one._replace(start=start, end=end)

    def _replace(self, first: int, last: int, ranges: list[Range]) -> None:
        self._ranges[first:last] = ranges
        self._starts[first:last] = [one.start for one in ranges]


def _join(left: Range, right: Range) -> bool:
    known = {left.pool, right.pool} - {None}
    return left.mapped and right.mapped and left.end == right.start and len(known) < 2


def _joined(left: Range, right: Range) -> Range:
    return left._replace(end=right.end, pool=right.pool if left.pool is None else left.pool)
