"""Reading snapshot files: what is admitted, and what is said of the rest; uses in snapshots."""

import copy
import datetime
import gzip
import io
import marshal
import os
import pickle
import random
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from histories import Recorder, refusal, snapshot_of, write
from hypothesis import HealthCheck, given, settings, strategies as st
from processes import ROOT, succeeded

from esper_alloc.replay import reader, snapshot
from esper_alloc.replay.snapshot import load_snapshot

MIB = 1 << 20
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
REMEDY = "; write the snapshot again with torch.cuda.memory._dump_snapshot()"


def small_snapshot() -> dict:
    recorder = Recorder()
    recorder.free(recorder.alloc(1000))
    return snapshot_of(recorder)


WHOLE = pickle.dumps(small_snapshot())


def read_each(files: list[bytes]) -> list[str]:
    """What the reader says of each file, empty where it is read: in one process for all."""
    code = """
        import io, marshal, runpy, sys
        reader = runpy.run_path(sys.argv[1])
        reader["_confine"](1 << 30)
        answers = []
        for data in marshal.load(sys.stdin.buffer):
            try:
                reader["_find"](reader["_load"](io.BufferedReader(io.BytesIO(data))), 1 << 30)
                answers.append("")
            except (reader["Refusal"], MemoryError) as error:
                answers.append(str(error) or "no memory")
        marshal.dump(answers, sys.stdout.buffer)
    """
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), reader.__file__]
    return marshal.loads(succeeded(*command, input=marshal.dumps(files), text=False).stdout)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("compressed", [False, True])
def test_reads_plain_and_gzip_whatever_the_name(tmp_path, protocol, compressed):
    data = pickle.dumps(small_snapshot(), protocol=protocol)
    path = tmp_path / ("plain.gz" if not compressed else "compressed.pickle")
    path.write_bytes(gzip.compress(data) if compressed else data)
    loaded = load_snapshot(path)
    assert loaded.path == str(path)
    assert [list(reader.ACTIONS)[one] for one in loaded.traces[0].actions] == [
        "segment_alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip


def test_reads_gzip_of_several_members_and_padding(tmp_path):
    path = tmp_path / "members"
    path.write_bytes(gzip.compress(WHOLE[:100]) + gzip.compress(WHOLE[100:]) + b"\0" * 512)
    assert len(load_snapshot(path).traces[0].actions) == 4


def test_reads_from_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen(["sh", "-c", 'cat > "$0"', str(path)], stdin=subprocess.PIPE) as writer:
        writer.stdin.write(gzip.compress(WHOLE))
        writer.stdin.close()
        assert len(load_snapshot(path).traces[0].actions) == 4


def test_what_the_reader_hands_over(tmp_path):
    recorder = Recorder()
    first, second = recorder.alloc(1000), recorder.alloc(3 * MIB)
    recorder.request(first)
    taken = snapshot_of(recorder)
    taken["segments"][1]["segment_pool_id"] = (0, 7)
    taken["allocator_settings"] = {
        "max_split_size": 20 * MIB,
        "roundup_power2_divisions": {"1": 4, 2: 1, 64: 8, float("inf"): 2},
    }
    loaded = load_snapshot(write(tmp_path / "file", taken))
    assert (loaded.expandable, loaded.max_split_size, loaded.roundup) == (None, 20 * MIB, {})
    del taken["allocator_settings"]["roundup_power2_divisions"][float("inf")]
    loaded = load_snapshot(write(tmp_path / "file", taken))
    assert loaded.roundup == {1: 4, 64: 8}
    [trace] = loaded.traces
    small, large = taken["segments"]
    assert trace.segments == [
        (0, small["address"], small["address"] + small["total_size"], (0, 0), False, 0),
        (1, large["address"], large["address"] + large["total_size"], (0, 7), False, 0),
    ]
    assert trace.blocks == [
        (first.address, first.size, 1000, 0, True, 0),
        (second.address, second.size, 3 * MIB, 0, False, 0),
    ]
    entries = taken["device_traces"][0]
    for column, key in [("addresses", "addr"), ("sizes", "size"), ("times", "time_us")]:
        assert list(getattr(trace, column)) == [entry[key] for entry in entries]


# ---- files that ask for more than data --------------------------------------------


class Calls:
    """Unpickling it calls a function."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", PROTOCOLS)
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
    assert message.startswith("not a memory snapshot: it asks for 'posix.mkdir'")
    assert message.endswith(REMEDY)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"cos\nsystem\n.", "asks for 'os.system'"),
        (b"\x8c\x02os\x8c\x06system\x93.", "asks for 'os.system'"),
        (b"c\xf0\x9f\x98\x80\nx\n.", "asks for"), (b"(ios\nsystem\n.", "asks for 'os.system'"),
        (b"(cos\nsystem\no.", "asks for 'os.system'"), (b"Pid\n.", "outside the file"),
        (b"NQ.", "outside the file"), (b"(No.", "damaged"), (b"N)R.", "not callable"),
        (b"N)\x81.", "must be a type"), (b"N)}\x92.", "must be a type"),
        (b"]}K\x01K\x01sb.", "damaged"), (b"\x82\x01.", "extension"),
        (b"\x83\x01\x00.", "extension"), (b"\x84\x01\x00\x00\x00.", "extension"),
        (b"\x97.", "out-of-band"), (b"\x8f.", "it holds a set"),
    ],
)  # fmt: skip
def test_every_opcode_that_is_more_than_data_is_refused(tmp_path, body, why):
    path = tmp_path / "opcode"
    path.write_bytes(b"\x80\x05" + body)
    message = refusal(path)
    assert message.startswith("not a memory snapshot: ") and why in message
    assert message.endswith(REMEDY)


def test_objects_of_the_standard_library_are_refused_too(tmp_path):
    path = tmp_path / "date"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [datetime.date(2026, 1, 1)]}))
    assert "it asks for 'datetime.date'" in refusal(path)


# ---- files that are something else --------------------------------------------------


def test_what_is_no_snapshot(tmp_path):
    path = tmp_path / "file"
    for content in [b"hello, world\n", bytes(range(256))]:
        path.write_bytes(content)
        message = f"neither a memory snapshot nor a black box's file{REMEDY}"
        assert refusal(path) == message
    for content in [b'{"segments": []}', b"PK\x03\x04zip"]:
        path.write_bytes(content)
        assert refusal(path).startswith("not a memory snapshot: it is a ")
    path.write_bytes(b"")
    assert "the file is empty" in refusal(path)
    for value in [[], 3, None, "x", {}, {"segments": []}, {"segments": 1, "device_traces": []}]:
        write(path, value)
        assert refusal(path).startswith("not a memory snapshot: ")
    write(path, {"segments": [], "device_traces": [{}]})
    assert "device_traces[0] is not a list" in refusal(path)
    write(path, {"segments": [], "device_traces": [[{}]] * 129})
    assert "it has 129 devices" in refusal(path)


@pytest.mark.parametrize("traces", [[], [[]], [[], []]])
def test_no_trace_in_it(tmp_path, traces):
    path = tmp_path / "traceless"
    write(path, {"segments": [], "device_traces": traces})
    message = refusal(path)
    assert message.startswith("no trace in it: ") and "_record_memory_history" in message


def test_what_cannot_be_read(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing")
    assert "cannot be read" in refusal(tmp_path)


def test_a_python_that_does_not_start_is_named(tmp_path, monkeypatch):
    path = tmp_path / "fine"
    path.write_bytes(WHOLE)
    for executable, say in [
        ("/no/python", "sys.executable, '/no/python', does not start: No such file"),
        (None, "sys.executable, '', does not start"),
        (sys.executable, "no LIMIT"),
    ]:
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(snapshot, "memory_limit", lambda: "no LIMIT")
        message = refusal(path)
        assert message.startswith("cannot be read: ") and say in message


def test_every_truncation_is_called_one():
    packed = gzip.compress(WHOLE)
    files = [WHOLE[:end] for end in range(1, len(WHOLE))]
    files += [packed[:end] for end in range(2, len(packed))]
    said = {one.partition(",")[0] for one in read_each(files)}
    assert said == {"not a memory snapshot: truncated"}


def test_damaged_gzip(tmp_path):
    packed = gzip.compress(WHOLE)
    checksum, middle = bytearray(packed), bytearray(packed)
    checksum[-6] ^= 1
    middle[len(packed) // 2] ^= 0xFF
    for answer in read_each([bytes(checksum), bytes(middle)]):
        assert "damaged" in answer or "truncated" in answer


def test_damage_of_any_kind_is_an_error_and_nothing_else():
    chance = random.Random(1)
    files = []
    for _ in range(3000):
        data = bytearray(WHOLE)
        for _ in range(chance.randrange(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        files.append(bytes(data))
    answers = read_each(files + [chance.randbytes(chance.randrange(200)) for _ in range(1000)])
    assert not any("\n" in answer for answer in answers)
    assert 0 < sum(not answer for answer in answers) < 3000


PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        inner.map(lambda shared: [shared, (shared,), {"again": shared}]),
        st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    ),
    max_leaves=20,
)


def read_here(value: Any, protocol: int) -> reader.Found:
    data = io.BufferedReader(io.BytesIO(pickle.dumps(value, protocol=protocol)))
    return reader._find(reader._load(data), 1 << 30)


@given(value=PLAIN, protocol=st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_what_a_replay_does_not_need_may_be_any_plain_data(value, protocol):
    plain = small_snapshot()
    entries = [{**entry, "frames": value} for entry in plain["device_traces"][0]]
    more = {**plain, "device_traces": [entries], "external_annotations": value}
    assert read_here(more, protocol) == read_here(plain, protocol)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(value=PLAIN, data=st.data())
def test_values_of_any_type_are_an_error_or_read(value, data):
    """One value somewhere in a snapshot is another."""
    changed = small_snapshot()
    at: Any = changed
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = value
    try:
        marshal.dumps(read_here(changed, 4))
    except reader.Refusal as error:
        assert "\n" not in str(error)


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
        "segments": [{"device": 0, "address": 4096, "total_size": 2 * MIB, "stream": 0,
         "allocated_size": 1024, "active_size": 2048, "requested_size": 2048,
         "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
         "blocks": [block(4096, 1024, "active_allocated"), block(5120, 1024, "active_pending_free"),
         block(6144, 2 * MIB - 2048, "inactive")]}],
        "device_traces": [[entry("segment_alloc", 4096, 2 * MIB), entry("alloc", 4096, 1024),
         entry("alloc", 5120, 1024), entry("free_requested", 5120, 1024)]],
        "external_annotations": [{"device": 0, "time_us": 3, "name": "forward", "stage": "START"},
         annotation(5120, stream="48", number="7", kind="record_use"), annotation(5120, stream="64",
         number="0", kind="held"), {"device": 0, "time_us": 9, "name": "esper_alloc.tag",
         "stage": "ASLEEP", "address": "4096", "tag": "kv", "asleep_size": "2097152"}, {"device": 0,
         "time_us": 9, "name": "esper_alloc.allowance", "stage": "1048576"}],
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
    body = code[code.index("const char *name_of(") : code.index("AnnotationEntry annotation(")]
    for kind in re.findall(r'"(\w+)"', body):
        assert f"``{kind}``" in snapshot.with_uses.__doc__
    for name in (snapshot._USE, snapshot._TAG, snapshot._ALLOWANCE):
        assert f'"{name}"' in code


# ---- files of another kind --------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"PK\x03\x04 and more", "it is a zip file: unpack it. If torch.save wrote it"),
        (b"\xfd7zXZ\x00", "it is an xz file: unpack it first"),
        (b"\x28\xb5\x2f\xfd ", "it is a zstd file"),
        (b"BZh9", "it is a bzip2 file"),
        (b"<!DOCTYPE html>", "it is a web page"),
        (b'{"traceEvents": []}', "it is a JSON file"),
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2), "it was written by torch.save"),
    ],
)
def test_a_file_of_another_kind_gets_a_hint(tmp_path, head, what):
    path = tmp_path / "other.pickle"
    path.write_bytes(head)
    said = refusal(path)
    assert said.startswith(f"not a memory snapshot: {what}")
    assert "torch.cuda.memory._dump_snapshot()" in said


@pytest.mark.parametrize("old", [False, True])
def test_what_torch_save_writes_gets_a_hint(tmp_path, old):
    torch = pytest.importorskip("torch")
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=not old)
    assert "torch.save" in refusal(tmp_path / "x.pt")
