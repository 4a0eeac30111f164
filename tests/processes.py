"""Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def python(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run() of this Python with its output captured. One that hangs is ended."""
    how = {"capture_output": True, "text": True, "timeout": 3000, **how}
    return subprocess.run([sys.executable, *map(str, command)], **how)


def output_of(*command: object, **how: Any) -> str:
    """What this Python printed, which must have succeeded."""
    done = python(*command, **how)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout
