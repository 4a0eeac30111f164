"""memory_stats() and report()."""

import re
import sys
import types

import pytest
from processes import ROOT

import esper_alloc
from esper_alloc import _core
from esper_alloc.torch_allocator import stats

HEADER = (ROOT / "csrc" / "esper_report.h").read_text()


def test_memory_stats_has_every_counter_of_the_core():
    body = re.search(r"typedef struct esper_counters \{(.*?)\}", HEADER, re.S).group(1)
    names = re.findall(r"^  uint64_t (\w+);", body, re.M)
    assert list(_core.COUNTERS) == names
    for name in esper_alloc.memory_stats():
        assert f"``{name}``" in stats.memory_stats.__doc__


def test_without_the_allocator_the_figures_are_zero():
    seconds = {"held_back_us": "held_back_seconds"}
    names = [seconds.get(name, name) for name in _core.COUNTERS]
    assert esper_alloc.memory_stats() == dict.fromkeys(names, 0)
    assert "does not run on it" in esper_alloc.report()


MIB = 1 << 20
COUNTERS = dict.fromkeys(_core.COUNTERS, 0) | {"allowance": 128 * MIB}


def use(stream, number, **kind):
    kind = {"until_free": False, "held": False, **kind}
    return {"stream_device": 0, "stream": stream, "number": number, **kind}


def block(address, size, live, *uses):
    return dict(address=address, size=size, live=live, stream=0, uses=list(uses))


@pytest.fixture
def running(monkeypatch):
    """A core with two devices that answers what a test puts in here."""
    torch = pytest.importorskip("torch")
    found = types.SimpleNamespace(
        counters={0: COUNTERS.copy(), 1: COUNTERS.copy()}, pending={0: [], 1: []}
    )
    core = types.SimpleNamespace(
        counters=found.counters.__getitem__, pending=found.pending.__getitem__
    )
    monkeypatch.setattr(stats, "_core", core)
    monkeypatch.setattr(stats, "device_index", lambda device: device)
    found.tags = {0: {}, 1: {}}
    monkeypatch.setattr(stats, "tag_stats", found.tags.__getitem__)
    monkeypatch.setitem(sys.modules, "esper_alloc._torch", types.SimpleNamespace())
    monkeypatch.setattr(stats, "_is_running", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return found


def test_times_are_in_seconds(running):
    running.counters[1].update(held_back=2, held_back_us=1_250_000, loans=3)
    figures = esper_alloc.memory_stats(1)
    assert figures["held_back_seconds"] == 1.25 and "held_back_us" not in figures
    assert (figures["held_back"], figures["loans"], figures["allowance"]) == (2, 3, 128 * MIB)


def test_the_report_of_an_idle_process_is_short(running):
    running.counters[1]["allowance"] = 0
    lines = esper_alloc.report().splitlines()
    assert lines[0].startswith("esper_alloc: report of process ")
    assert lines[1:] == [
        "device 0: the host was never held back; allowance 128.0 MiB",
        "device 1: the host was never held back; allowance off",
    ]


def test_the_report_says_how_often_and_how_long_the_host_was_held_back(running):
    running.counters[0].update(held_back=1, held_back_us=2_500)
    running.counters[1].update(
        held_back=12, held_back_us=3_456_789, held_back_in_vain=2, allowance=512
    )
    assert esper_alloc.report().splitlines()[1:] == [
        "device 0: the host was held back 1 time, 0.003 s in all, 0 of them in vain; "
        "allowance 128.0 MiB",
        "device 1: the host was held back 12 times, 3.457 s in all, 2 of them in vain; "
        "allowance 512 bytes",
    ]


def test_the_report_lists_what_is_held(running):
    running.pending[1] = [
        block(0x1000, 2 * MIB, False, use(0x20, 0, held=True), use(0x30, 3, held=True)),
        block(0x2000, 512, True, use(0x20, 4), use(0x30, 5)),
        block(0x3000, 512, False, use(0x20, 6, until_free=True)),
        block(0x5000, 512, False, use(0, 8, held=True, until_free=True)),
        block(0x6000, 512, False, use(0x40, 8, held=True, until_free=True)),
        block(0x4000, 512, True, use(0x20, 0, held=True)),  # not freed: holds nothing
    ]
    assert esper_alloc.report().splitlines()[3:] == [
        "  held until its stream is seen again, or its device has been synchronised:",
        "    block 0x1000 of 2.0 MiB, used on stream 0x20 of device 0",
        "    block 0x1000 of 2.0 MiB, used on stream 0x30 of device 0",
        "    block 0x5000 of 512 bytes, used on the default stream of device 0, until its free",
        "    block 0x6000 of 512 bytes, used on stream 0x40 of device 0, until its free",
    ]


def test_the_report_says_what_sleeps(running):
    awake = {"asleep": False, "sleeping_bytes": 0, "host_bytes": MIB}
    running.tags[1] = {
        "": awake,
        "kv": {"asleep": True, "sleeping_bytes": 64 * MIB, "host_bytes": 0},
        "weights": {"asleep": True, "sleeping_bytes": 2 * MIB, "host_bytes": MIB},
    }
    assert esper_alloc.report().splitlines()[2:] == [
        "device 1: the host was never held back; allowance 128.0 MiB",
        "  asleep:",
        "    tag 'kv': waking needs 64.0 MiB, 0 bytes on the host",
        "    tag 'weights': waking needs 2.0 MiB, 1.0 MiB on the host",
    ]
