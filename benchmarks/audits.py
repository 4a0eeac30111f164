"""What the auditor and the fence cost, and what the auditor finds."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import MIB, ROOT
from measuring import machine, use_allocator
from models import gpt2

TURNS, STEPS = 7, 5
PROGRAMS = ROOT / "tests" / "audit" / "programs.py"
WARM_STEPS, TIMED_STEPS = 3, 10  # beside a fence


def step_times(step: Callable[[], object]) -> dict[str, float]:
    """ms of a step alone and audited: medians over turns."""
    import esper_alloc

    def milliseconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / STEPS

    taken: dict[str, list[float]] = {"alone": [], "audited": []}
    milliseconds()
    for _ in range(TURNS):
        taken["alone"].append(milliseconds())
        with esper_alloc.audit():
            step()  # its lines are new to the audit
            taken["audited"].append(milliseconds())
    return {name: statistics.median(figures) for name, figures in taken.items()}


def corpus(*options: str) -> dict[str, Any]:
    """What tests/audit/programs.py prints: {program: [the bug that it names, what was found]}."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS), *options],
        capture_output=True,
        text=True,
        timeout=600,
        env=dict(os.environ),
    )
    if done.returncode:
        raise RuntimeError(f"{PROGRAMS.name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def steps(allocator: str, small: bool = False) -> dict[str, Any]:
    use_allocator(allocator)
    return {"machine": machine(), **step_times(gpt2(small))}


def programs(allocator: str) -> dict[str, Any]:
    """What the auditor finds in the programs of the corpus, and torch.cuda._sanitizer."""
    found = {"audit": corpus("--unmarked"), "sanitizer": corpus("--unmarked", "--sanitizer")}
    return {"machine": machine(), **found}


def fence(allocator: str, kind: str, small: bool = False) -> dict[str, Any]:
    """A step of GPT-2 and what is reserved: kind is no audit, audit or fence."""
    import esper_alloc

    use_allocator(allocator)
    step = gpt2(small)
    context: Any = contextlib.nullcontext()
    if kind != "no audit":
        context = esper_alloc.audit(fence=kind == "fence")
    taken = []
    with context:
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(TIMED_STEPS):
            begin = time.perf_counter()
            step()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
        reserved = torch.cuda.max_memory_reserved() / MIB
    return {"machine": machine(), "step_ms": statistics.median(taken) * 1000, "mib": reserved}
