"""What the auditor costs, and what it finds beside torch.cuda._sanitizer.

``--what step``    a step of GPT-2 (train.py's), by turns without an audit and under one, with ours
                   and with native. Goal: 3 times as long at the most
``--what poison``  the same under an audit that also poisons, with ours on classic segments
``--what memory``  the auditor's host memory after a million operators on three streams, over that
                   after 50,000. Goal: 1.1
``--what corpus``  each program of tests/audit/corpus under native: is its bug missed, is a correct
                   program reported? Goal: neither, ever. Programs that use esper_alloc itself are
                   left out, because the sanitizer knows nothing of it

Without ``--what``: all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from common import (
    NATIVE,
    OURS,
    ROOT,
    Case,
    Results,
    Rounds,
    machine,
    nothing_measurable,
    parser,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children
from workloads import import_job

TURNS, STEPS = 7, 5
POISON_TURNS, POISON_STEPS = 3, 2  # a step takes far longer
MOST_TIMES = 3.0  # as long as without an audit
MOST_GROWTH = 1.1
OPERATORS, EARLY = 1_000_000, 50_000
WHATS = ("step", "poison", "memory", "corpus")
PROGRAMS = ROOT / "tests" / "audit" / "programs.py"
SANITIZER = "torch.cuda._sanitizer"

#: Of workloads.py, whose imports are needed.
JOB = {"step": "gpt2", "poison": "gpt2"}

CASES = {
    "step": [Case("step, ours", OURS), Case("step, native", NATIVE)],
    "poison": [Case("poison", OURS, environment={"ESPER_ALLOC_SEGMENTS": "classic"})],
    "memory": [Case("memory", OURS)],
    "corpus": [Case("corpus", NATIVE)],
}


def step_times(step: Callable[[], object], poison: bool) -> dict[str, float]:
    """ms of a step alone and audited: medians over turns."""
    import torch

    import esper_alloc

    turns, steps = (POISON_TURNS, POISON_STEPS) if poison else (TURNS, STEPS)

    def milliseconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / steps

    taken: dict[str, list[float]] = {"alone": [], "audited": []}
    milliseconds()
    for _ in range(turns):
        taken["alone"].append(milliseconds())
        with esper_alloc.audit(poison=poison):
            step()  # its lines are new to the audit
            taken["audited"].append(milliseconds())
    return {name: statistics.median(figures) for name, figures in taken.items()}


def memory_kept(operators: int, early: int) -> dict[str, float]:
    """KiB that the auditor keeps after so many operators, and early on."""
    import torch

    import esper_alloc
    from esper_alloc import _torch

    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = torch.ones(64, device="cuda")
    done, kept = 0, 0
    with esper_alloc.audit():
        while done < operators:
            for stream in streams:
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    y = x + 1
                    for _ in range(20):
                        y = y * 2
                    y.add_(x)
                main.wait_stream(stream)
                x = x.clone()
                done += 23
            if done % 4600 == 0:
                torch.cuda.synchronize()
            if not kept and done >= early:
                kept = _torch.audit_state()[3]
        return {"early": kept / 1024, "late": _torch.audit_state()[3] / 1024}


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


def names() -> list[str]:
    """The programs that both can run."""
    folder = PROGRAMS.parent / "corpus"
    all_names = sorted(str(path.relative_to(folder))[:-3] for path in folder.glob("*/*.py"))
    return [name for name in all_names if not name.startswith("marked/")]


def measure(allocator: str, what: str, small: bool) -> dict[str, Any]:
    """One process."""
    if what == "corpus":
        found = {"audit": corpus(*names()), "sanitizer": corpus("--sanitizer", *names())}
        return {"machine": machine(), "figures": found}
    use_allocator(allocator)
    if what == "memory":
        figures = memory_kept(OPERATORS // 10 if small else OPERATORS, EARLY)
    else:
        from train import gpt2

        figures = step_times(gpt2(small), what == "poison")
    return {"machine": machine(), "figures": figures}


def add_times(results: Results, name: str, rounds: Sequence[Mapping[str, float]]) -> None:
    poisoned = name.endswith("poison")
    results.row(
        name,
        "ms",
        [one["audited"] for one in rounds],
        [one["alone"] for one in rounds],
        "no audit",
        None if poisoned else MOST_TIMES,
    )


def add_corpus(results: Results, audit: Mapping[str, Any], sanitizer: Mapping[str, Any]) -> None:
    """A row for each program: of a bug, 1 if it was missed; else how much was reported. The
    sanitizer knows no kinds, so any report at the bug's line counts for it."""
    totals = {"bugs missed": [0, 0, 0], "correct programs reported": [0, 0, 0]}
    for name, (said, found) in audit.items():
        _, raced = sanitizer[name]
        if said:
            total = "bugs missed"
            ours, peer = int(found != said), int(said[0][1] not in [line for _, line in raced])
        else:
            total = "correct programs reported"
            ours, peer = len(found), len(raced)
        unit = "missed" if said else "reports"
        results.row(f"{unit}: {name}", unit, [ours], [peer], SANITIZER, 0, "ours")
        for i, more in enumerate((1, bool(ours), bool(peer))):
            totals[total][i] += more
    for name, (count, ours, peer) in totals.items():
        results.row(f"{name}, of {count}", "programs", [ours], [peer], SANITIZER, 0, "ours")


def add_rows(results: Results, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """`found`: the figures of each case, a round each."""
    titles = {
        "step, ours": "GPT-2 step, audited",
        "step, native": "GPT-2 step under native, audited",
        "poison": "GPT-2 step, audited with poison",
    }
    for case, title in titles.items():
        if case in found:
            add_times(results, title, found[case])
    if "memory" in found:
        late, early = ([one[name] for one in found["memory"]] for name in ("late", "early"))
        title = f"host memory after {OPERATORS:,} operators"
        results.row(title, "KiB", late, early, f"after {EARLY:,}", MOST_GROWTH)
    if "corpus" in found:
        add_corpus(results, found["corpus"][0]["audit"], found["corpus"][0]["sanitizer"])


def add_rounds(results: Results, cases: Sequence[str], rounds: Rounds) -> None:
    """The rows of these cases. Says which of them is missing."""
    found = {
        name: [one[name]["figures"] for one in rounds if name in one]
        for name in cases
        if any(name in one for one in rounds)
    }
    for name in set(cases) - set(found):
        print(f"{name}: nothing was measured")
        results.complete = False
    add_rows(results, found)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--what", choices=WHATS, action="append", help="only this (repeatable)")
    arguments.add_argument("--small", action="store_true", help="a tiny model: does it run?")
    options = arguments.parse_args()
    whats = options.what or WHATS
    small = ("--small",) if options.small else ()
    if options.worker:
        how = options.worker, whats[0], options.small
        take_turns(
            in_children(
                options.worker, lambda: measure(*how), lambda: import_job(JOB.get(whats[0], ""))
            )
        )
        return 0
    if nothing_measurable():
        return 1
    results = Results("auditor", options.out)
    complete = True
    begin = time.monotonic()
    for what in whats:
        cases = [
            Case(case.name, case.allocator, ("--what", what, *small), case.environment)
            for case in CASES[what]
        ]
        rounds = options.rounds if what in ("step", "poison") else 1
        left = max(options.seconds - (time.monotonic() - begin), 1.0)
        how = {"timeout": 400.0, "seconds": left / 2}
        if not results.of_rounds(
            partial(turns_of_children, __file__, cases, rounds, **how),
            partial(add_rounds, results, [case.name for case in cases]),
            ours=None,
        ):
            print(f"{what}: nothing was measured")
            complete = False
    return 0 if results.run is not None and results.save() and complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
