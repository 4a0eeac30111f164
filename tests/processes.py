"""Python in a process of its own, and a browser."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def python(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run() of this Python with its output captured. One that hangs is ended."""
    how = {"capture_output": True, "text": True, "timeout": 3000, **how}
    return subprocess.run([sys.executable, *map(str, command)], **how)


def succeeded(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run() of a command that must succeed, with its output captured. On a slow, busy
    machine the fault loop takes a tenth of the time under ASan."""
    how = {"capture_output": True, "text": True, "timeout": 36_000, **how}
    done = subprocess.run(list(map(str, command)), **how)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"[-8000:]
    return done


def output_of(*command: object, **how: Any) -> str:
    """What this Python printed, which must have succeeded."""
    done = python(*command, **how)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def browser() -> str | None:
    """A Chromium that starts: CI may be about to install one."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    starts = found and not subprocess.run([found, "--version"], capture_output=True).returncode
    return found if starts else None


def run_two_ranks(program: str, **more: str) -> None:
    """Runs a program twice at a time, with its rank and a free port as its arguments. Each must say
    that it is done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), port],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=1200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, process in enumerate(ranks):
        assert process.returncode == 0 and f"rank {rank} done" in said[rank], said[rank][-4000:]
