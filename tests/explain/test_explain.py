"""Each cause and each change, on recordings that are written for it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "view"))

from histories import Recorder, snapshot_of, write
from recordings import MIB, TORCH, Heap, Writer, training

from esper_alloc.cli.main import main
from esper_alloc.explain import words
from esper_alloc.explain.explanation import Explanation, explain_file, largest_lines
from esper_alloc.recorder import reading as box

BASE, POOL = 0x7F0000000000, (3, 4)
GIB = 1 << 30
NN = f"{TORCH}/nn/modules/module.py:1773 (Module._call_impl)"
WEIGHTS = (f"{TORCH}/nn/modules/linear.py:106 (Linear.__init__)", "/ada/model.py:2 (make)")
FORWARD = ("/ada/model.py:9 (Net.forward)", NN)
ADAM = f"{TORCH}/optim/adam.py:190 (Adam.step)"
STEP, LOG, ASK = "/ada/train.py:5 (step)", "/ada/train.py:7 (log)", "/ada/a.py:3 (ask)"
PASSING = [(100, STEP)] * 4


class Program:
    """What a program on pages of 2 MiB records until it runs out of memory."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.w = tmp_path / "a.box", Writer()
        self.heap = Heap(self.w, self.w.lane(), BASE, 2 * MIB)
        self.w.why = "out of memory"

    def make(self, mib: int, *stack: str) -> int:
        return self.heap.malloc(mib * MIB, self.w.site(*stack) if stack else 0)

    def weights(self, mib: int = 200) -> None:
        for _ in range(4):
            self.make(mib // 4, *WEIGHTS)

    def pass_by(self, mib: int, line: str = STEP) -> None:
        self.heap.free(self.make(mib, line))

    def steps(self, mib: int, *stack: str, passing: list[tuple[int, str]] = PASSING) -> None:
        """Memory stays from each of eight steps, in which other memory comes and goes."""
        for _ in range(8):
            for size, line in passing:
                self.pass_by(size, line)
            self.make(mib, *stack)

    def quarters(self, lanes: list[int], freed: int) -> None:
        """Classic segments of 20 MiB: of so many a quarter stays."""
        line = self.w.site("/ada/a.py:1 (keep)")
        for number, lane in enumerate(lanes):
            start = BASE + number * 20 * MIB
            self.w.event(box.SEGMENT_ALLOC, start, 20 * MIB, lane)
            for part in range(4):
                self.w.event(box.ALLOC, start + part * 5 * MIB, 5 * MIB, lane, line)
            self.w.segments.append((start, 20 * MIB, 0, 2, self.w.lanes[lane][1], 0, 0))
        for number in range(freed):
            for part in range(1, 4):
                self.w.event(box.FREE, BASE + number * 20 * MIB + part * 5 * MIB)

    def fail(self, mib: int, *stack: str, total: int = GIB, **told: int) -> Explanation:
        """The request fails on a device of so many bytes, of which others have what is neither
        reserved nor told to be free."""
        reserved = self.heap.mapped - self.heap.base
        free = told.get("device_free", total - reserved)
        size = mib * MIB
        self.w.event(box.OOM, free, size if size < 1 << 35 else 1 << 35 | size >> 9)
        site = self.w.site(*stack) if stack else 0
        self.w.info = {
            "oom": {"site": site, "device": 0, "requested": mib * MIB, "device_free": free,
                    "device_total": total, **told}
        }  # fmt: skip
        if self.heap.mapped > self.heap.base:
            self.w.segments.append(self.heap.segment())
        [found] = explain_file(self.w.write(self.path))
        return found


def kinds(found: Explanation) -> list[str]:
    return [one.kind for one in found.helps]


def peak(found: Explanation, kind: str) -> int:
    """MiB."""
    return next(one.outcome.peak for one in found.helps if one.kind == kind) // MIB


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


# ---- causes ----------------------------------------------------------------


def leaking(program: Program, *line: str, backward: bool = False) -> Explanation:
    program.weights()
    passing = PASSING + [(10, "autograd (AddmmBackward0)")] * backward
    program.steps(90, *line, passing=passing)
    return program.fail(200, STEP)


def test_a_list_that_grows(program: Program) -> None:
    found = leaking(program, LOG)
    assert found.causes[0] == "leak" and not found.as_it_was.passes
    assert "train.py:7 (log) keeps 720.0 MiB" in words.cause_in_words(found, "leak")
    assert kinds(found)[0] == "free_each"
    assert peak(found, "free_each") == 200 + 200 + 90  # weights, the request, the last one
    assert not {"uses_end", "allowance"} & {one.kind for one in found.tried}


def test_what_grows_does_not_grow_with_the_batch(program: Program) -> None:
    program.weights()
    program.steps(90, LOG)
    found = program.fail(120, LOG)
    [batch] = [one for one in found.helps if one.kind == "batch"]
    assert batch.what == {"percent": 86, "bytes": 0}  # 104 of 120 MiB


def test_little_that_grows_is_not_the_cause(program: Program) -> None:
    program.weights(880)
    program.steps(8, LOG, passing=[(10, STEP)])
    assert program.fail(100, STEP).causes == ["need"]


def test_without_stacks_no_line_is_named(program: Program) -> None:
    for _ in range(8):
        program.heap.free(program.make(50, STEP))
        program.make(100)
    found = program.fail(300)
    assert found.causes == ["need"] and "absent" not in {one.kind for one in found.tried}


def test_what_forward_keeps_is_no_leak_before_a_backward_pass(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    program = Program(tmp_path / "1")
    for _ in range(8):
        program.heap.free(program.make(100, "/ada/model.py:8 (Net.forward)", NN))
        program.make(90, *FORWARD)
    found = program.fail(400, *FORWARD)
    assert found.causes[0] == "activations" and "leak" not in found.causes
    assert leaking(Program(tmp_path), *FORWARD, backward=True).causes[0] == "leak"


@pytest.mark.parametrize("lost", [False, True])
def test_what_forward_returned_is_kept_where_nothing_runs_backward(
    program: Program, lost: bool
) -> None:
    for step in range(8):
        data = program.make(10, "/ada/eval.py:5 (predict)")
        hidden = program.make(90, *FORWARD)
        program.make(90, *FORWARD)
        program.heap.free(hidden)
        program.heap.free(data)
        if lost and step == 6:
            program.w.now += 1000
            program.w.complete = program.w.now
    found = program.fail(400, *FORWARD)
    assert found.causes[0] == "returned" and "checkpoint" not in {one.kind for one in found.tried}
    said = words.cause_in_words(found, "returned")
    assert said == "the program keeps what forward returned: 720.0 MiB"
    assert kinds(found)[0] == "free_each" and peak(found, "free_each") < 700


def test_input_from_several_lines_is_of_one_forward(program: Program) -> None:
    for number in range(4):
        program.make(50, f"/ada/train.py:{number} (step)")
        program.make(150, *FORWARD)
    assert program.fail(300, *FORWARD).causes[0] == "activations"


def test_what_one_step_collects_is_no_leak(program: Program) -> None:
    """No other memory came and went in between."""
    program.pass_by(100)
    for _ in range(8):
        program.make(90, "/ada/train.py:7 (collect)")
    assert "leak" not in program.fail(400, STEP).causes


@pytest.mark.parametrize("request_mib, first", [(300, "need"), (500, "large")])
def test_weights_that_are_loaded_are_no_leak(
    program: Program, request_mib: int, first: str
) -> None:
    """Each is read in fp32, and cast."""
    for _ in range(9):
        buffer = program.make(180, "/ada/load.py:2 (read)")
        program.make(90, "/ada/load.py:3 (read)")
        program.heap.free(buffer)
    found = program.fail(request_mib, "/ada/load.py:3 (read)")
    assert found.causes == list(dict.fromkeys([first, "need", "growth"]))
    assert "or weights that are being loaded: /ada/load.py:3 (read) keeps 810.0 MiB" in (
        words.cause_in_words(found, "growth")
    )


def test_weights_are_no_leak(program: Program) -> None:
    program.steps(90, *WEIGHTS)
    assert program.fail(400, STEP).causes == ["need"]


def test_a_leak_is_seen_by_the_optimizer_between(program: Program) -> None:
    program.steps(90, LOG, passing=[(10, ADAM)])
    assert program.fail(400, STEP).causes[0] == "leak"


def test_what_was_loaded_at_first_is_no_leak(program: Program) -> None:
    program.steps(90, "/ada/train.py:7 (load)", passing=[(100, STEP)])
    for _ in range(20):
        program.pass_by(100)
    assert "leak" not in program.fail(400, STEP).causes


def test_fragmentation_of_classic_segments(program: Program) -> None:
    program.quarters([program.heap.lane] * 40, freed=40)
    found = program.fail(400, "/ada/a.py:2 (ask)", total=1000 * MIB, device_free=200 * MIB)
    assert found.causes[0] == "fragmentation" and kinds(found)[0] == "segments"
    assert "800.0 MiB are free, but in pieces of at most 200.0 MiB" in words.cause_in_words(
        found, "fragmentation"
    )
    assert peak(found, "segments") == 800  # what was reserved serves


def test_crumbs_are_no_fragmentation(program: Program) -> None:
    """Together with all that is not reserved they would be enough."""
    program.weights()
    crumbs = [program.make(6, "/ada/a.py:1 (crumb)") for _ in range(3)]
    program.heap.free(crumbs[1])
    assert "fragmentation" not in program.fail(410, "/ada/a.py:2 (ask)", total=624 * MIB).causes


def test_few_gaps_that_other_segments_cannot_use_are_no_fragmentation(program: Program) -> None:
    for _ in range(3):
        program.make(300, "/ada/a.py:1 (keep)")
        program.make(10, "/ada/a.py:2 (gap)")
    gaps = [block for block, size in program.heap.live.items() if size == 10 * MIB]
    for block in gaps[:2]:
        program.heap.free(block)
    found = program.fail(26, ASK, device_free=16 * MIB)
    assert found.job.own_gaps == [10 * MIB] * 2
    assert "fragmentation" not in found.causes


def test_free_memory_of_other_streams_is_no_fragmentation(program: Program) -> None:
    side = program.w.lane(stream=0x5A0)
    program.quarters([side] * 20 + [program.heap.lane] * 20, freed=20)
    found = program.fail(150, "/ada/a.py:2 (ask)", total=820 * MIB, device_free=20 * MIB)
    assert found.causes[0] == "streams"
    assert words.cause_in_words(found, "streams") == "300.0 MiB are free, but of other streams"
    assert "300.0 MiB  of these, of other streams" in words.in_words(found)


def waiting(program: Program, over: bool) -> Explanation:
    """Freed memory, in use on another stream, for which other memory stands in."""
    w, side = program.w, program.w.lane(stream=0x5A0)
    for _ in range(4):
        block = program.make(100, "/ada/a.py:1 (copy)")
        w.event(box.USE, block, 0, side)
        size = program.heap.live[block]
        program.heap.free(block)
        w.event(box.PENDING, block)
        program.heap.live[block] = size
        program.make(20, "/ada/a.py:2 (keep)")
    if over:
        for block, size in list(program.heap.live.items()):
            if size == 100 * MIB:
                w.event(box.AVAILABLE, block)
                del program.heap.live[block]
    return program.fail(300, ASK, total=600 * MIB)


def test_memory_in_use_on_another_stream(program: Program) -> None:
    found = waiting(program, over=False)
    assert found.causes[0] == "pending" and "stream 0x5a0" in words.cause_in_words(found, "pending")
    assert "400.0 MiB  freed, in use on other streams, stream 0x5a0" in words.in_words(found)
    assert kinds(found)[0] == "uses_end" and peak(found, "uses_end") == 380


def test_memory_whose_uses_are_over_is_free(program: Program) -> None:
    found = waiting(program, over=True)
    assert found.as_it_was.passes and "pending" not in found.causes


def test_a_pool_that_is_kept(program: Program) -> None:
    w = program.w
    lane = w.lane(pool=POOL)
    w.event(box.SEGMENT_MAP, BASE << 1, 500 * MIB, lane)
    for _ in range(2):
        w.event(box.ALLOC, BASE << 1, 500 * MIB, 1)
        w.event(box.FREE, BASE << 1)
    w.segments.append((BASE << 1, 500 * MIB, 0, 3, 0, *POOL))
    program.weights()
    found = program.fail(600, ASK, device_free=GIB - 700 * MIB)
    assert found.causes[0] == "pool" and kinds(found)[0] == "release_pool"
    assert found.job.segments == "mapped"  # as the pool is
    assert "drop pool (3, 4)" in words.change_in_words(found.job, found.helps[0])
    assert peak(found, "release_pool") == 800


@pytest.mark.parametrize("limit", [GIB, 900 * MIB])
def test_a_pool_without_an_event_in_the_recording_is_taken(program: Program, limit: int) -> None:
    program.w.event(box.SEGMENT_MAP, BASE << 1, 500 * MIB, program.w.lane(pool=POOL))
    program.w.segments.append((BASE << 1, 500 * MIB, 0, 3, 0, *POOL))
    program.weights()
    found = program.fail(600, ASK, device_free=GIB - 700 * MIB, limit=limit)
    assert found.causes[0] == "pool" and not found.as_it_was.passes
    assert kinds(found)[0] == "release_pool" and peak(found, "release_pool") == 800
    assert found.enough.peak == 1300 * MIB
    assert "500.0 MiB  free in pool (3, 4)" in words.in_words(found)


def test_what_a_pool_uses_is_not_kept(program: Program) -> None:
    w = program.w
    w.event(box.SEGMENT_MAP, BASE << 1, 500 * MIB, w.lane(pool=POOL))
    w.event(box.ALLOC, BASE << 1, 499 * MIB, 1)
    w.segments.append((BASE << 1, 500 * MIB, 0, 3, 0, *POOL))
    found = program.fail(600, ASK, device_free=GIB - 500 * MIB)
    assert "release_pool" not in {one.kind for one in found.tried}


def test_a_memory_fraction(program: Program) -> None:
    program.weights()
    found = program.fail(400, ASK, limit=500 * MIB)
    assert found.causes[0] == "fraction"
    assert found.job.segments == "auto"
    [change] = [one for one in found.helps if one.kind == "fraction"]
    assert change.what["percent"] == 59  # 600 of 1024 MiB
    assert change.outcome.peak == 600 * MIB


def test_a_memory_fraction_of_nothing(program: Program) -> None:
    program.weights()
    found = program.fail(400, ASK, limit=0)
    assert found.job.room.capacity == 1 and found.as_it_was.early
    assert "The replay fails earlier" in words.in_words(found)


def test_a_limit_is_inferred_where_the_file_does_not_tell(program: Program) -> None:
    program.weights()
    program.w.event(box.OOM, 800 * MIB, 400 * MIB)
    program.w.segments.append(program.heap.segment())
    said: list[str] = []
    [found] = explain_file(program.w.write(program.path), said.append)
    assert found.job.room.limit == 200 * MIB and not found.as_it_was.passes
    assert said[-1].endswith(f"{len(found.tried)} changes tried")


def test_other_processes(program: Program) -> None:
    program.weights()
    found = program.fail(400, ASK, device_free=300 * MIB)
    assert found.job.room.taken == 524 * MIB and found.causes[0] == "others"
    [change] = [one for one in found.helps if one.kind == "others"]
    assert 100 * MIB <= change.what["bytes"] <= 118 * MIB


def test_little_that_others_hold_is_not_the_cause(program: Program) -> None:
    program.weights()
    found = program.fail(800, ASK, device_free=790 * MIB)
    assert "others" not in found.causes and "others" in kinds(found)


def test_what_cuda_itself_may_hold_is_not_named_first(program: Program) -> None:
    program.weights(600)
    found = program.fail(300, ASK, device_free=GIB - 730 * MIB)
    assert found.job.room.taken == 130 * MIB and found.causes == ["need", "others"]
    said = "Also: other processes, libraries and CUDA itself hold 130.0 MiB"
    assert said in words.in_words(found)


def test_sizes_that_grow(program: Program) -> None:
    program.weights()
    for length in range(1, 7):
        program.pass_by(50 * length, ASK)
    found = program.fail(860, ASK)
    assert found.causes[:2] == ["lengths", "large"] and kinds(found)[0] == "batch"


def test_a_model_that_is_too_large_is_no_growth_of_sizes(program: Program) -> None:
    program.make(200, *FORWARD)
    for size in (50, 60, 70, 80):
        program.make(size, "/ada/load.py:3 (load)")
    found = program.fail(600, "/ada/load.py:3 (load)")
    assert found.causes == ["large", "need"] and "batch" in kinds(found)


def test_weights_of_many_sizes_are_no_growth_of_sizes(program: Program) -> None:
    program.make(600, *FORWARD)
    for size in (50, 60, 70, 80):
        program.heap.free(program.make(size, *WEIGHTS))
    assert "lengths" not in program.fail(450, *WEIGHTS).causes


def test_sizes_that_no_batch_makes_small_enough_do_not_grow(program: Program) -> None:
    for length in range(1, 6):
        program.pass_by(length, ASK)
    program.weights(1000)
    program.make(24, "/ada/a.py:1 (keep)")
    assert program.fail(300, ASK).causes == ["need"]


def test_changes_against_the_first_cause_come_first(program: Program) -> None:
    program.weights()
    program.make(100, *FORWARD)
    program.make(150, *FORWARD)
    found = program.fail(600, ASK)
    assert found.causes[0] == "large" and kinds(found)[:2] == ["batch", "checkpoint"]


def test_little_that_forward_keeps_is_not_the_cause(program: Program) -> None:
    program.weights(600)
    for _ in range(2):
        program.make(100, *FORWARD)
    found = program.fail(300, ASK)
    assert found.causes == ["need"] and "checkpoint" in kinds(found)


def test_sizes_that_were_larger_before_do_not_grow(program: Program) -> None:
    for length in (1, 2, 3, 4, 18):
        program.pass_by(50 * length, ASK)
    program.weights(300)
    assert program.fail(760, ASK).causes[0] == "large"


def test_a_request_that_is_small_is_not_large(program: Program) -> None:
    program.weights(800)
    found = program.fail(226, ASK)
    assert found.causes == ["need"]
    said = "the program needs more than the device has for it: 1,026.0 MiB of 1,024.0 MiB so far"
    assert words.cause_in_words(found, "need") == said


# ---- changes ---------------------------------------------------------------


def test_a_batch_scales_what_goes_with_it(program: Program) -> None:
    """Not weights, nor their gradients, nor what stays."""
    program.weights(400)
    program.make(100, "/ada/a.py:1 (buffer)")
    program.pass_by(10, ASK)
    program.pass_by(5, ADAM)
    program.make(50, ADAM)
    program.make(150, *FORWARD)
    program.make(100, "autograd (MmBackward0)")  # as large as a weight
    found = program.fail(400, ASK)
    [batch] = [one for one in found.helps if one.kind == "batch"]
    assert batch.what == {"percent": 68, "bytes": 150 * MIB}  # 374 of 550 MiB
    assert batch.outcome.peak == (650 + 374) * MIB


def test_checkpointing_takes_as_few_lines_as_it_can(program: Program) -> None:
    for _ in range(7):
        program.make(100, *FORWARD)
        program.make(2, "/ada/model.py:10 (Net.forward)", NN)
    found = program.fail(400, ASK)
    [change] = [one for one in found.helps if one.kind == "checkpoint"]
    assert [found.job.lines[line] for line in change.what["lines"]] == [FORWARD[0]]
    assert change.outcome.peak == (100 + 14 + 400) * MIB


def test_checkpointing_counts_with_the_steps_before(program: Program) -> None:
    """Their memory was freed, later than each next one was made."""
    for _ in range(2):
        for block in [program.make(100, *FORWARD) for _ in range(6)]:
            program.heap.free(block)
    for _ in range(8):
        program.make(100, *FORWARD)
    assert peak(program.fail(300, ASK), "checkpoint") == 400


@pytest.mark.parametrize("asks", ["/ada/a.py:1 (most)", "/ada/a.py:2 (ask)"])
def test_neither_the_requests_line_nor_all_that_is_live_is_left_out(
    program: Program, asks: str
) -> None:
    program.make(500, "/ada/a.py:1 (most)")
    assert "absent" not in {one.kind for one in program.fail(800, asks).tried}


@pytest.mark.parametrize("loading", [False, True])
def test_weights_are_of_no_batch(program: Program, loading: bool) -> None:
    program.make(100, *FORWARD)
    line = ("/ada/load.py:3 (read)",) if loading else WEIGHTS
    program.steps(90, *line, passing=[(100, "/ada/load.py:2 (read)")])
    assert "batch" not in {one.kind for one in program.fail(300, *line).tried}


def test_lines_are_left_out_the_largest_first(program: Program) -> None:
    program.make(500, "/ada/a.py:1 (most)")
    program.make(300, "/ada/a.py:2 (less)")
    program.make(100, "/ada/a.py:3 (least)")
    found = program.fail(400, "/ada/a.py:4 (ask)")
    left_out = [one for one in found.tried if one.kind == "absent"]
    assert [(found.job.lines[one.what["lines"][0]][-6:], one.outcome.peak) for one in left_out] == [
        ("(most)", 800 * MIB), ("(less)", 1000 * MIB), ("least)", 0),
    ]  # fmt: skip
    [batch] = [one for one in found.helps if one.kind == "batch"]
    assert batch.what == {"percent": 31, "bytes": 0}  # the request alone
    assert words.change_in_words(found.job, batch) == "if this request were 124.0 MiB at most"
    text = words.in_words(found, everything=True)
    assert "a.py:3 (least)" in text.partition("do not help")[2]
    assert "do not help" not in words.in_words(found)


def test_the_cache_is_emptied_where_least_is_live(program: Program) -> None:
    """On classic segments a part of the large one would serve a small request, and keep it."""
    w, lane = program.w, program.heap.lane
    for start, size in ((BASE, 600), (BASE + 700 * MIB, 300)):
        w.event(box.SEGMENT_ALLOC, start, size * MIB, lane)
        w.event(box.ALLOC, start, size * MIB, lane, w.site("/ada/a.py:1 (old)"))
        if size == 600:
            w.event(box.FREE, start)
            w.event(box.ALLOC, start, 100 * MIB, lane, w.site("/ada/a.py:2 (new)"))
        w.segments.append((start, size * MIB, 0, 2, 0, 0, 0))
    found = program.fail(590, ASK, total=1000 * MIB, device_free=100 * MIB)
    [change] = [one for one in found.helps if one.kind == "empty_cache"]
    assert change.outcome.peak == 990 * MIB
    assert found.job.lines[change.what["lines"][0]] == "/ada/a.py:2 (new)"


def test_where_nothing_helps_it_says_so(program: Program) -> None:
    found = program.fail(2000, ADAM)
    assert found.causes == ["large", "need"] and not found.helps
    text = words.in_words(found)
    assert "None of the changes that were replayed lets it through." in text
    assert found.enough.peak == 2000 * MIB


def test_a_request_beyond_all_devices_is_explained(program: Program) -> None:
    found = program.fail(1 << 22, ASK)
    assert found.causes == ["large", "need"] and found.enough.peak == 0
    assert "more than the device has for it" in words.cause_in_words(found, "need")


def test_where_the_replay_serves_it_no_change_is_praised(program: Program) -> None:
    """As where the other memory was gone again when the file was written."""
    program.pass_by(100)
    program.heap.live.clear()
    found = program.fail(50, ASK)
    assert found.as_it_was.passes and not found.tried and not found.causes
    assert "the request is served" in words.in_words(found).splitlines()[1]
    assert words.as_json(found)["causes"] == []


@pytest.mark.parametrize("request_mib, served", [(104, False), (64, False), (30, True)])
def test_a_driver_does_not_give_the_last_that_it_calls_free(
    program: Program, request_mib: int, served: bool
) -> None:
    """Of 104 MiB. So the replay serves the request; but if much more was free, others had it."""
    program.weights()
    program.steps(90, LOG)
    found = program.fail(request_mib, STEP)
    assert found.causes[0] == "leak" and found.as_it_was.passes == served
    assert kinds(found)[:1] == ([] if served else ["free_each"])


def test_where_the_replay_serves_it_a_leak_is_told(program: Program) -> None:
    program.steps(90, LOG)
    program.make(100, "/ada/a.py:1 (gone)")
    program.heap.live.clear()
    found = program.fail(100, ASK)
    assert found.as_it_was.passes and found.causes == ["leak"]
    assert "Also: memory grows step after step" in words.in_words(found)


# ---- files -----------------------------------------------------------------


def test_the_last_of_several_failures_is_explained(program: Program) -> None:
    program.weights(800)
    program.w.event(box.OOM, 200 * MIB, 999 * MIB)
    found = program.fail(300, ASK)
    assert found.job.request.size == 300 * MIB and found.job.request.line >= 0
    assert "300.0 MiB were asked for" in words.in_words(found).partition("\n")[0]


def test_what_happened_after_the_failure_does_not_count(program: Program) -> None:
    program.weights(780)
    program.make(20, "/ada/a.py:1 (keep)")
    w = program.w
    w.event(box.OOM, GIB - 800 * MIB, 300 * MIB)
    for block in list(program.heap.live):
        program.heap.free(block)
    program.heap.shrink()
    program.make(700, "/ada/a.py:9 (later)")
    w.segments.append(program.heap.segment())
    [found] = explain_file(w.write(program.path))
    assert not found.as_it_was.passes and found.job.reserved == 800 * MIB
    assert [found.job.lines[line] for line, _, _ in largest_lines(found.job)] == [
        WEIGHTS[1], "/ada/a.py:1 (keep)",
    ]  # fmt: skip
    assert [
        found.job.lines[one.what["lines"][0]] for one in found.helps if one.kind == "absent"
    ] == [WEIGHTS[1]]


def test_a_lost_beginning_is_told(program: Program) -> None:
    program.weights(800)
    program.w.now += 1000
    program.w.complete = program.w.now
    found = program.fail(300, ASK)
    assert found.job.lost_beginning and found.job.lines[int(found.job.line[0])] == WEIGHTS[1]
    assert "The recording's beginning is missing" in words.in_words(found)
    assert not found.as_it_was.passes


def test_hostile_names_are_escaped(program: Program) -> None:
    evil = "/ada/\x1b[31m{lines}\u202e.py:1 (\x07f)"
    program.make(800, evil)
    found = program.fail(300, evil)
    text = words.in_words(found, everything=True)
    assert "\\x1b[31m{lines}\\u202e.py:1 (\\x07f)" in text
    assert all(one.isprintable() for one in text.replace("\n", ""))


@pytest.mark.parametrize(
    "told",
    [
        None, [], {"oom": 5}, {"oom": {"device": 0, "requested": "x"}},
        {"oom": {"device": 0, "requested": 300 * MIB, "device_total": 10**30}},
        {"oom": {"device": 0, "requested": 300 * MIB, "device_total": 5}},
        {"oom": {"device": 0, "requested": 300 * MIB, "device_total": GIB, "site": 999, "limit": 0}},
    ],
)  # fmt: skip
def test_a_hostile_description_is_no_crash(program: Program, told: Any, capsys: Any) -> None:
    program.weights(800)
    program.fail(300, ASK)
    program.w.info = told if told is not None else {}
    program.w.segments = program.w.segments[:1]
    status = main(["explain", str(program.w.write(program.path))])
    said = capsys.readouterr()
    assert (status, bool(said.out)) in ((0, True), (2, False)), said.err


def test_snapshots_of_pytorch_are_explained(tmp_path: Path) -> None:
    recorder = Recorder()
    blocks = [recorder.alloc(5 * MIB) for _ in range(40)]
    for number, block in enumerate(blocks):
        if number % 4:
            recorder.free(block)
    frames = [
        {"filename": "/env/site-packages/torch/x.py", "line": 3, "name": "empty"},
        {"filename": "??", "line": 0, "name": "torch::autograd"},
        {"filename": "/ada/train.py", "line": 7, "name": "step"},
    ]
    for entry in recorder.entries:
        entry["frames"] = frames
    asked = [{**frames[2], "line": 9}]
    recorder.entries.append(
        {"action": "oom", "size": 100 * MIB, "stream": 0, "device_free": 50 * MIB,
         "time_us": recorder.time, "frames": asked}
    )  # fmt: skip
    path = write(tmp_path / "oom.pickle", snapshot_of(recorder), compressed=True)
    [found] = explain_file(path)
    job = found.job
    assert job.lines[job.request.line] == "/ada/train.py:9 (step)"
    assert found.causes[0] == "fragmentation" and kinds(found)[0] == "segments"
    policies = [one.what["segments"] for one in found.tried if one.kind == "segments"]
    assert sorted(policies) == ["classic", "mapped"]
    assert words.as_json(found)["lines"] == [
        {"line": "/ada/train.py:7 (step)", "bytes": 50 * MIB, "blocks": 10}
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"size": "x"}, {"size": -1}, {"size": 1 << 70}, {"device_free": None}, {"stream": []},
        {"frames": [{"filename": 3, "line": 1, "name": "f"}]}, {"frames": [5]}, {"frames": "x"},
        {"frames": [{"filename": "a.py", "line": 1 << 70, "name": "f"}]}, {"device_free": 1 << 60},
    ],
)  # fmt: skip
def test_a_hostile_failure_is_no_crash(changed: dict[str, Any], tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.alloc(30 * MIB)
    recorder.entries.append(
        {"action": "oom", "size": 100 * MIB, "stream": 0, "device_free": 0, "time_us": 1,
         "frames": [], **changed}
    )  # fmt: skip
    path = write(tmp_path / "oom.pickle", snapshot_of(recorder))
    assert main(["explain", path]) == (2 if changed == {"device_free": 1 << 60} else 0)


# ---- the command -----------------------------------------------------------


def test_the_command_says_the_request_and_the_cause_first(program: Program, capsys: Any) -> None:
    leaking(program, LOG)
    assert main(["explain", str(program.path)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    asked = "200.0 MiB were asked for on the default stream at /ada/train.py:5 (step)"
    assert first.endswith(asked)
    assert second.startswith("Cause: memory grows step after step") and "train.py:7" in second
    assert main(["explain", "--json", str(program.path)]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["causes"][0]["kind"] == "leak" and found["memory"]["capacity"] == GIB
    assert found["request"]["bytes"] == 200 * MIB
    [change] = [one for one in found["changes"] if one["kind"] == "free_each"]
    assert change["helps"] and change["peak_reserved"] == 490 * MIB


def test_without_a_failure_or_with_a_bad_file_it_says_so(tmp_path: Path, capsys: Any) -> None:
    whole = training(steps=2)
    whole.chunks[-1][2][-3:] = []  # the failure
    for name, data, status, said in (
        ("fine", whole.write(tmp_path / "fine").read_bytes(), 1, "call _dump_snapshot() where the"),
        ("cut", whole.write(tmp_path / "cut").read_bytes()[:-40], 2, "cut off"),
        ("other", b"hello, this is no recording", 2, "neither a memory snapshot nor"),
    ):
        file = tmp_path / name
        file.write_bytes(data)
        assert main(["explain", str(file)]) == status
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err and name in err
    assert main(["explain", str(tmp_path / "missing")]) == 2
