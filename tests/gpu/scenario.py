"""Runs the programs in programs/ in fresh processes and returns what they report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helper import run_python

PROGRAMS = Path(__file__).resolve().parent / "programs"
OURS, NATIVE = "esper_alloc", "native"


def run_program(name: str, *args: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs ``programs/<name>.py args`` and returns the JSON object that it prints last."""
    path = PROGRAMS / f"{name}.py"
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(PROGRAMS)!r})\n"
        f"sys.argv = {[str(path), *args]!r}\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    # Streams share hardware queues when there are more of them than queues.
    full = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **(env or {})}
    printed = run_python(code, env=full).strip().splitlines()
    assert printed, f"{name} printed nothing"
    return json.loads(printed[-1])
