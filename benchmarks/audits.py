"""What the auditor and the fence cost, and what the auditor finds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

import torch
from common import MIB, ROOT
from measuring import machine, ms_a_step, use_allocator
from models import gpt2

TURNS, STEPS = 7, 5
PROGRAMS = ROOT / "tests" / "audit" / "programs.py"


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


def steps(allocator: str, fence: bool = False, small: bool = False) -> dict[str, Any]:
    """ms of a step of GPT-2 alone and audited: medians over turns; and the MiB reserved."""
    import esper_alloc

    use_allocator(allocator)
    step = gpt2(small)
    ms_a_step(step, STEPS)
    alone_mib = torch.cuda.max_memory_reserved() / MIB
    taken: dict[str, list[float]] = {"alone": [], "audited": []}
    for _ in range(TURNS):
        taken["alone"].append(ms_a_step(step, STEPS))
        with esper_alloc.audit(fence=fence):
            step()  # its lines are new to the audit
            taken["audited"].append(ms_a_step(step, STEPS))
    return {
        "machine": machine(),
        **{name: statistics.median(ms) for name, ms in taken.items()},
        "alone_mib": alone_mib,
        "audited_mib": torch.cuda.max_memory_reserved() / MIB,
    }


def programs(allocator: str) -> dict[str, Any]:
    """What the auditor finds in the programs of the corpus, and torch.cuda._sanitizer."""
    found = {"audit": corpus("--unmarked"), "sanitizer": corpus("--unmarked", "--sanitizer")}
    return {"machine": machine(), **found}
