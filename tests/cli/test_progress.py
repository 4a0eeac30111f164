"""How far a command has come, on a terminal and elsewhere."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from esper_alloc.cli import progress
from esper_alloc.cli.complaint import complain

SHOW = """
import time
from esper_alloc.cli.progress import Progress
bar = Progress(2)
for what in ("first", "second"):
    bar.begin(what)
    time.sleep(0.3)
    bar.end()
bar.close()
print("over")
"""


def shown_on_a_terminal(code: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while some := os.read(ours, 4096):
            text += some
    os.close(ours)
    assert done.returncode == 0 and done.stdout == b"over\n", (done, text)
    return text.decode()


def test_a_bar_on_a_terminal() -> None:
    pytest.importorskip("tqdm")
    text = shown_on_a_terminal(SHOW)
    assert "second" in text and "2/2" in text


def test_without_tqdm_nothing_goes_wrong() -> None:
    assert shown_on_a_terminal("import sys; sys.modules['tqdm'] = None" + SHOW) == ""


def test_elsewhere_only_long_work_prints_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    bar = progress.Progress(3)
    for what, seconds in (("first", 1.0), ("second", 5.0), ("third", 1.0)):
        bar.begin(what)
        bar.end()
        now += seconds
    bar.begin("fourth")
    bar.close()
    assert capsys.readouterr().err == "third\n"


def test_where_stderr_is_closed_nothing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    progress.Progress(1, every_s=0).begin("first")
    assert complain("replay", "why", 2) == 2 and capsys.readouterr().out == ""
