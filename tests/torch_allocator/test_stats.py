"""memory_stats(), report(), traits of streams, and uses in snapshots."""

from __future__ import annotations

import copy
import re
import sys
import types
import warnings
from pathlib import Path

import pytest

import esper_alloc
from esper_alloc import _core
from esper_alloc.replay import snapshot
from esper_alloc.torch_allocator import stats

ROOT = Path(__file__).resolve().parents[2]

HEADER = (ROOT / "csrc" / "esper_report.h").read_text()


def test_memory_stats_has_every_counter_of_the_core():
    body = re.search(r"typedef struct esper_counters \{(.*?)\}", HEADER, re.S).group(1)
    names = re.findall(r"^  uint64_t (\w+);", body, re.M)
    assert list(_core.COUNTERS) == names
    for name in names:
        assert f"``{name}``" in stats.memory_stats.__doc__


def test_without_the_allocator_the_figures_are_zero():
    assert esper_alloc.memory_stats() == dict.fromkeys(_core.COUNTERS, 0)
    assert "does not run on it" in esper_alloc.report()


MIB = 1 << 20
GATE = dict(device=0, waiting=0x10, stream_device=0, stream=0, number=7, size=64 * MIB)


def use(stream, number, **kind):
    kind = {"no_gate": False, "at_free": False, "until_free": False, "held": False, **kind}
    return {"stream_device": 0, "stream": stream, "number": number, **kind}


def block(address, size, live, *uses):
    return dict(address=address, size=size, live=live, stream=0, uses=list(uses))


@pytest.fixture
def running(monkeypatch):
    """A core with two devices that answers what a test puts in here."""
    torch = pytest.importorskip("torch")
    found = types.SimpleNamespace(gates={0: [], 1: []}, pending={0: [], 1: []})
    core = types.SimpleNamespace(gates=found.gates.__getitem__, pending=found.pending.__getitem__)
    monkeypatch.setattr(stats, "_core", core)
    found.tags = {0: {}, 1: {}}
    monkeypatch.setattr(stats, "tag_stats", found.tags.__getitem__)
    monkeypatch.setitem(sys.modules, "esper_alloc._torch", types.SimpleNamespace())
    monkeypatch.setattr(stats, "_is_running", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(stats.time, "time", lambda: 1000.5)
    return found


def test_the_report_of_an_idle_process_is_short(running):
    lines = esper_alloc.report().splitlines()
    assert lines[0].startswith("esper_alloc: report of process ")
    assert lines[1:] == [
        "device 0: 0 gates pending, 0 blocks held, 0 uses without gate",
        "device 1: 0 gates pending, 0 blocks held, 0 uses without gate",
    ]


def test_the_report_names_who_waits_for_whom_since_when(running):
    running.gates[0] = [{**GATE, "issued_us": 998_250_000}]
    lines = esper_alloc.report().splitlines()
    assert lines[1] == "device 0: 1 gate pending, 0 blocks held, 0 uses without gate"
    assert lines[3] == (
        "    stream 0x10 of device 0 waits for the default stream of device 0, "
        "event 7, since 2.250 s, for a block of 64.0 MiB"
    )


def test_the_report_lists_what_is_held_and_what_has_no_gate(running):
    running.pending[1] = [
        block(0x1000, 2 * MIB, False, use(0x20, 0, held=True), use(0x30, 3, held=True)),
        block(0x2000, 512, True, use(0x20, 4, no_gate=True), use(0x30, 5)),
        block(0x3000, 512, False, use(0x20, 6, no_gate=True, at_free=True)),
        block(0x5000, 512, False, use(0x20, 8, no_gate=True, until_free=True)),
        block(0x4000, 512, True, use(0x20, 0, held=True)),  # not freed: holds nothing
    ]
    text = esper_alloc.report()
    assert "device 1: 0 gates pending, 1 block held, 3 uses without gate" in text
    assert "block 0x1000 of 2.0 MiB, freed, used on stream 0x20 of device 0\n" in text
    assert "block 0x1000 of 2.0 MiB, freed, used on stream 0x30 of device 0\n" in text
    assert "held until its stream is seen again, or its device has been synchronised:\n" in text
    assert "block 0x2000 of 512 bytes, live, used on stream 0x20 of device 0, event 4\n" in text
    assert "event 6, by record_stream\n" in text
    assert "event 8, until its free\n" in text
    assert "event 3" not in text  # a held use has no event: its number is the first that would do
    assert "0x4000" not in text and "event 5" not in text


def test_the_report_says_what_sleeps(running):
    awake = {"asleep": False, "sleeping_bytes": 0, "host_bytes": MIB}
    running.tags[1] = {
        "": awake,
        "kv": {"asleep": True, "sleeping_bytes": 64 * MIB, "host_bytes": 0},
        "weights": {"asleep": True, "sleeping_bytes": 2 * MIB, "host_bytes": MIB},
    }
    assert esper_alloc.report().splitlines()[2:] == [
        "device 1: 0 gates pending, 0 blocks held, 0 uses without gate",
        "  asleep:",
        "    tag 'kv': waking needs 64.0 MiB, 0 bytes on the host",
        "    tag 'weights': waking needs 2.0 MiB, 1.0 MiB on the host",
    ]


def test_traits_want_a_stream():
    torch = pytest.importorskip("torch")
    for bad in ("side", 3, None):
        with pytest.raises(TypeError, match="stream must be a torch.cuda.Stream, not"):
            esper_alloc.set_stream_traits(bad, rendezvous=True)
    stream = torch.Stream(stream_id=3, device_index=0, device_type=1)
    assert esper_alloc.set_stream_traits(stream, rendezvous=True) is None
    with pytest.raises(TypeError):
        esper_alloc.set_stream_traits(stream, True)


def test_traits_that_cannot_be_set_are_not_passed_over_in_silence(monkeypatch):
    torch = pytest.importorskip("torch")
    from esper_alloc.uses import stream_traits, use

    stream = torch.Stream(stream_id=3, device_index=0, device_type=1)
    monkeypatch.setattr(use, "_compiled", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        esper_alloc.set_stream_traits(stream, rendezvous=True)  # another allocator serves
    monkeypatch.setattr(stream_traits, "is_enabled", lambda: True)
    with pytest.warns(RuntimeWarning, match="cannot be told of a stream's traits"):
        esper_alloc.set_stream_traits(stream, rendezvous=True)


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
        ],
        "allocator_settings": {},
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
    assert snapshot.with_uses(found) == found
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
    code = (ROOT / "csrc" / "torch" / "snapshot.cpp").read_text()
    body = code[code.index("const char *name_of(") : code.index("AnnotationEntry convert(")]
    for kind in re.findall(r'"(\w+)"', body):
        assert f"``{kind}``" in snapshot.with_uses.__doc__
    assert f'"{snapshot._USE}"' in code
