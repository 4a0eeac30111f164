"""`esper-alloc view`: its numbers against a simple model, its page, and the files that it refuses."""

from __future__ import annotations

import html.parser
import json
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from recordings import MIB, TORCH, Writer, training

np = pytest.importorskip("numpy")

from esper_alloc.cli.main import main  # noqa: E402
from esper_alloc.recorder import reading as box  # noqa: E402
from esper_alloc.view import content, timeline  # noqa: E402
from esper_alloc.view.page import make_page  # noqa: E402
from esper_alloc.view.places import CATEGORIES, category_of, line_of  # noqa: E402
from esper_alloc.view.segments import lanes_around  # noqa: E402
from esper_alloc.view.spans import Spans  # noqa: E402

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
    mapped = {base: n % 3 == 0 for n, (base, _, _) in enumerate(stretches)}
    live: dict[int, int] = {}
    waiting: set[int] = set()
    for _ in range(events):
        base, segment_lane, lanes = rng.choice(stretches)
        address = base + rng.randrange(8) * 8 * MIB
        used = any(base <= one < base + STRETCH for one in (*live, *waiting))
        if not mapped[base]:
            for half in (0, 1):
                w.event(box.SEGMENT_MAP, base + half * STRETCH // 2, STRETCH // 2, segment_lane)
            mapped[base] = True
        elif not used and rng.random() < 0.4:
            w.event(box.SEGMENT_UNMAP, base, STRETCH, segment_lane)
            mapped[base] = False
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
    for base, lane, _ in stretches:
        device, stream, pool, _before = w.lanes[lane]
        if mapped[base]:
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


def seconds_to_event(recording: box.BlackBox) -> dict[float, int]:
    times = [(time - recording.begin) / 10**9 for time in recording.times]
    assert len(set(times)) == len(times)
    return {time: i for i, time in enumerate(times)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [20, 10**6])
def test_every_number_is_the_models(
    seed: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        assert page.column(told["moment_live"]).tolist() == [model.live[i] for i in moments]
        assert {event_of[time] for time in page.column(told["oom_time"])} <= set(moments)
        for moment in range(0, len(moments), max(1, len(moments) // 40)):
            event = moments[moment]
            by_line: Counter[str] = Counter()
            for _, size, place, _ in page.spans_at(told["blocks"], moment):
                by_line[page.facts["lines"][page.facts["line"][place]]] += size
            wanted: Counter[str] = Counter()
            for site, size in model.states[event].items():
                wanted[recording.sites[site][0] if site else "(no"] += size
            unknown = [line for line in by_line if line.startswith("(no")]
            by_line["(no"] = sum(by_line.pop(line) for line in unknown)
            assert +by_line == wanted
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


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_of_the_piece_around_it(seed: int) -> None:
    rng, there, rows = random.Random(seed), {(0, 40): -1}, []
    for event in range(60):
        begin = rng.randrange(60)
        end = begin + rng.choice((1, 2, 5, 40))
        for one in [one for one in there if one[0] < end and begin < one[1]]:
            rows.append((there.pop(one), event, *one))
        if event % 3:
            there[begin, end] = event
    rows += [(since, 60, *one) for one, since in there.items()]
    begins, ends, first, last = np.array(rows).T
    pieces = Spans(begins, ends, first, last - first, begins * 0, np.arange(len(rows)))
    asked = np.array([(address, event) for address in range(-1, 102) for event in range(60)])
    for (address, event), lane in zip(asked.tolist(), lanes_around(pieces, *asked.T)):
        around = (first <= address) & (address < last) & (begins <= event) & (event < ends)
        assert [lane] == (np.flatnonzero(around).tolist() or [-1])


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


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("hostile", ["", HOSTILE])
def test_a_browser_shows_the_peak(hostile: str, tmp_path: Path) -> None:
    file = training(hostile=hostile).write(tmp_path / "file.box")
    assert main(["view", str(file)]) == 0
    peak = max(Model(box.load_black_box(file), 0).live)
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
         "--dump-dom", (tmp_path / "file.html").as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    page = Elements(done.stdout)
    assert f"({peak:,} bytes)" in page.texts["state"] and 'data-ready="true"' in done.stdout
    assert page.seen["img"] == 0 and page.seen["canvas"] == 2


# ---- what is refused ----------------------------------------------------------------


def test_refused_files_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = training(steps=1).write(tmp_path / "whole").read_bytes()
    for name, data, words in (
        ("cut", whole[:-40], "cut off"), ("short", whole[:50], "cut off"),
        ("other", b"hello, this is no recording", "no recording"), ("empty", b"", "no recording"),
        ("pickle", b"\x80\x04K\x01.", "`replay`"), ("packed", b"\x1f\x8b\x08", "`replay`"),
        ("version", whole[:8] + b"\x09" + whole[9:], "another version"),
        ("nothing", Writer().write(tmp_path / "nothing").read_bytes(), "no events"),
    ):  # fmt: skip
        file = tmp_path / f"{name}.box"
        file.write_bytes(data)
        assert main(["view", str(file)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and words in said.err, said.err
    assert main(["view", str(tmp_path / "missing")]) == 2
    assert main(["view", str(tmp_path / "whole"), "--output", str(tmp_path / "whole")]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert (tmp_path / "whole").read_bytes() == whole
    assert main(["view", str(tmp_path / "whole"), "--output", str(tmp_path / "no" / "page")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert not [*tmp_path.glob("*.html"), *tmp_path.glob("*.part")]


def test_without_numpy_one_line_says_so(tmp_path: Path) -> None:
    file = training(steps=1).write(tmp_path / "file")
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from esper_alloc.cli.main import main; sys.exit(main(['view', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "esper_alloc view: needs numpy: python -m pip install numpy\n"
