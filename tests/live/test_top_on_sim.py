"""A running program on the simulated device, watched by ``esper-alloc top``."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from on_sim import build
from processes import python
from pytest import MonkeyPatch

from esper_alloc.live import attached as attaching
from esper_alloc.live.attached import Attached

HEAD = """
import gc, os, sys
import simulated
import esper_alloc, torch

def small():
    return torch.empty(1000, device="cuda")

def large():
    return torch.empty(1 << 20, device="cuda")

def say(*words):
    print(*words, flush=True)

def go_on():
    "Runs what the test says, until it says nothing more."
    say("ready")
    for line in sys.stdin:
        exec(line, globals())
        say("done")
"""


class Program:
    """A running program, which the test tells what to do."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.first = self._until("ready")

    def do(self, code: str) -> list[str]:
        """What a line of code prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        return self._until("done")

    def _until(self, word: str) -> list[str]:
        said: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return said
            said.append(line.strip())
        raise AssertionError(self.process.stderr and self.process.stderr.read()[-3000:])

    def end(self) -> str:
        """Its standard error, when it has ended by itself."""
        said = self.process.communicate(timeout=300)[1]
        assert self.process.returncode == 0, said[-3000:]
        return said


Start = Callable[..., Program]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The folder of sockets, for this process and those that it starts."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"esper_alloc-{os.getuid()}"


@pytest.fixture
def start(library: Path, place: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def started(code: str = "", **env: str) -> Program:
            whole = HEAD + code + "\ngo_on()"
            more = {"ESPER_ALLOC_MONITOR": "1", **env}
            process = subprocess.Popen(
                [sys.executable, "-c", whole],
                env={**os.environ, **build.environment(library), **more},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            return Program(process)

        yield started


def top(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "esper_alloc", "top", *arguments, cwd=build.ROOT, **how)


def lines_of(program: Program) -> dict[str, tuple[int, int]]:
    """Bytes and blocks of each function, as `top --json` has them."""
    done = top(program.pid, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    [device] = json.loads(done.stdout)["devices"]
    return {
        one["line"].rpartition(" (")[2].rstrip(")"): (one["bytes"], one["blocks"])
        for one in device["lines"]
    }


def test_planted_lines_have_their_bytes(start: Start, tmp_path: Path) -> None:
    planted = tmp_path / "torch" / "optim" / "adam.py"
    planted.parent.mkdir(parents=True)
    planted.write_text("import torch\ndef state():\n    return torch.empty(3000, device='cuda')\n")
    program = start(
        f"kept = [small() for _ in range(3)] + [large(), large()]\n"
        f"exec(compile(open({str(planted)!r}).read(), {str(planted)!r}, 'exec'))\n"
        f"moments = [state() for _ in range(2)]\n"
        f"gone = small(); del gone"
    )
    assert lines_of(program) == {
        "small": (3 * 4000, 3), "large": (2 * (4 << 20), 2), "state": (2 * 12000, 2),
    }  # fmt: skip
    said = json.loads(top(program.pid, "--json").stdout)
    assert (said["pid"], said["program"], said["no_lines"]) == (program.pid, "-c", None)
    [device] = said["devices"]
    assert device["categories"] == {"other": 12000 + (8 << 20), "optimizer": 24000}
    told = program.do(
        "say(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(),"
        "torch.cuda.memory_stats()['allocated_bytes.all.peak'])"
    )
    assert told == ["{allocated_bytes} {reserved_bytes} {allocated_peak_bytes}".format(**device)]
    assert (device["mallocs"], device["frees"], device["pending_bytes"]) == (8, 1, 0)
    assert device["device_total_bytes"] - device["device_free_bytes"] >= device["reserved_bytes"]
    first = top(program.pid, "--json", "--lines", 1)
    assert [one["bytes"] for one in json.loads(first.stdout)["devices"][0]["lines"]] == [8 << 20]
    text = " ".join(top("--once").stdout.split())  # there is no other program
    assert f"process {program.pid}: -c device 0 " in text
    assert "8.0 MiB 2 <string>:10 (large)" in text and "23.4 KiB optimizer" in text


@pytest.mark.parametrize("box", ["64MiB", "64KiB"])
def test_what_changes_is_followed(start: Start, monkeypatch: MonkeyPatch, box: str) -> None:
    """Memory that was live before the first look is freed, and a small box is overwritten."""
    monkeypatch.setattr(attaching, "AGAIN_NS", 0)  # else a young program tells all each time
    program = start("old = [small() for _ in range(100)]", ESPER_ALLOC_BLACK_BOX=box)
    attached = Attached(program.pid)
    attached.read()
    program.do("new, side = [], torch.cuda.Stream()")
    for number in range(1, 5):
        program.do("del old[:10]; new += [large() for _ in range(2)]")
        program.do("for _ in range(5000): small()")
        device = attached.read().devices[0]
        found = {name.rpartition(" (")[2]: held for name, held in device.lines.items()}
        assert found == {"small)": (100 - 10 * number) * 4000, "large)": number * (8 << 20)}
        assert sum(device.categories.values()) == sum(found.values())
        assert device.figures["mallocs"] == 100 + 5002 * number
    program.do("simulated.work(side); esper_alloc.record_use(new[0], side); del new[0]")
    reading = attached.read()
    assert reading.devices[0].figures["pending_bytes"] == 4 << 20
    program.do("del new, old; gc.collect()")
    assert not attached.read().devices[0].lines


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 10**9])
def test_threads_come_and_go_between_looks(
    start: Start, monkeypatch: MonkeyPatch, again: int
) -> None:
    monkeypatch.setattr(attaching, "AGAIN_NS", again)
    program = start("""
import threading

def elsewhere(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

kept = []
""")
    attached = Attached(program.pid)
    attached.read()
    for number in range(1, 6):
        program.do("elsewhere(lambda: kept.append(large()))")
        program.do("elsewhere(lambda: [small() for _ in range(3000)])")
        if number > 2:
            program.do("elsewhere(lambda: kept.pop(0))")
        lines = attached.read().devices[0].lines
        assert list(lines.values()) == [(number if number < 3 else 2) * (4 << 20)]


def test_without_a_black_box_there_are_figures_and_a_reason(start: Start) -> None:
    program = start("kept = small()", ESPER_ALLOC_BLACK_BOX="off")
    done = top(program.pid, "--once")
    assert "no lines of code: its black box is off" in done.stdout and "mallocs" in done.stdout
    said = json.loads(top(program.pid, "--json").stdout)
    assert said["no_lines"] == "its black box is off" and not said["devices"][0]["lines"]
    assert said["devices"][0]["mallocs"] == 1


def test_the_socket_is_the_users_own_and_goes_at_the_end(start: Start, place: Path) -> None:
    program = start()
    folder, file = place.stat(), (place / f"{program.pid}.sock").lstat()
    assert (folder.st_mode & 0o777, file.st_mode & 0o777) == (0o700, 0o600)
    assert folder.st_uid == file.st_uid == os.getuid()
    assert program.do("esper_alloc.enable(monitor=False)") == [] and not list(place.iterdir())
    program.do("esper_alloc.enable(monitor=True); esper_alloc.enable(monitor=True)")
    assert [one.name for one in place.iterdir()] == [f"{program.pid}.sock"]
    lines_of(program)
    assert program.end() == "" and not list(place.iterdir())
    assert "cannot be watched: start it with" in top(program.pid).stderr


@pytest.mark.parametrize("long", [True, False])
def test_a_folder_of_others_is_not_used(
    start: Start, tmp_path: Path, monkeypatch: MonkeyPatch, long: bool
) -> None:
    """The next one is, even if its path is too long for the address of a socket."""
    open_to_all, own = tmp_path / "x", tmp_path / ("y" * (150 if long else 1))
    name = f"esper_alloc-{os.getuid()}"
    for one in (open_to_all / name, own):
        one.mkdir(parents=True)
    (open_to_all / name).chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_to_all))
    monkeypatch.setenv("TMPDIR", str(own))
    program = start()
    assert not list((open_to_all / name).iterdir())
    assert [one.name for one in (own / name).iterdir()] == [f"{program.pid}.sock"]
    done = top(program.pid)
    assert done.returncode == 1 and f"{open_to_all / name} belongs to user" in done.stderr
    (open_to_all / name).rmdir()
    assert lines_of(program) == {}
    (own / name / f"{program.pid}.sock").unlink()
    (own / name).chmod(0o750)
    (open_to_all / name).write_text("")
    told = start()
    told.do("")
    assert "`esper-alloc top` cannot watch this process: " in told.end()


@pytest.mark.slow
def test_a_forked_child_has_none_but_can_have_its_own(start: Start, place: Path) -> None:
    program = start()
    code = f"""
def child(code):
    pid = os.fork()
    if pid == 0:
        try:
            exec(code, globals())
        finally:
            import atexit
            atexit._run_exitfuncs()
            os._exit(0)
    os.waitpid(pid, 0)
def names():
    say(*sorted(os.listdir({str(place)!r})))
"""
    forking = start(code)
    mine = f"{forking.pid}.sock"
    before = sorted([mine, f"{program.pid}.sock"])
    assert forking.do("child('names()')") == [" ".join(before)]
    assert sorted(one.name for one in place.iterdir()) == before
    [said] = forking.do("child('say(os.getpid()); esper_alloc.enable(monitor=True); names()')")[1:]
    assert len(said.split()) == 3 and set(before) < set(said.split())
    assert sorted(one.name for one in place.iterdir()) == before
    assert lines_of(forking) == {}


def stale(place: Path, name: str) -> None:
    place.mkdir(mode=0o700, exist_ok=True)
    os.chdir(place)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(name)


def test_what_dead_processes_left_is_removed(
    start: Start, place: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(build.ROOT)  # and back
    stale(place, "1.sock")
    (place / "a file of the user's").write_text("")
    program = start()
    names = {f"{program.pid}.sock", "a file of the user's"}
    assert {one.name for one in place.iterdir()} == names
    stale(place, "1.sock")
    assert f"process {program.pid}" in top("--once").stdout
    assert {one.name for one in place.iterdir()} == names
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()
    assert {one.name for one in place.iterdir()} == names
    done = top(program.pid)
    assert (done.returncode, done.stdout) == (1, "") and "cannot be watched" in done.stderr
    assert {one.name for one in place.iterdir()} == {"a file of the user's"}


def test_hostile_clients_do_no_harm(start: Start, place: Path, monkeypatch: MonkeyPatch) -> None:
    program = start("kept = small()")
    monkeypatch.chdir(place)
    requests = [b"", b"0 1", b"x" * 5000, b"\n", b"-1 1\n", b"0 99999999\n", b"\xff\0 1\n",
                b"9999999999999999999 9999999\n", b"0 1\n0 1\n", b"0 0\n" + b"y" * 100000]  # fmt: skip
    for request in requests:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(300)
            one.connect(f"{program.pid}.sock")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                one.sendall(request)
                if len(request) % 2:  # else it goes away without reading
                    one.shutdown(socket.SHUT_WR)
                    while one.recv(65536):
                        pass
    program.do("import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)")
    for request in (b"0 1\n", b"0 0\n"):
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(f"{program.pid}.sock")
            one.send(request)
    assert lines_of(program) == {"small": (4000, 1)}
    assert program.end() == ""


def test_a_client_that_says_nothing_is_given_up(
    start: Start, place: Path, monkeypatch: MonkeyPatch
) -> None:
    program = start("kept = small()\nimport esper_alloc.live.monitor as m; m.PATIENCE = 0.1")
    monkeypatch.chdir(place)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"{program.pid}.sock")
        assert lines_of(program) == {"small": (4000, 1)}


@pytest.mark.slow
def test_several_programs_are_listed(start: Start, place: Path) -> None:
    nothing = top("--once")
    assert nothing.returncode == 1
    assert "no program of yours can be watched: start it with `run --monitor`" in nothing.stderr
    strange = "import pathlib; sys.argv[0] = pathlib.Path('\\x1b[2Jtrain.py'); kept = large()"
    programs = [start(strange), start()]
    done = top()
    assert done.returncode == 2 and "name one, as in `top PID`" in done.stderr
    listed = {int(line.split()[0]): line for line in done.stdout.splitlines()}
    assert sorted(listed) == sorted(one.pid for one in programs)
    assert "MiB" in listed[programs[0].pid] and listed[programs[0].pid].endswith("\\x1b[2Jtrain.py")


@pytest.mark.parametrize("how", ["the program ends", "Ctrl-C", "silence"])
def test_watching_ends_with_the_program_or_at_ctrl_c(start: Start, how: str) -> None:
    """But not while the program only does not answer."""
    program = start("kept = large()")
    watcher = subprocess.Popen(
        [sys.executable, "-u", "-m", "esper_alloc", "top", str(program.pid)],
        cwd=build.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Jobs in the background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert watcher.stdout is not None
    seen: list[str] = []
    while sum(line.startswith("device 0") or "device 0 " in line for line in seen) < 2:
        seen.append(watcher.stdout.readline())
        assert seen[-1], watcher.communicate()
    if how == "silence":
        program.process.send_signal(signal.SIGSTOP)
        while "does not answer; it is asked again" not in seen[-1]:
            seen.append(watcher.stdout.readline())
            assert seen[-1], watcher.communicate()
        program.process.send_signal(signal.SIGCONT)
    if how == "Ctrl-C":
        watcher.send_signal(signal.SIGINT)
    else:
        program.end()
    rest, errors = watcher.communicate(timeout=300)
    assert (watcher.returncode, errors) == (0, "")
    assert ("has ended" in rest) == (how != "Ctrl-C")
    assert "(large)" in "".join(seen) + rest


@pytest.mark.slow
def test_bad_values_are_refused(start: Start, place: Path) -> None:
    code = """
try:
    esper_alloc.enable(monitor="yes")
except ValueError as error:
    say(error)
    say(os.environ.get("ESPER_ALLOC_MONITOR"))
"""
    program = start(code, ESPER_ALLOC_MONITOR="")
    assert program.first == [
        "monitor='yes' is neither on nor off: use 1 or 0 in ESPER_ALLOC_MONITOR, True or False in Python",
        "",
    ]
    assert not place.exists()
    with pytest.raises(AssertionError, match="ESPER_ALLOC_MONITOR=2 is neither on nor off"):
        start(ESPER_ALLOC_MONITOR="2")
