"""What is drawn: thinned out, on an axis of time or of entries."""

from array import array
from pathlib import Path

import pytest
from pictures import assert_no_title_is_cut_or_covered

from esper_alloc.replay import plot
from esper_alloc.replay.recorded import Usage
from esper_alloc.replay.replay import SEGMENTS, load_recordings, replay

TRACES = Path(__file__).resolve().parents[2] / "examples" / "traces"


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


def test_all_kinds_stand_in_a_grid_on_common_scales():
    pytest.importorskip("matplotlib")
    [recording] = load_recordings(TRACES / "fsdp_like.pickle.gz")
    runs = [replay(recording, kind) for kind in SEGMENTS]
    figure = plot.picture([(recording, runs), (recording, runs[:1])])
    width, height = figure.get_size_inches()
    assert width <= 20 and height <= 12
    groups = figure.subfigs
    panels = [[axis for axis in group.axes if axis.axison] for group in groups]
    titles = [axis.get_title(loc="left").splitlines()[0] for axis in panels[0]]
    assert titles == ["recorded", *(f"replayed, {kind}" for kind in SEGMENTS)]
    assert len(panels[1]) == 2
    for axis in panels[0]:
        assert axis.get_xlim() == panels[0][0].get_xlim()
        assert axis.get_ylim() == panels[0][0].get_ylim()
    assert_no_title_is_cut_or_covered(figure, len(panels[0]) + len(panels[1]))
