"""What PyTorch's programs leave in the black box, on the simulated device."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from on_sim import build

from esper_alloc.recorder import reading
from esper_alloc.recorder.reading import BlackBox, load_black_box
from esper_alloc.replay.replay import load_recordings, replay

HEAD = """
import os, signal, sys
import simulated
import esper_alloc, torch

def inner(count):
    return torch.empty(count, device="cuda")

def outer(count):
    return inner(count)
"""


def run(library: Path, code: str, status: int = 0, **env: str) -> str:
    done = build.program(HEAD + code, {**os.environ, **build.environment(library), **env})
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout


def of_kind(found: BlackBox, kind: int) -> list[int]:
    return [index for index, one in enumerate(found.kinds) if one == kind]


def functions(frames: Sequence[str]) -> list[str]:
    return [frame.rpartition(" (")[2].rstrip(")") for frame in frames]


def test_a_program_writes_what_it_allocated_and_where(library: Path, tmp_path: Path) -> None:
    code = """
kept = [outer(1000 * number) for number in (1, 2)]
side = torch.cuda.Stream()
gone = outer(3000)
esper_alloc.record_use(gone, side)
simulated.work(side)
esper_alloc.record_use(gone, side)
del gone
esper_alloc.black_box(os.environ["FILE"])
print(kept[0].data_ptr(), kept[1].data_ptr(), side.cuda_stream, torch.cuda.memory_reserved())
"""
    file = tmp_path / "program.box"
    first, second, side, reserved = map(int, run(library, code, FILE=str(file)).split())
    found = load_black_box(file)
    assert (found.why, found.lost) == ("asked for", 0)
    assert found.info["torch"] and found.devices == [0]
    allocs = of_kind(found, reading.ALLOC)[-3:]
    assert [found.sizes[index] for index in allocs] == [4000, 8000, 12000]
    assert [found.addresses[index] for index in allocs[:2]] == [first, second]
    assert found.lanes[found.lane_numbers[allocs[0]]].stream == 0
    for index in allocs:
        assert functions(found.sites[found.site_numbers[index]])[:2] == ["inner", "outer"]
    [free] = [index for index in of_kind(found, reading.FREE) if found.sizes[index] == 12000]
    assert found.partners[free] == allocs[2] and found.partners[allocs[2]] == free
    assert found.partners[allocs[0]] == -1
    use = of_kind(found, reading.USE)[0]
    assert found.lanes[found.lane_numbers[use]].stream == side
    assert found.partners[use] == allocs[2]
    [pending] = of_kind(found, reading.PENDING)
    assert free < pending and found.partners[pending] == allocs[2]
    grown = [*of_kind(found, reading.SEGMENT_ALLOC), *of_kind(found, reading.SEGMENT_MAP)]
    assert sum(found.sizes[index] for index in grown) == reserved
    assert sum(one.size for one in found.segments) == reserved
    live = {(one.address, one.requested) for one in found.blocks if not one.pending}
    assert live >= {(first, 4000), (second, 8000)}
    assert all(found.begin <= time <= found.end for time in found.times)


def test_out_of_memory_names_the_file(library: Path, tmp_path: Path) -> None:
    code = """
kept = outer(1 << 20)
try:
    outer(1 << 40)
except torch.OutOfMemoryError as error:
    print(error)
"""
    said = run(library, code, TMPDIR=str(tmp_path), LOCAL_RANK="3")
    [file] = tmp_path.glob("*.box")
    assert file.name == f"esper_alloc-oom-{os.getuid()}-3.box" and str(file) in said
    assert file.stat().st_mode & 0o777 == 0o600
    found = load_black_box(file)
    assert found.why == "out of memory"
    [index] = of_kind(found, reading.OOM)
    assert found.sizes[index] >= 4 << 40
    assert 4 << 20 in [found.sizes[index] for index in of_kind(found, reading.ALLOC)]
    told = found.info["oom"]
    assert functions(found.sites[told.pop("site")])[:2] == ["inner", "outer"]
    assert told.pop("limit") >= 1 << 63  # none
    assert told.pop("device_free") // 512 * 512 == found.addresses[index]
    assert told == {"device": 0, "requested": 4 << 40, "device_total": 1 << 30}
    assert f"`python -m esper_alloc explain {file}`" in said


def test_the_end_and_signals_write_the_file_of_run(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.box"
    variables = {"ESPER_ALLOC_RECORD": str(file), "ESPER_ALLOC_RECORD_PID": ""}
    run(library, "kept = outer(1000)", **variables)
    assert load_black_box(file).why == "exit"
    file.unlink()
    code = """
kept = outer(1000)
os.kill(os.getpid(), signal.SIGUSR2)
print(os.path.exists(os.environ["ESPER_ALLOC_RECORD"]))
os._exit(0)
"""
    assert run(library, code, **variables) == "True\n"
    found = load_black_box(file)
    assert found.why == f"signal {signal.SIGUSR2.value}" and not found.segments
    assert 4000 in [found.sizes[index] for index in of_kind(found, reading.ALLOC)]
    for number in ("SIGSEGV", "SIGABRT"):
        died = f"kept = outer(1000)\nos.kill(os.getpid(), signal.{number})"
        run(library, died, -getattr(signal, number), **variables, RANK="2")
        found = load_black_box(tmp_path / "job-rank2.box")
        assert found.why == f"signal {getattr(signal, number).value}"


def test_off_is_off(library: Path, tmp_path: Path) -> None:
    code = """
kept = outer(1000)
try:
    esper_alloc.black_box("x.box")
except RuntimeError as error:
    print(error)
try:
    outer(1 << 40)
except torch.OutOfMemoryError as error:
    print(".box" in str(error), end="")
"""
    said = run(library, code, ESPER_ALLOC_BLACK_BOX="off", TMPDIR=str(tmp_path))
    assert "its black box is off" in said and said.endswith("False")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(
    library: Path, tmp_path: Path
) -> None:
    code = """
kept = outer(1000)
esper_alloc.black_box(os.environ["FILE"])
for name in (os.environ["FILE"] + "/x", os.path.dirname(os.environ["FILE"]), "/x" * 3000):
    try:
        esper_alloc.black_box(name)
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
    file = tmp_path / "kept.box"
    said = run(library, code, FILE=str(file)).splitlines()
    assert [line.split()[0] for line in said] == [
        "NotADirectoryError",
        "IsADirectoryError",
        "OSError",
    ]
    assert load_black_box(file).why == "asked for" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "it is no recording of esper_alloc"),
        (b"PK\3\4 and so on" * 20, "it is no recording of esper_alloc"),
        (b"ESPRBOX1", "it is cut off: its end is missing"),
        (b"ESPRBOX1" + bytes([9] + 200 * [0]), "it was written by another version of esper_alloc"),
    ],
)
def test_other_files_are_refused(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "a\nfile"
    file.write_bytes(content)
    with pytest.raises(reading.BlackBoxError) as caught:
        load_black_box(file)
    said = str(caught.value)
    assert f"a\\nfile: {why}" in said and "\n" not in said
    with pytest.raises(reading.BlackBoxError, match="cannot be read: No such file"):
        load_black_box(tmp_path / "nothing")


def test_what_was_lost_is_told(library: Path, tmp_path: Path) -> None:
    """A small box: old events are overwritten, and what is live stays."""
    code = """
kept = outer(1000)
for _ in range(20000):
    inner(2000)
esper_alloc.black_box(os.environ["FILE"])
"""
    file = tmp_path / "small.box"
    run(library, code, FILE=str(file), ESPER_ALLOC_BLACK_BOX="128KiB")
    found = load_black_box(file)
    assert len(found) < 12000 and found.complete > found.begin
    live = [index for index in of_kind(found, reading.ALLOC) if found.partners[index] < 0]
    old = next(index for index in live if found.sizes[index] == 4000)
    assert found.times[old] < found.complete
    assert functions(found.sites[found.site_numbers[old]])[:2] == ["inner", "outer"]


PROGRAM = """
import random
random.seed(3)
side = torch.cuda.Stream()
kept = []
for number in range(3000):
    x = inner(random.choice((300, 70000, 900000)))
    if random.random() < 0.2:
        simulated.work(side)
        esper_alloc.record_use(x, side)
    if random.random() < 0.3:
        kept.append(x)
    if len(kept) > 20:
        kept.pop(random.randrange(len(kept)))
    if number % 97 == 0:
        simulated.time_passes()
del x
stats = torch.cuda.memory_stats()
print(stats["allocated_bytes.all.peak"], stats["active_bytes.all.peak"])
esper_alloc.black_box(os.environ["FILE"])
"""


@pytest.mark.parametrize("box, maps", [("64MiB", ""), ("64MiB", "1"), ("128KiB", "1")])
def test_a_file_can_be_replayed(library: Path, tmp_path: Path, box: str, maps: str) -> None:
    file = tmp_path / "job.box"
    mapped = {"SIM_MAPS_PAGES": maps} if maps else {}
    code = PROGRAM.replace("3000", "12000") if box == "128KiB" else PROGRAM
    said = run(library, code, FILE=str(file), ESPER_ALLOC_BLACK_BOX=box, **mapped)
    peaks = [int(number) for number in said.split()]
    [one] = load_recordings(file)
    assert one.history.allocations > 1000
    if box == "64MiB":
        assert not one.history.start
        assert abs(one.recorded.peak_active - peaks[1]) < 100 * 512
    else:
        assert one.history.start
    assert replay(one).peak_allocated == one.recorded.peak_allocated


def test_autograds_threads_are_named_by_their_nodes(library: Path, tmp_path: Path) -> None:
    code = """
x = inner(2000).view(2, 1000).requires_grad_()
x[0].backward(inner(1000))
esper_alloc.black_box(os.environ["FILE"])
"""
    file = tmp_path / "backward.box"
    run(library, code, FILE=str(file))
    found = load_black_box(file)
    last = of_kind(found, reading.ALLOC)[-1]
    assert found.sizes[last] == 8000 and found.sites[found.site_numbers[last]] == (
        "autograd (SelectBackward0)",
    )


def test_functions_in_python_are_told_apart(library: Path, tmp_path: Path) -> None:
    code = """
def function(name):
    forward = staticmethod(lambda context, x: (x.view_as(x), x.clone()))
    backward = staticmethod(lambda context, gradient, zeros: gradient)
    return type(name, (torch.autograd.Function,), {"forward": forward, "backward": backward})


x = inner(10).requires_grad_()
for name in ("First", "Second"):
    function(name).apply(x)[0].backward(inner(10))  # zeros stand for the other gradient
esper_alloc.black_box(os.environ["FILE"])
"""
    file = tmp_path / "functions.box"
    run(library, code, FILE=str(file))
    found = load_black_box(file)
    lines = {found.sites[number] for number in found.site_numbers}
    assert {("autograd (FirstBackward)",), ("autograd (SecondBackward)",)} <= lines


def test_a_folder_for_temporary_files_is_not_needed(library: Path, tmp_path: Path) -> None:
    code = """
kept = outer(1000)
esper_alloc.black_box(os.environ["FILE"])
try:
    outer(1 << 40)
except torch.OutOfMemoryError as error:
    print(".box" in str(error), end="")
"""
    file = tmp_path / "a.box"
    head = "import tempfile\ntempfile.tempdir = '/' + 'x' * 5000\n"
    done = build.program(
        head + HEAD + code, {**os.environ, **build.environment(library), "FILE": str(file)}
    )
    assert (done.returncode, done.stdout) == (0, "False"), done.stderr
    assert load_black_box(file)


def test_a_file_without_lanes_is_damaged(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.box"
    run(library, "kept = outer(1000)\nesper_alloc.black_box(os.environ['FILE'])", FILE=str(file))
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"LANE", b"NONE"))
    with pytest.raises(reading.BlackBoxError, match="damaged"):
        load_black_box(file)
    file.write_bytes(whole.replace(b'{"esper', b"[" * 7))
    with pytest.raises(reading.BlackBoxError):
        load_black_box(file)
