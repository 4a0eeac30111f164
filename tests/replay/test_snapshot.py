"""Reading snapshot files: what is admitted, and what is said of the rest; uses in snapshots."""

from __future__ import annotations

import copy
import datetime
import gzip
import os
import pickle
import re
import struct
from pathlib import Path

import pytest
from histories import Recorder, snapshot_of, write
from hypothesis import HealthCheck, given, settings, strategies as st

from esper_alloc import _core
from esper_alloc.replay import snapshot
from esper_alloc.replay.snapshot import SnapshotError, load_snapshot

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def small_snapshot() -> dict:
    recorder = Recorder()
    recorder.free(recorder.alloc(1000))
    return snapshot_of(recorder)


def refusal(path: Path | str) -> str:
    """The one line that a file is refused with; it must begin with its name."""
    with pytest.raises(SnapshotError) as caught:
        load_snapshot(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("compressed", [False, True])
def test_reads_plain_and_gzip_whatever_the_name(tmp_path, protocol, compressed):
    data = pickle.dumps(small_snapshot(), protocol=protocol)
    path = tmp_path / ("plain.gz" if not compressed else "compressed.pickle")
    path.write_bytes(gzip.compress(data) if compressed else data)
    loaded = load_snapshot(path)
    assert loaded.path == str(path)
    assert [one["action"] for one in loaded.traces[0]] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
    ]


def test_reads_gzip_of_several_members_and_padding(tmp_path):
    data = pickle.dumps(small_snapshot())
    path = tmp_path / "members"
    path.write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]) + b"\0" * 512)
    assert len(load_snapshot(path).traces[0]) == 4


# ---- files that ask for more than data --------------------------------------------


class Calls:
    """Unpickling it calls a function."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("compressed", [False, True])
def test_a_hostile_file_runs_nothing(tmp_path, protocol, compressed):
    witness = tmp_path / "witness"
    hostile = {**small_snapshot(), "extra": Calls(os.mkdir, str(witness))}
    data = pickle.dumps(hostile, protocol=protocol)
    pickle.loads(data)
    assert witness.exists(), "the file does what it threatens, elsewhere"
    witness.rmdir()

    path = tmp_path / "hostile"
    path.write_bytes(gzip.compress(data) if compressed else data)
    message = refusal(path)
    assert ("asks to import" in message) if protocol >= 2 else message
    assert not witness.exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_unpickler_refuses_on_its_own(tmp_path, monkeypatch, protocol):
    """The check of the bytes is the first wall, not the only one."""
    monkeypatch.setattr(snapshot._core, "check_pickle", lambda *arguments: 0)
    witness = tmp_path / "witness"
    path = tmp_path / "hostile"
    path.write_bytes(pickle.dumps(Calls(os.mkdir, str(witness)), protocol=protocol))
    assert "it asks for posix.mkdir" in refusal(path)
    path.write_bytes(b"\x80\x02Psomething\n.")
    assert "outside the file" in refusal(path)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"cos\nsystem\n.", "import"),
        (b"\x8c\x02os\x8c\x06system\x93.", "import"),
        (b"(ios\nsystem\n.", "call"),
        (b"(o.", "call"),
        (b"N)R.", "call"),
        (b"N)\x81.", "call"),
        (b"N)}\x92.", "call"),
        (b"NNb.", "state"),
        (b"Pid\n.", "outside the file"),
        (b"NQ.", "outside the file"),
        (b"\x82\x01.", "extension"),
        (b"\x83\x01\x00.", "extension"),
        (b"\x84\x01\x00\x00\x00.", "extension"),
        (b"\x8f.", "other than plain"),
        (b"\x96" + struct.pack("<Q", 1) + b"x.", "other than plain"),
        (b"\x97.", "other than plain"),
    ],
)
def test_every_opcode_that_is_more_than_data_is_refused(tmp_path, body, why):
    path = tmp_path / "opcode"
    path.write_bytes(b"\x80\x05" + body)
    message = refusal(path)
    assert message.startswith("refused: byte ") and why in message


def test_objects_of_the_standard_library_are_refused_too(tmp_path):
    path = tmp_path / "date"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [datetime.date(2026, 1, 1)]}))
    assert "asks to import" in refusal(path)


# ---- files that would cost too much -----------------------------------------------


def test_a_memo_index_out_of_order_is_refused(tmp_path):
    """The loader's memo is an array: this index alone would take 64 GiB."""
    path = tmp_path / "memo"
    path.write_bytes(b"\x80\x02Nr\xff\xff\xff\xff.")
    assert "index that skips earlier ones" in refusal(path)
    path.write_bytes(b"\x80\x02Np99999999999\n.")
    assert "index that skips earlier ones" in refusal(path)


@pytest.mark.parametrize("opcode", [b"\x8d", b"\x8e"])
def test_a_length_beyond_the_file_is_truncation(tmp_path, opcode):
    path = tmp_path / "length"
    path.write_bytes(b"\x80\x04" + opcode + struct.pack("<Q", 1 << 62) + b"x.")
    assert refusal(path).startswith("truncated")


def test_a_bomb_is_refused_before_it_unfolds(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "memory_limit", lambda: 64 << 20)
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b"\x80\x04" + b"\0" * (100 << 20)))
    assert "more than 0.1 GiB" in refusal(path)
    # Two million empty dicts: few bytes, much memory.
    path.write_bytes(b"\x80\x04(" + b"}" * 2_000_000 + b"l.")
    assert "more than 0.1 GiB" in refusal(path)


# ---- files that are something else --------------------------------------------------


def test_what_is_no_snapshot(tmp_path):
    path = tmp_path / "file"
    for content in [b"hello, world\n", b'{"segments": []}', bytes(range(256)), b"PK\x03\x04zip"]:
        path.write_bytes(content)
        assert refusal(path).startswith("not a memory snapshot: ")
    path.write_bytes(b"")
    assert "the file is empty" in refusal(path)
    for value in [[], 3, None, "x", {}, {"segments": []}, {"segments": 1, "device_traces": []}]:
        write(path, value)
        assert refusal(path).startswith("not a memory snapshot: ")
    write(path, {"segments": [], "device_traces": [{}]})
    assert "device_traces[0] is not a list" in refusal(path)


@pytest.mark.parametrize("traces", [[], [[]], [[], []]])
def test_no_trace_in_it(tmp_path, traces):
    path = tmp_path / "traceless"
    write(path, {"segments": [], "device_traces": traces})
    message = refusal(path)
    assert message.startswith("no trace in it: ") and "_record_memory_history" in message


def test_what_cannot_be_read(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing")
    assert "cannot be read" in refusal(tmp_path)


def test_every_truncation_is_called_one(tmp_path):
    data = pickle.dumps(small_snapshot())
    path = tmp_path / "short"
    for end in range(2, len(data)):
        path.write_bytes(data[:end])
        assert refusal(path).startswith("truncated: ")
    packed = gzip.compress(data)
    for end in range(2, len(packed), 3):
        path.write_bytes(packed[:end])
        assert refusal(path).startswith("truncated: ")


def test_damaged_gzip(tmp_path):
    packed = bytearray(gzip.compress(pickle.dumps(small_snapshot())))
    packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "damaged"
    path.write_bytes(bytes(packed))
    assert "damaged" in refusal(path) or refusal(path).startswith("truncated")


WHOLE = pickle.dumps(small_snapshot())


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
    tail=st.binary(max_size=8),
)
def test_damage_of_any_kind_is_an_error_and_nothing_else(tmp_path, edits, tail):
    data = bytearray(WHOLE)
    for at, value in edits:
        data[at] = value
    path = tmp_path / "fuzzed"
    path.write_bytes(bytes(data) + tail)
    try:
        load_snapshot(path)
    except SnapshotError as error:
        assert "\n" not in str(error)


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_the_check_survives_any_bytes(data):
    for marked in (data, b"\x80\x04" + data):
        try:
            cost = _core.check_pickle(marked)
        except ValueError:
            continue
        assert cost >= len(marked)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_all_plain_data_is_admitted(value, protocol):
    assert snapshot._unpickled(pickle.dumps(value, protocol=protocol)) == value


# Uses in snapshots


def picture():
    """What torch.cuda.memory._snapshot() returns, in miniature."""

    def block(address, size, state):
        return {
            "address": address, "size": size, "requested_size": size, "state": state,
            "frames": [],
        }  # fmt: skip

    def entry(action, address, size):
        return {
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": 5,
            "device": 0, "frames": [],
        }  # fmt: skip

    def annotation(address, **keys):
        return {
            "device": 0, "time_us": 9, "name": "esper_alloc.use", "stage": "PENDING",
            "address": str(address), "stream_device": "0", **keys,
        }  # fmt: skip

    return {
        "segments": [
            {
                "device": 0, "address": 4096, "total_size": 2 * MIB, "stream": 0,
                "allocated_size": 1024, "active_size": 2048, "requested_size": 2048,
                "segment_type": "small", "segment_pool_id": (0, 0),
                "is_expandable": False, "frames": [],
                "blocks": [
                    block(4096, 1024, "active_allocated"),
                    block(5120, 1024, "active_pending_free"),
                    block(6144, 2 * MIB - 2048, "inactive"),
                ],
            }
        ],
        "device_traces": [
            [
                entry("segment_alloc", 4096, 2 * MIB),
                entry("alloc", 4096, 1024),
                entry("alloc", 5120, 1024),
                entry("free_requested", 5120, 1024),
            ]
        ],
        "external_annotations": [
            {"device": 0, "time_us": 3, "name": "forward", "stage": "START"},
            annotation(5120, stream="48", number="7", kind="record_use"),
            annotation(5120, stream="64", number="0", kind="held"),
            {"device": 0, "time_us": 9, "name": "esper_alloc.tag", "stage": "ASLEEP",
             "address": "4096", "tag": "kv", "asleep_size": "2097152"},
            {"device": 0, "time_us": 9, "name": "esper_alloc.allowance", "stage": "1048576"},
        ],
        "allocator_settings": {"max_split_size": -1},
    }  # fmt: skip


def test_uses_are_put_to_their_blocks():
    given = picture()
    before = copy.deepcopy(given)
    found = snapshot.with_uses(given)
    assert given == before
    first, second, third = found["segments"][0]["blocks"]
    assert second["uses"] == [
        {"stream": 48, "device": 0, "number": 7, "kind": "record_use"},
        {"stream": 64, "device": 0, "number": 0, "kind": "held"},
    ]
    assert "uses" not in first and "uses" not in third
    assert (found["segments"][0]["tag"], found["segments"][0]["asleep_size"]) == ("kv", 2 * MIB)
    assert [entry["name"] for entry in found["external_annotations"]] == ["forward"]
    assert found["allocator_settings"] == {"max_split_size": -1, "esper_alloc_allowance": MIB}
    assert snapshot.with_uses(found) == found
    given["external_annotations"][-1]["stage"] = "off"
    assert snapshot.with_uses(given)["allocator_settings"]["esper_alloc_allowance"] is None
    without = {key: given[key] for key in ("segments", "device_traces")}
    assert snapshot.with_uses(without)["segments"] == without["segments"]


@pytest.mark.parametrize("annotated", [False, True])
def test_viewers_of_torch_read_both_forms(annotated, monkeypatch):
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    # Drawing takes a script from the network: the lines that it would draw will do.
    monkeypatch.setattr("urllib.request.urlretrieve", lambda *_: pytest.fail("asks the network"))
    lines = {"format_flamegraph": str}
    data = snapshot.with_uses(picture()) if annotated else picture()
    summary = _memory_viz.segsum(data)
    assert "segments: 1" in summary and "%" in summary
    assert "alloc" in _memory_viz.trace(data)
    assert "active_pending_free" in _memory_viz.memory(data, **lines)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<html>" in plot(data) or "<!DOCTYPE html>" in plot(data)
    changed = copy.deepcopy(data)
    _memory_viz.compare(data["segments"], changed["segments"], **lines)


def test_kinds_in_the_snapshot_are_those_documented():
    code = (ROOT / "csrc" / "torch" / "reporting" / "snapshot.cpp").read_text()
    body = code[code.index("const char *name_of(") : code.index("AnnotationEntry convert(")]
    for kind in re.findall(r'"(\w+)"', body):
        assert f"``{kind}``" in snapshot.with_uses.__doc__
    for name in (snapshot._USE, snapshot._TAG, snapshot._ALLOWANCE):
        assert f'"{name}"' in code
