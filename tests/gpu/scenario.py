"""Runs the programs in programs/ in fresh processes and returns what they report."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from helper import run_python

P, R = ParamSpec("P"), TypeVar("R")

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


def ranks(name: str, allocator: str, *arguments: str, **env: str) -> list[dict[str, Any]]:
    """What each rank of programs/two_ranks.py reports."""
    found: list[dict[str, Any]] = run_program("two_ranks", name, allocator, *arguments, env=env)[
        "ranks"
    ]
    return found


def little_was_lost(found: Mapping[str, Any]) -> bool:
    """Whether a run of device.HeldBack was held back for at most a twentieth of its time. The first
    seconds do not count, nor does one wait as long as those in them."""
    return bool(found["later_lost"] <= 0.05 * found["later_seconds"] + found["first_lost"])


def once(function: Callable[P, R]) -> Callable[P, R]:
    """As functools.cache; and what failed fails again without being run again: a program that
    hangs costs minutes."""

    @functools.cache
    def outcome(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        value, error = outcome(*args, **kwargs)
        if error is not None:
            raise error
        return value

    return run
