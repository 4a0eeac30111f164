"""Snapshots of plain data whose values are of wrong types, out of range, or far longer than the
file: a list that holds one list twice, which again holds one twice, and numbers with more digits
than Python prints. A message names such a value without writing it out."""

import pickle
from typing import Any

import pytest
from histories import refusal

from esper_alloc.replay import replay
from esper_alloc.replay.snapshot import SnapshotError

#: Enough to be seen in a message. With three times as many no memory would do.
DOUBLINGS = 20


def doubled(kind: type) -> Any:
    value: Any = kind([1])
    for _ in range(DOUBLINGS):
        value = kind([value, value])
    return value


LISTS, TUPLES = doubled(list), doubled(tuple)
HUGE = 10**5000


def of_entry(**changes: Any) -> dict[str, Any]:
    entry = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "time_us": 1}
    return {"segments": [], "device_traces": [[{**entry, **changes}]]}


def of_segment(**changes: Any) -> dict[str, Any]:
    segment = {"device": 0, "address": 4096, "total_size": 4096, "stream": 0, "blocks": []}
    return {**of_entry(), "segments": [{**segment, **changes}]}


def of_block(**changes: Any) -> dict[str, Any]:
    return of_segment(blocks=[{"size": 512, "state": "active_allocated", **changes}])


@pytest.mark.parametrize(
    ("snapshot", "say"),
    [
        (of_entry(action=LISTS), "entry 0: unknown action a list"),
        (of_entry(action=TUPLES), "entry 0: unknown action a tuple"),
        (of_entry(action={"x": LISTS}), "entry 0: unknown action a dict"),
        (of_entry(size=LISTS), "entry 0: alloc of a list bytes at 4096"),
        (of_entry(addr=TUPLES), "entry 0: alloc of 512 bytes at a tuple"),
        (of_entry(size=HUGE), "entry 0: alloc of a huge number bytes at 4096"),
        (of_entry(addr=HUGE), "entry 0: alloc of 512 bytes at a huge number"),
        (of_entry(action="x" * 1000), "entry 0: unknown action '" + "x" * 59),
        (of_segment(address=LISTS), "segment 0 is malformed: a list is not a number"),
        (of_entry(addr=1 << 63), f"entry 0: alloc of 512 bytes at {1 << 63}"),
        (of_entry(stream=HUGE), "entry 0: alloc on stream a huge number"),
        (of_entry(stream=1 << 63), f"entry 0: alloc on stream {1 << 63}"),
        (of_entry(stream=None), "entry 0: alloc on stream None"),
        (of_entry(time_us=HUGE), "entry 0: malformed: its time is a huge number"),
        (of_entry(time_us=LISTS), "entry 0: malformed: its time is a list"),
        (of_segment(address=HUGE), "segment 0 is malformed: 4096 bytes at a huge number"),
        (of_segment(address=-4096), "segment 0 is malformed: 4096 bytes at -4096"),
        (of_segment(total_size=-1), "segment 0 is malformed: -1 bytes at 4096"),
        (of_segment(device="cuda:0"), "segment 0 is malformed: 'cuda:0' is not a number"),
        (of_segment(stream=HUGE), "segment 0 is malformed: a huge number is out of range"),
        (of_segment(blocks=None), "segment 0 is malformed: "),
        (of_segment(stream=TUPLES), "segment 0 is malformed: a tuple is not a number"),
        (of_segment(segment_pool_id=LISTS), "segment 0 is malformed: a list is not a number"),
        (of_segment(segment_pool_id=(HUGE, 0)), "malformed: a huge number is out of range"),
        (of_segment(segment_pool_id=(0, -1)), "malformed: -1 is out of range"),
        (of_block(requested_size=-1), "malformed: -1 is out of range"),
        (of_block(requested_size=1 << 61), f"malformed: {1 << 61} is out of range"),
        (of_block(requested_size="1"), "malformed: '1' is not a number"),
        (of_block(size=HUGE), "malformed: a huge number bytes at 4096"),
        (of_segment(blocks=[{"size": LISTS, "state": TUPLES}]), "malformed: a list is not a"),
    ],
)
def test_a_message_stays_short(tmp_path, snapshot, say):
    path = tmp_path / "hostile"
    message = refusal(path, pickle.dumps(snapshot), replay.load_recordings)
    assert path.stat().st_size < 4096
    assert say in message and len(message) < 198


@pytest.mark.parametrize("sizes", [[1 << 60], [1 << 39, 1 << 39, 1 << 21]])
def test_more_memory_than_any_device_has_is_not_replayed(tmp_path, sizes):
    """It would take hours."""
    segments, entries, address = [], [], 1 << 40
    for size in sizes:
        block = {"size": size, "state": "active_allocated"}
        segments.append({"address": address, "total_size": size, "blocks": [block]})
        entries += [
            {"action": action, "addr": address, "size": size}
            for action in ("segment_alloc", "alloc")
        ]
        address += size
    path = tmp_path / "hostile"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [entries]}))
    with pytest.raises(SnapshotError, match=f"{sum(sizes)} bytes were reserved, more than any"):
        replay.load_recordings(path)
