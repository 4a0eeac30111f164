"""`esper-alloc view`: its numbers against a simple model, its page, and the files that it refuses."""

from __future__ import annotations

import html.parser
import json
import os
import pickle
import random
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from histories import Recorder, snapshot_of, write
from processes import browser
from pytest import CaptureFixture, MonkeyPatch
from recordings import MIB, TORCH, Writer, snapshot_like, training

np = pytest.importorskip("numpy")

from esper_alloc.cli.main import main  # noqa: E402
from esper_alloc.recorder import reading as box  # noqa: E402
from esper_alloc.replay.for_view import load_for_view  # noqa: E402
from esper_alloc.view import content, timeline  # noqa: E402
from esper_alloc.view.page import make_page  # noqa: E402
from esper_alloc.view.places import CATEGORIES, category_of, line_of  # noqa: E402

KINDS = {"u1": "u1", "u2": "<u2", "u4": "<u4", "i4": "<i4", "f8": "<f8"}
STRETCH = 64 * MIB


def random_recording(path: Path, seed: int, events: int = 1500) -> box.BlackBox:
    """Two devices, two streams and a pool, with segments that come and go under the blocks."""
    rng, w = random.Random(seed), Writer()
    sites = [w.site(f"/a/f{n}.py:{n} (g{n})", "/a/main.py:1 (main)") for n in range(12)] + [0]
    stretches = []
    for device in (0, 1):
        for pool in ((0, 0), (0, 7)):
            segment_lane = w.lane(device, 0, pool)
            lanes = [w.lane(device, stream) for stream in (0, 0x100)]
            for n in range(3):
                base = (1 + len(stretches)) * 2**40 + n * STRETCH
                stretches.append((base, segment_lane, lanes))
                if n == 0:  # there from the beginning
                    w.lanes[segment_lane] = (*w.lanes[segment_lane][:3], STRETCH)
    mapped = {base: 0 if n % 3 else lane for n, (base, lane, _) in enumerate(stretches)}
    live: dict[int, int] = {}
    waiting: set[int] = set()
    for _ in range(events):
        base, segment_lane, lanes = rng.choice(stretches)
        address = base + rng.randrange(8) * 8 * MIB
        used = any(base <= one < base + STRETCH for one in (*live, *waiting))
        if not mapped[base]:
            mapped[base] = w.lane(w.lanes[segment_lane][0], 0, rng.choice(((0, 0), (0, 7))))
            piece = STRETCH // rng.choice((1, 2, 8))
            for at in range(base, base + STRETCH, piece):
                w.event(box.SEGMENT_MAP, at, piece, mapped[base])
        elif not used and rng.random() < 0.4:
            w.event(box.SEGMENT_UNMAP, base, STRETCH, mapped[base])
            mapped[base] = 0
        elif address in live:
            w.event(box.FREE, address)
            del live[address]
            if rng.random() < 0.3:
                w.event(box.PENDING, address)
                waiting.add(address)
        elif address in waiting and rng.random() < 0.5:
            w.event(box.AVAILABLE, address)
            waiting.discard(address)
        else:
            waiting.discard(address)
            live[address] = rng.randrange(1, 8 * MIB)
            site, thread = rng.choice(sites), rng.choice((1, 1, 1, 2))
            w.event(box.ALLOC, address, live[address], rng.choice(lanes), site, thread)
        if rng.random() < 0.01:
            w.event(box.OOM, 5 * MIB, 9 * MIB, lanes[0])
    for base, lane in mapped.items():
        device, stream, pool, _before = w.lanes[lane]
        if lane:
            w.segments.append((base, STRETCH, device, 1, stream, *pool))
    return box.load_black_box(w.write(path))


class Model:
    """The state after every event of a device, by a dict."""

    def __init__(self, recording: box.BlackBox, device: int) -> None:
        r, blocks, waiting = recording, {}, {}
        reserved = sum(lane.before for lane in r.lanes if lane.device == device)
        self.live, self.reserved, self.waiting = [], [], []
        self.states: list[Counter[int]] = []
        by_site: Counter[int] = Counter()
        for i, kind in enumerate(r.kinds):
            address, size = r.addresses[i], r.sizes[i]
            if r.lanes[r.lane_numbers[i]].device == device:
                if kind == box.ALLOC:
                    blocks[address] = size
                    waiting.pop(address, None)
                    by_site[r.site_numbers[i]] += size
                elif kind == box.FREE:
                    del blocks[address]
                    by_site[r.site_numbers[i]] -= size
                elif kind == box.PENDING:
                    waiting[address] = size
                elif kind == box.AVAILABLE:
                    waiting.pop(address, None)
                elif kind == box.SEGMENT_MAP:
                    reserved += size
                elif kind == box.SEGMENT_UNMAP:
                    reserved -= size
            self.live.append(sum(blocks.values()))
            self.waiting.append(sum(waiting.values()))
            self.reserved.append(reserved)
            self.states.append(+by_site)


class Page:
    """The facts and columns of a page, decoded as its script does it."""

    def __init__(self, recording: box.BlackBox) -> None:
        made = content.Content(recording)
        self.facts, self.data = made.facts, b"".join(made.columns.parts)

    def column(self, told: dict[str, Any]) -> Any:
        return np.frombuffer(self.data, KINDS[told["kind"]], told["count"], told["at"])

    def spans_at(self, told: dict[str, Any], moment: int) -> list[tuple[int, int, int, int]]:
        """Address, size, place and owner of those that are there."""
        begin = np.cumsum(self.column(told["begin"]))
        end = begin + self.column(told["moments"])
        page, above = self.column(told["page"]), self.column(told["above"])
        size = self.column(told["sizes"])[self.column(told["size"])]
        place, owner = self.column(told["place"]), self.column(told["owner"])
        return [
            (int(page[i]) + (int(above[i]) << 32) << 9, int(size[i]), int(place[i]), int(owner[i]))
            for i in np.flatnonzero((begin <= moment) & (moment < end))
        ]

    def by_line(self, told: dict[str, Any], moment: int) -> Counter[str]:
        """Live bytes."""
        found: Counter[str] = Counter()
        for _, size, place, _ in self.spans_at(told["blocks"], moment):
            line = self.facts["lines"][self.facts["line"][place]]
            found["(no" if line.startswith("(no") else line] += size
        return found


def seconds_to_event(recording: box.BlackBox) -> dict[float, int]:
    times = [(time - recording.begin) / 10**9 for time in recording.times]
    assert len(set(times)) == len(times)
    return {time: i for i, time in enumerate(times)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [20, 10**6])
def test_every_number_is_the_models(
    seed: int, most: int, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    recording = random_recording(tmp_path / "f", seed)
    monkeypatch.setattr(timeline, "FEWEST_STEPS", min(most, 100))
    monkeypatch.setattr(timeline, "MOST_STEPS", max(most, 100))
    monkeypatch.setattr(content, "MOST_BLOCKS", most)
    page, event_of = Page(recording), seconds_to_event(recording)
    assert [one["device"] for one in page.facts["devices"]] == [0, 1]
    for told in page.facts["devices"]:
        model = Model(recording, told["device"])
        steps = [event_of[time] for time in page.column(told["steps"])]
        highest, lowest = page.column(told["highest"]), page.column(told["lowest"])
        assert highest.tolist() == [model.live[i] for i in steps]
        assert highest.max() == max(model.live)
        assert all(low <= high for low, high in zip(lowest, highest))
        assert lowest.min() == min(model.live)
        assert told["exact"] == (most > 100)
        rows = page.column(told["reserved"]).reshape(-1, len(steps)).sum(axis=0)
        assert rows.max() >= max(model.reserved)
        for name, groups in (("by_category", 6), ("by_line", len(told["top_lines"]) + 1)):
            stack = page.column(told[name]).reshape(len(told["owners"]) * groups, -1).cumsum(axis=1)
            assert np.abs(stack.sum(axis=0) * 1024 - highest).max() <= 1024 * len(stack)
        moments = [event_of[time] for time in page.column(told["moments"])]
        assert model.live[moments[told["peak"]]] == max(model.live)
        idle = [reserved - live for reserved, live in zip(model.reserved, model.live)]
        assert idle[moments[told["idle"]]] == max(idle)
        assert model.waiting[moments[told["freed"]]] == max(model.waiting)
        assert page.column(told["moment_live"]).tolist() == [model.live[i] for i in moments]
        assert {event_of[time] for time in page.column(told["oom_time"])} <= set(moments)
        for moment in range(0, len(moments), max(1, len(moments) // 40)):
            event = moments[moment]
            wanted: Counter[str] = Counter()
            for site, size in model.states[event].items():
                wanted[recording.sites[site][0] if site else "(no"] += size
            assert page.by_line(told, moment) == wanted
            waiting = page.spans_at(told["pending"], moment)
            assert sum(size for _, size, _, _ in waiting) == model.waiting[event]
            pieces = page.spans_at(told["pieces"], moment)
            assert sum(size for _, size, _, _ in pieces) == model.reserved[event]
            for address, size, _, owner in page.spans_at(told["blocks"], moment):
                around = [one for one in pieces if one[0] <= address < one[0] + one[1]]
                pools = [told["owners"][one[3]]["pool"] for one in around]
                assert pools == [told["owners"][owner]["pool"]], (address, size)
        waiting = page.column(told["waiting"]).reshape(-1, len(steps)).sum(axis=0)
        if told["exact"]:
            assert rows.tolist() == model.reserved and waiting.tolist() == model.waiting
        else:
            assert waiting.max() >= max(model.waiting)
        reserved = page.column(told["moment_reserved"]).reshape(-1, len(moments)).sum(axis=0)
        assert reserved.tolist() == [model.reserved[event] for event in moments]


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_shows_what_a_recording_of_the_same_history_does(
    seed: int, tmp_path: Path
) -> None:
    def states(recording: box.BlackBox, device: int) -> dict[Any, Any]:
        """After each microsecond, and at last what is pending; where memory ran out."""
        page = Page(recording)
        told = page.facts["devices"][device]
        reserved = page.column(told["moment_reserved"]).reshape(-1, told["moments"]["count"]).sum(0)
        found: dict[Any, Any] = {
            "ooms": [page.column(told[one]).tolist() for one in ("oom_asked", "oom_free")],
            "end": sorted(one[:2] for one in page.spans_at(told["pending"], len(reserved) - 1)),
        }
        for moment, second in enumerate(page.column(told["moments"])):
            us = round(second * 10**6) + recording.begin // 1000
            found[us] = page.by_line(told, moment), reserved[moment]
        return found

    recording = random_recording(tmp_path / "f", seed, 300)
    snapshot = load_for_view(write(tmp_path / "s", snapshot_like(tmp_path / "f")))
    for device in (0, 1):
        found = states(snapshot, device)
        assert len(found) > 50 and found.items() <= states(recording, device).items()


def test_a_snapshot_that_begins_late_and_has_no_times(tmp_path: Path) -> None:
    recorder = Recorder()
    kept, gone, waits = (recorder.alloc(size * MIB) for size in (2, 3, 5))
    recorder.request(waits)
    recorder.cut()
    recorder.alloc(30 * MIB, stream=0x100)
    recorder.free(gone)
    snapshot = snapshot_of(recorder)
    for entry in snapshot["device_traces"][0]:
        entry["time_us"] = 5
    block = snapshot["segments"][0]["blocks"][0]
    assert block["address"] == kept.address
    for before, frames in (
        ("(allocated before the recording)", []),
        ("m.py:3 (f)", [{"filename": "m.py", "line": 3, "name": "f"}]),
    ):
        block["frames"] = frames
        page = Page(load_for_view(write(tmp_path / "late", snapshot)))
        (told,) = page.facts["devices"]
        assert page.facts["has_stacks"] == bool(frames) and page.facts["older"] == 5
        assert page.column(told["steps"]).tolist() == [0, 1, 2] and not page.facts["clock"]
        assert page.column(told["highest"]).tolist() == [5 * MIB, 35 * MIB, 32 * MIB]
        assert page.column(told["waiting"]).max() == 5 * MIB
        last = told["moments"]["count"] - 1
        assert page.by_line(told, last) == {before: 2 * MIB, "(no": 30 * MIB}


@pytest.mark.parametrize("most", [7, 64, 1000, 5000])
def test_steps_are_bounds_of_what_they_stand_for(most: int) -> None:
    rng = np.random.default_rng(most)
    live = rng.integers(0, 1000, 3000).astype(np.int64)
    times = np.cumsum(rng.exponential(100, 3000) ** 2).astype(np.int64)
    edges = timeline.step_edges(times, 500, most)
    assert edges[0] == 500 and len(edges) <= max(most, 1) + 1 and (np.diff(edges) > 0).all()
    steps = timeline.find_steps(live, edges)
    for n, (begin, end) in enumerate(zip(edges, [*edges[1:], 3000])):
        inside = live[begin:end]
        assert (steps.highest[n], steps.lowest[n]) == (inside.max(), inside.min())
        assert begin <= steps.moments[n] < end
        assert steps.moments[n] == begin + inside.argmax()
    events = np.sort(rng.choice(3000, 200, replace=False))
    values = rng.integers(0, 100, 200)
    found = timeline.Sum(events, values, 50).highest(edges)
    for n, (begin, end) in enumerate(zip(edges, [*edges[1:], 3000])):
        first = [50, *values[events <= begin]][-1]
        assert found[n] == max([first, *values[(events >= begin) & (events < end)]])


def test_stacks_have_a_category_and_a_line() -> None:
    own, layer = "/me/model.py:3 (Net.forward)", f"{TORCH}/nn/modules/linear.py:9 (Linear.forward)"
    weights = f"{TORCH}/nn/modules/module.py:900 (Module._apply)"
    moved = f"{TORCH}/nn/modules/module.py:1355 (Module.to.<locals>.convert)"
    adam, graph = f"{TORCH}/optim/adam.py:8 (Adam.step)", f"{TORCH}/autograd/function.py:5"
    found = [
        category_of(stack)
        for stack in (
            (layer, own), (weights, own), (moved, weights, own), (adam, own), (layer, own, adam), (own,),
            (own, f"{graph} (BackwardCFunction.apply)"), (own, f"{graph} (Function.apply)"),
            (own, f"{TORCH}/utils/data/dataloader.py:7 (fetch)"),
        )
    ]  # fmt: skip
    assert found == [
        "forward", "weights", "weights", "optimizer", "forward", "other", "backward", "other", "data",
    ]  # fmt: skip
    assert set(found) == set(CATEGORIES)
    assert line_of((layer, own, "/me/main.py:1 (main)")) == own
    assert line_of((layer, weights)) == layer


def test_it_says_for_which_memory_the_host_was_held_back(tmp_path: Path) -> None:
    page = Page(box.load_black_box(training().write(tmp_path / "f")))
    (told,) = page.facts["devices"]
    assert page.column(told["held_pending"]).tolist() == [20 * MIB] * 4
    ends, waits = page.column(told["held_time"]), page.column(told["held_us"])
    assert told["held_between"] == pytest.approx([ends[0] - waits[0] / 10**6, ends[-1]])
    for line, stream in (told["held_for"][most] for most in told["held_most"]):
        assert "data.py:44" in page.facts["lines"][line] and stream == "default stream"


def test_old_events_are_before_the_timeline(tmp_path: Path) -> None:
    w = Writer()
    w.lane()
    for n in range(10):
        w.event(box.ALLOC, (n + 1) * MIB, 100)
    w.complete = w.now + 1
    w.event(box.FREE, MIB)
    w.event(box.ALLOC, 20 * MIB, 50)
    page = Page(box.load_black_box(w.write(tmp_path / "f")))
    (told,) = page.facts["devices"]
    assert page.facts["older"] == 10
    assert page.column(told["highest"]).tolist() == [900, 950]
    assert len(page.spans_at(told["blocks"], 0)) == 9


LIMITLESS = 2**64 - 1
FAILED = {
    "site": 1, "device": 0, "requested": 9 * MIB, "device_free": 5 * MIB,
    "device_total": 80 * MIB, "limit": LIMITLESS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ({}, {"line": "mine.py:16 (prefetch)", "limit": None}),
        ({"limit": 40 * MIB}, {"line": "mine.py:16 (prefetch)", "limit": 40 * MIB}),
        ({"limit": 80 * MIB}, {"limit": None}),
        ({"limit": 0}, {"limit": 1}),
        ({"site": 0}, {"line": None, "stack": []}),
        ({"site": 2}, {"line": None, "stack": []}),
        ({"site": 3}, {"line": None, "stack": []}),
        ({"site": "1"}, {"line": None, "stack": []}),
        ({"requested": 8 * MIB}, {"requested": 8 * MIB}),
        ({"requested": 10 * MIB}, None),
        ({"requested": True}, None),
        ({"requested": -1}, None),
        ({"device": 1}, None),
        ({"device_total": 68 * MIB}, None),
    ],
)
def test_the_last_failure_is_told_as_the_file_has_it(
    other: dict[str, Any], wanted: dict[str, Any] | None, tmp_path: Path
) -> None:
    w = Writer()
    stack = (f"{TORCH}/cuda/x.py:1 (empty)", "mine.py:16 (prefetch)", "mine.py:90 (main)")
    w.lane()
    w.event(box.SEGMENT_MAP, 0x7F0000000000, STRETCH)
    w.event(box.ALLOC, 0x7F0000000000, 100, site=w.site(*stack))
    w.event(box.OOM, 5 * MIB, 7 * MIB)
    w.event(box.OOM, 5 * MIB, 9 * MIB)
    w.info = {"torch": "2.11.0", "oom": {**FAILED, **other}}
    page = Page(box.load_black_box(w.write(tmp_path / "f")))
    assert page.facts["info"] == {"torch": "2.11.0"}
    told = page.facts["devices"][0]["last_oom"]
    if wanted is None:
        assert told is None
    else:
        whole = {"line": stack[1], "stack": stack, "requested": 9 * MIB, "reserved": STRETCH}
        assert told == {**whole, "limit": None, **wanted}


@pytest.mark.parametrize("oom", [None, 7, [], "limit"])
def test_a_failure_of_another_form_is_not_told(oom: Any, tmp_path: Path) -> None:
    w = training(steps=1)
    w.info = {"oom": oom}
    page = Page(box.load_black_box(w.write(tmp_path / "f")))
    assert page.facts["info"] == {} and page.facts["devices"][0]["last_oom"] is None


# ---- the page --------------------------------------------------------------------

HOSTILE = "</script><img src=x onerror=document.title='taken'>&amp;"


class Elements(html.parser.HTMLParser):
    """The elements of a page, and the texts of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.texts: dict[str, str] = defaultdict(str)
        self._at = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self._at = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        self.texts[self._at] += data


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    writer = training(steps=2, hostile=HOSTILE)
    writer.why, writer.info = HOSTILE[:60], {"a" + HOSTILE: HOSTILE, "b": [HOSTILE]}
    folder = tmp_path / "<img src=x onerror=1>"
    folder.mkdir()
    recording = box.load_black_box(writer.write(folder / "<script>f"))
    plain = training(steps=2).write(tmp_path / "plain")
    page, other = (Elements(make_page(one)) for one in (recording, box.load_black_box(plain)))
    assert page.seen == other.seen and "img" not in page.seen
    facts = json.loads(page.texts["facts"])
    assert sum(HOSTILE in frame for frame in facts["frames"]) == 4
    assert facts["info"] == writer.info and facts["why"] == writer.why


CHROMIUM = browser()


#: Zooms and chooses moments, reads the picture out, and comes back to the peak.
ACTS = """<script>
const acts = setInterval(() => {
  if (!document.documentElement.dataset.ready) return;
  clearInterval(acts);
  for (const key of ["ArrowLeft", "+", "+", "-", "0", "ArrowRight"])
    document.getElementById("chart").dispatchEvent(new KeyboardEvent("keydown", {key}));
  document.getElementById("in").click();
  const [first, last] = whole(), told = document.documentElement.dataset;
  const at = share => first + share * (last - first);
  told.blank = 0;
  for (let share = 0.01; share < 0.1; share += 0.005) {
    zoom(at(share), at(0.9 + share));
    if (plot.data[0][0] > state.range[0] || plot.data[0].at(-1) < state.range[1]) told.blank++;
  }
  zoom(first, last);
  told.misread = 0;
  plot.data[0].forEach((time, i) => {
    legend(time);
    for (const one of document.querySelectorAll("#legend .entry"))
      if (one.textContent.startsWith("reserved")) told.misread = +told.misread + (one.lastChild.textContent !== bytes(plot.data.at(-4)[i]));
  });
  legend(null);
  told.acted = "true";
}, 50);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("of", ["recording", HOSTILE, "snapshot"])
def test_a_browser_shows_the_peak(of: str, tmp_path: Path) -> None:
    hostile = of == HOSTILE
    writer = training(hostile=of if hostile else "")
    writer.info["oom"] = {
        "site": 2, "device": 0, "requested": 640 * MIB, "device_free": 100 * MIB,
        "device_total": 80 * 2**30, "limit": 3 * 2**30 if hostile else LIMITLESS,
    }  # fmt: skip
    file = writer.write(tmp_path / "file.box")
    shown = file if of != "snapshot" else write(tmp_path / "file.pickle", snapshot_like(file))
    assert main(["view", str(shown)]) == 0
    peak = max(Model(box.load_black_box(file), 0).live)
    html = tmp_path / "file.html"
    html.write_text(html.read_text().replace("</body>", ACTS))
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
         "--dump-dom", html.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    page = Elements(done.stdout)
    assert f"({peak:,} bytes)" in page.texts["state"] and 'data-acted="true"' in done.stdout
    assert 'data-blank="0" data-misread="0"' in done.stdout
    assert page.seen["img"] == 0 and page.seen["canvas"] == 2
    limit = (
        "the process may have 3.00 GiB, of which 1.53 GiB were reserved, and " if hostile else ""
    )
    pieces = "" if hostile else ", and 35.1 MiB were free in segments, the largest piece 20.0 MiB"
    free = f"{limit}100.0 MiB of the device were free{pieces}."
    assert f"640.0 MiB were asked for; {free}" in done.stdout
    assert (", at ada/model.py:40 (Block.forward): 640.0" in done.stdout) == (of == "recording")
    assert ">Out of memory, the end</button>" in done.stdout
    assert "1 segment, 1.69 GiB in all: 1.59 GiB live, 100.2 MiB (5.8%) free" in done.stdout
    assert "<b>Most reserved but not live:</b> 668.8 MiB free at 16.2" in done.stdout
    assert "<b>Grew most:</b> ada/train.py:70 (log_loss), by 141.9 MiB" in done.stdout
    assert ('id="holding" hidden' in done.stdout) == (of == "snapshot")
    assert ("were pending, most of it from ada/data.py:44" in done.stdout) == (of != "snapshot")


# ---- what is refused ----------------------------------------------------------------


def test_refused_files_leave_nothing_behind(
    tmp_path: Path, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    whole = training(steps=1).write(tmp_path / "whole").read_bytes()
    snapshot = snapshot_like(tmp_path / "whole")
    pickle_of = pickle.dumps(snapshot)
    snapshot["device_traces"][0] *= 2
    huge, quiet = Recorder(), Recorder()
    huge.alloc(1 << 41)
    quiet.note()
    zero = Writer()
    zero.event(box.ALLOC, 4096, 0, zero.lane())
    for name, data, words in (
        ("cut", whole[:-40], "cut off"), ("short", whole[:50], "cut off"),
        ("other", b"hello, this is no recording", "neither a memory snapshot nor"),
        ("empty", b"", "the file is empty"), ("cut pickle", pickle_of[:-40], "truncated"),
        ("code", pickle.dumps(main), "asks for 'esper_alloc.cli.main.main'"),
        ("packed", b"\x1f\x8b\x08", "truncated"),
        ("huge", pickle.dumps(snapshot_of(huge)), "more was live at once than any device has"),
        ("no history", pickle.dumps({"segments": [], "device_traces": [[]]}), "no trace in it"),
        ("contradiction", pickle.dumps(snapshot), "contradicts the segments at the end"),
        ("quiet", pickle.dumps(snapshot_of(quiet)), "no events"),
        ("version", whole[:8] + b"\x09" + whole[9:], "another version"),
        ("zero", zero.write(tmp_path / "zero").read_bytes(), "damaged: event 0 is of 0 bytes"),
        ("nothing", Writer().write(tmp_path / "nothing").read_bytes(), "no events"),
    ):  # fmt: skip
        file = tmp_path / f"{name}.box"
        file.write_bytes(data)
        assert main(["view", str(file)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and words in said.err, said.err
    os.mkfifo(tmp_path / "pipe")
    for command in ("view", "replay", "explain"):
        assert main([command, str(tmp_path / "pipe")]) == 2
        assert capsys.readouterr().err.endswith("pipe: is a pipe: save it to a file first\n")
    assert main(["view", str(tmp_path / "missing")]) == 2
    assert main(["view", str(tmp_path / "whole"), "--output", str(tmp_path / "whole")]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert (tmp_path / "whole").read_bytes() == whole
    assert main(["view", str(tmp_path / "whole"), "--output", str(tmp_path / "no" / "p\nage")]) == 1
    assert "p\\nage: cannot be written" in capsys.readouterr().err
    page = tmp_path / "page"
    view_page = ["view", str(tmp_path / "whole"), "--output", str(page)]
    for make in (os.mkfifo, lambda path: path.symlink_to("empty.box")):
        make(page)
        before = page.lstat()
        assert main(view_page) == 1 and page.lstat() == before
        assert "cannot be written: a link, a folder or a device" in capsys.readouterr().err
        page.unlink()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    assert main(view_page) == 130
    assert not [*tmp_path.glob("*.html"), *tmp_path.glob("*.part*")]
