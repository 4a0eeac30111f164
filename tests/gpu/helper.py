"""Python code in fresh processes: the allocator is chosen once per process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Variables that would choose or tune an allocator behind a test's back.
FOREIGN = (
    "ESPER_ALLOC",
    "ESPER_ALLOC_SEGMENTS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
)


def run_python(code: str, *, env: Mapping[str, str] | None = None, timeout: float = 300.0) -> str:
    """Runs `code` in a fresh Python and returns what it printed: see run_fresh()."""
    return run_fresh("-c", code, env=env, timeout=timeout)


def text(output: bytes | str | None) -> str:
    """The end of what a process printed until it was stopped."""
    return (output.decode(errors="replace") if isinstance(output, bytes) else output or "")[-5000:]


def run_fresh(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 300.0
) -> str:
    """Runs a fresh Python with these arguments and returns what it printed.

    `env` is added to the environment, from which allocator settings have been
    taken out. A failing process fails the test, with the end of its output.
    """
    full = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    if any((ROOT / "esper_alloc").glob("_core*.so")):  # built in place; else installed
        full["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(ROOT), full.get("PYTHONPATH", "")) if part
        )
    # A pool of compiling processes costs more than the small functions of the tests.
    full.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    full.update(env or {})
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=full,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"no end within {timeout:.0f} s (a hang?)\n{text(error.stdout)}{text(error.stderr)}") from error
    assert done.returncode == 0, (
        f"exit status {done.returncode}\n--- stdout\n{done.stdout[-3000:]}"
        f"\n--- stderr\n{done.stderr[-5000:]}"
    )
    return done.stdout
