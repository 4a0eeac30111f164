"""What is drawn: thinned out, on an axis of time or of entries."""

from __future__ import annotations

from array import array

from esper_alloc.replay import plot
from esper_alloc.replay.recorded import Usage


def test_thinning_keeps_what_lasts():
    """The value before a long pause is drawn, however many others came close."""
    count = 10_000
    values = array("q", [1 + number % 7 for number in range(count)])
    values[5000], values[5001] = 1000, 3
    x = [float(number if number <= 5001 else number + 50_000) for number in range(count)]
    kept = plot._thinned(x, Usage(values, values, values))
    assert {0, 5000, 5001, count - 1} <= set(kept)
    assert len(kept) < 4 * plot.BUCKETS


def test_a_clock_that_goes_back_gives_way_to_entry_numbers():
    assert plot._axis([1_000_000, 3_500_000]) == ([0.0, 2.5], "seconds")
    assert plot._axis([5, 4, 6]) == ([0.0, 1.0, 2.0], "entries")
    assert plot._axis([5, 5]) == ([0.0, 1.0], "entries")
