"""What the auditor and the fence cost, and what the auditor finds."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from typing import Any

import torch
from common import MIB, ROOT
from measuring import machine, median_ms, ms_a_step, use_allocator
from models import gpt2

TURNS, STEPS = 7, 5
PROGRAMS = ROOT / "tests" / "audit" / "programs.py"
WARM_STEPS, TIMED_STEPS = 3, 10  # beside a fence


def corpus(*options: str) -> dict[str, Any]:
    """What tests/audit/programs.py prints: {program: [the bug that it names, what was found]}."""
    command = [sys.executable, str(PROGRAMS), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{PROGRAMS.name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name, (_, reported) in found.items():
        if any(kind == "error" for kind, _ in reported):
            raise RuntimeError(f"{name} failed: {reported}")
    return found


def steps(allocator: str, small: bool = False) -> dict[str, Any]:
    """ms of a step of GPT-2 alone and audited: medians over turns."""
    import esper_alloc

    use_allocator(allocator)
    step = gpt2(small)
    taken: dict[str, list[float]] = {"alone": [], "audited": []}
    ms_a_step(step, STEPS)
    for _ in range(TURNS):
        taken["alone"].append(ms_a_step(step, STEPS))
        with esper_alloc.audit():
            step()  # its lines are new to the audit
            taken["audited"].append(ms_a_step(step, STEPS))
    return {"machine": machine(), **{name: statistics.median(ms) for name, ms in taken.items()}}


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
    with context:
        ms_a_step(step, WARM_STEPS)
        torch.cuda.reset_peak_memory_stats()
        step_ms = median_ms(step, TIMED_STEPS)
        reserved = torch.cuda.max_memory_reserved() / MIB
    return {"machine": machine(), "step_ms": step_ms, "mib": reserved}
