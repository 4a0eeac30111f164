"""What ``esper-alloc top`` makes of a process that answers anything."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from esper_alloc.cli.main import main
from esper_alloc.live import monitor, sockets
from esper_alloc.live.attached import AnswerError, Attached, EndedError, watchable

PID = 4194000
ANSWER = {
    **{"pid": PID, "begun": 1, "esper_alloc": "0", "program": "p", "recorded": True, "off": False},
    **{"seconds": 1.5, "devices": {"0": {"mallocs": 5}}},
}
HEADER = struct.pack("<8s2I7Q64s", b"ESPRBOX1", 1, 136, 0, 0, 9, 9, 0, 0, PID, b"whole")
Serve = Callable[..., list[bytes]]


def section(name: bytes, count: int, body: bytes, size: int | None = None) -> bytes:
    head = struct.pack("<4sIQ", name, count, len(body) if size is None else size)
    return head + body + bytes(-len(body) % 8)


def answer(**changed: object) -> bytes:
    return json.dumps({**ANSWER, **changed}).encode() + b"\n"


LANE = section(b"LANE", 2, struct.pack("<i4xQQQqi4xQQQq", -1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
END = section(b"END ", 0, b"")


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Serve]:
    """A process that gives these answers to its watchers, one for each connection, the last one
    again and again."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sockets, "PATIENCE", 60.0)
    listener = socket.socket(socket.AF_UNIX)

    def serving(*answers: bytes) -> list[bytes]:
        folder = sockets.make_folder()
        with sockets.opened(folder) as number:
            listener.bind(sockets.address(number, f"{PID}.sock"))
        listener.listen()
        asked: list[bytes] = []

        def run() -> None:
            for count in range(1000):
                try:
                    connection, _ = listener.accept()
                    with connection:
                        asked.append(connection.recv(64))
                        connection.sendall(answers[min(count, len(answers) - 1)])
                        connection.shutdown(socket.SHUT_WR)
                        connection.recv(1)
                except OSError:
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=run, daemon=True).start()
        return asked

    yield serving
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


CUT, ODD = "does not finish its answers", "its answer cannot be understood: "


@pytest.mark.parametrize(
    "said, why",
    [
        (b"", CUT),
        (b"{}\n", ODD),
        (b"[]\n", ODD),
        (b"7\n", ODD),
        (b"\xff\xfe\n", ODD),
        (b"[" * 100_000 + b"\n", ODD),
        (b"x" * (1 << 20), ODD + "it is too long"),
        (answer(recorded=False, devices=[]), ODD + "it has another form"),
        (answer(recorded=False, devices={"0": 5}), ODD),
        (answer(recorded=False, devices={"zero": {}}), ODD),
        (
            answer(recorded=False, devices={"0": {"mallocs": "many"}}),
            ODD + "it has something else than a number",
        ),
        (
            answer(recorded=False, devices={"0": {"mallocs": float("nan")}}),
            ODD + "it has something else",
        ),
        (answer(recorded=False, devices={"0": {"mallocs": True}}), ODD + "it has something else"),
        (answer(recorded=False, seconds=None), ODD + "it has something else"),
        (answer(recorded=False, seconds=10**400), ODD),
        (answer(), CUT),
        (answer()[:-1], CUT),
        (answer() + HEADER[:100], CUT),
        (answer() + HEADER, CUT),
        (answer() + bytes(136) + LANE + END, ODD + "it is no recording of esper_alloc"),
        (answer() + HEADER + LANE + section(b"LANE", 1, b"123") + END, ODD),
        (answer() + HEADER + LANE + section(b"EVNT", 1, bytes(8)) + END, ODD + "it is damaged"),
        (answer() + HEADER + LANE + section(b"EVNT", 1, b"", 1 << 62), ODD + "it is too long"),
        (answer() + HEADER + LANE + section(b"EVNT", 1, b"", 1 << 30), CUT),
        (answer() + HEADER + LANE + section(b"SITE", 1 << 20, b""), ODD + "it has too many places"),
        (answer() + HEADER + LANE + section(b"SITE", 3, b"123") + END, ODD),
        (answer() + HEADER + LANE + section(b"LIVE", 2, bytes(32)) + END, ODD),
        (answer() + HEADER + LANE + section(b"LATE", 0, b"") + END, CUT),
    ],
    ids=range(28),
)
def test_an_answer_without_sense_is_one_line(
    serve: Serve, said: bytes, why: str, capsys: CaptureFixture[str]
) -> None:
    serve(said)
    with pytest.raises(AnswerError, match=f"process {PID}:? {why}"):
        Attached(PID).read()
    assert main(["top", str(PID), "--once"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"esper_alloc top: process {PID}")
    assert error.count("\n") == 1 and len(error) < 300
    assert main(["top"]) == 1 and main(["top", "--json"]) == 1


def test_names_are_printed_as_they_are_written(serve: Serve, capsys: CaptureFixture[str]) -> None:
    name = b"\x1b[31m[bold]a\r.py\0:1 (f)"
    live = section(b"LIVE", 1, struct.pack("<QQQII", 512, 7, 3, 1, 1))
    site = section(b"SITE", 1, struct.pack("<I", len(name)) + name)
    serve(answer(program="\x1b]0;x\x07") + HEADER + LANE + live + site + END)
    assert main(["top", str(PID), "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out
    assert "7 B               1  \\x1b[31m[bold]a\\r.py\\x00:1 (f)" in out
    assert f"process {PID}: \\x1b]0;x\\x07" in out


def test_what_comes_late_is_asked_for_again(serve: Serve) -> None:
    live = section(b"LIVE", 1, struct.pack("<QQQII", 512, 7, 3, 1, 0))
    late = answer() + HEADER + LANE + live + section(b"LATE", 0, b"") + END
    asked = serve(answer() + HEADER, late, answer() + HEADER + LANE + live + END, b"")
    attached = Attached(PID)
    assert list(attached.read().devices[0].lines.values()) == [7]
    assert asked[:3] == [b"0 1\n"] * 3


def test_another_process_of_that_number_is_a_new_one(serve: Serve) -> None:
    live = section(b"LIVE", 1, struct.pack("<QQQII", 512, 7, 3, 1, 1))
    site = section(b"SITE", 1, struct.pack("<I", 1) + b"x")
    news = HEADER.replace(b"whole", b"since")
    asked = serve(
        answer() + HEADER + LANE + live + site + END,
        answer(begun=2) + news + LANE + END,
        answer(begun=2) + HEADER + LANE + END,
    )
    attached = Attached(PID)
    assert list(attached.read().devices[0].lines) == ["x"]
    assert not attached.read().devices[0].lines
    assert asked == [b"0 1\n", b"0 2\n", b"0 1\n"]


def test_a_process_that_says_nothing_is_given_up(serve: Serve, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PATIENCE", 0.1)
    folder = sockets.make_folder()
    with socket.socket(socket.AF_UNIX) as silent, sockets.opened(folder) as number:
        silent.bind(sockets.address(number, f"{PID}.sock"))
        silent.listen()
        with pytest.raises(AnswerError, match=f"process {PID} does not answer"):
            Attached(PID).read()
    with pytest.raises(EndedError):
        Attached(PID).read()
    assert not os.listdir(folder)


def test_a_folder_that_somebody_else_made_hides_no_program(
    serve: Serve, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    serve(answer() + HEADER + LANE + END)
    place, bad = sockets.folders()[0], tmp_path / "bad"
    bad.mkdir(mode=0o755)
    monkeypatch.setattr("esper_alloc.live.attached.folders", lambda: [place, str(bad)])
    assert watchable() == [PID]
    monkeypatch.setattr("esper_alloc.live.attached.folders", lambda: [str(bad)])
    with pytest.raises(AnswerError, match="remove it"):
        watchable()


def test_other_users_are_not_trusted(
    serve: Serve, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    serve(answer() + HEADER + LANE + END)
    Attached(PID).read()
    place, mine = sockets.folders()[0], os.getuid()
    monkeypatch.setattr("esper_alloc.live.attached.folders", lambda: [place])
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(AnswerError, match="must be yours, with the mode 700: remove it"):
        Attached(PID).read()
    with pytest.raises(PermissionError, match=f"belongs to user {mine}"):
        number = os.open(place, os.O_RDONLY)
        try:
            sockets.connect(number, f"{PID}.sock")
        finally:
            os.close(number)
    monkeypatch.undo()
    link = tmp_path / "link"
    link.symlink_to(place)
    with pytest.raises(OSError), sockets.opened(str(link)):
        pass


def test_a_monitor_ends_where_its_socket_is_gone(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monitor.open_monitor()
    time.sleep(0.3)  # until the thread waits for a watcher
    [thread] = [one for one in threading.enumerate() if one.name == "esper_alloc monitor"]
    os.unlink(monitor._path)
    monitor.close_monitor()
    thread.join(10)
    assert not thread.is_alive()
