"""memory_stats(), report(), and traits of streams."""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path

import pytest

import esper_alloc
from esper_alloc import _core
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
    for bad in ("no", 1, None):
        with pytest.raises(
            TypeError, match=f"rendezvous must be True or False, not {type(bad).__name__}"
        ):
            esper_alloc.set_stream_traits(stream, rendezvous=bad)


@pytest.mark.parametrize("compiled", [True, False])
def test_streams_of_other_devices_have_no_traits(compiled, monkeypatch):
    torch = pytest.importorskip("torch")
    from esper_alloc.uses import use

    if not compiled:
        monkeypatch.setattr(use, "_compiled", None)
    xpu = torch.Stream(stream_id=3, device_index=0, device_type=12)
    for stream, kind in (
        (torch.cpu.Stream(), "cpu"),
        (torch.Stream(device="cpu"), "cpu"),
        (xpu, "xpu"),
    ):
        with pytest.raises(
            TypeError, match=f"a torch.cuda.Stream, not a stream of device type {kind}"
        ):
            esper_alloc.set_stream_traits(stream, rendezvous=True)


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
