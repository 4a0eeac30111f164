#!/usr/bin/env python3
"""Runs a benchmark and writes the rows that it gives to its result file.

    python benchmarks/run.py --list                    # the topics
    python benchmarks/run.py pipeline --list           # what a topic measures, and its parts
    python benchmarks/run.py pipeline                  # all parts
    python benchmarks/run.py jobs --part moe --seconds 60 --out moe.json
    python benchmarks/run.py sleep --set gib=4 --out sleep.json     # another setting
    python benchmarks/run.py pipeline --case 'native, recipe' --case 'esper_alloc, record_use'

The cases of a part take turns. No round begins after --seconds, of which each part has its share,
and rows are written after each round. topics.py says what is measured.

Exit status: 0 all fine, 1 a goal was missed or something was not measured, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    FRESH,
    OURS,
    ROOT,
    STAYS,
    Case,
    Options,
    Part,
    Results,
    Rounds,
    Topic,
    installed,
    workers,
)  # fmt: skip
from measuring import ENVIRONMENTS, shares_a_gpu
from topics import TOPICS
from turns import CORES, in_children, ready, take_turns, turns

TUNING = tuple(f"ESPER_ALLOC_{one}" for one in ("ALLOWANCE", "BLACK_BOX", "SEGMENTS", "USES"))


# --- the measuring side ------------------------------------------------------
def work(asked: Mapping[str, Any]) -> None:
    """Measures as command_of() was asked to."""
    module, name = asked["measure"].split(".")
    found = importlib.import_module(module)
    how = {**asked["settings"], **asked["how"]}
    if asked["together"]:
        how["ready"] = partial(ready, os.dup(0))

    def told(function: Callable[..., Any], *arguments: str) -> Callable[[], Any]:
        """It with what it can be told."""
        known = inspect.signature(function).parameters
        return partial(function, *arguments, **{key: how[key] for key in how if key in known})

    measure = told(getattr(found, name), asked["allocator"])
    cores = CORES if asked["same_cores"] else None
    if asked["workers"] == FRESH:
        workers.report(measure())
    elif asked["workers"] == STAYS:
        take_turns(measure(), cores)
    else:
        before = told(getattr(found, f"before_{name}", lambda: None))
        if asked["imports"]:
            before = partial(importlib.import_module("models").import_job, asked["imports"])
        take_turns(in_children(asked["allocator"], measure, before), cores)


# --- the conducting side -----------------------------------------------------
class Command:
    """One command: what it was asked, and the rows that it has so far."""

    def __init__(self, name: str, options: Options, rounds: int | None, out: Path | None) -> None:
        self.topic: Topic = TOPICS[name]
        self.options, self.rounds = options, rounds
        self.results = Results(name, out)

    def other_settings(self) -> dict[str, Any]:
        """What a run says of itself if it was asked for other settings than a topic's own."""
        usual = self.topic.settings
        changed = {
            key: value for key, value in self.options.settings.items() if value != usual[key]
        }
        changed |= {"small": True} if self.options.small else {}
        changed |= {"segments": self.options.segments} if self.options.segments else {}
        return {"settings": changed} if changed else {}

    def command_of(self, part: Part, case: Case) -> tuple[list[str], dict[str, str]]:
        """The command that measures a case, and its environment."""
        ours = case.allocator == OURS
        segments = {"ESPER_ALLOC_SEGMENTS": self.options.segments} if ours else {}
        asked = {
            "measure": part.measure, "allocator": case.allocator, "how": dict(case.how),
            "settings": {"small": self.options.small, **self.options.settings},
            "workers": part.workers, "same_cores": part.same_cores, "imports": part.imports,
            "together": part.together,
        }  # fmt: skip
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {
            # Streams share hardware queues when there are more of them than queues.
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
            **ENVIRONMENTS[case.allocator],
            **{key: value for key, value in segments.items() if value},
            **case.environment,
            "PYTHONPATH": os.pathsep.join(one for one in path if one),
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asked)]
        return command, workers.environment(variables, (*workers.FOREIGN, *TUNING))

    def measure(
        self,
        part: Part,
        cases: Sequence[Case],
        rounds: int,
        seconds: float = float("inf"),
        each: Callable[[Rounds], object] = lambda _: None,
    ) -> Rounds:
        """The figures of the cases, by name, for each round. `each` is told as they come."""
        commands = {case.name: self.command_of(part, case) for case in cases}
        return turns(
            commands, rounds, fresh=part.workers == FRESH, may_fail=part.may_fail,
            together=part.together,
            once=[case.name for case in cases if case.once], least=part.warm_up + 1,
            # The CPU of a test may be busy.
            timeout=part.timeout * (10 if self.options.settings.get("device") == "cpu" else 1),
            seconds=seconds, tight=part.tight, each=each,
        )  # fmt: skip

    def add_rows(self, part: Part, rounds: Rounds, left_out: Mapping[str, str]) -> bool:
        """The rows of these rounds. False: nothing was measured of the case that must be, or of any
        where that one is left out."""
        rounds = part.derive(rounds)
        any_will_do = part.ours in (None, *left_out)
        ours = [one[name] for one in rounds for name in one if any_will_do or name == part.ours]
        first = next((figures for figures in ours if figures.get("machine")), None)
        if first is None:
            return False
        if self.results.run is None:
            self.results.describe({**first["machine"], **self.other_settings()})
        self.results.leave_out(left_out)
        for row in part.rows(rounds, self.options) if callable(part.rows) else part.rows:
            sides = (side for side in (row.ours, row.peer) if isinstance(side, str))
            if not any(side in left_out for side in sides):
                self.results.add(row, rounds)
        return True

    def run_part(self, part: Part, seconds: float) -> bool:
        """Measures a part and adds its rows; whether all of it was measured."""
        left_out = {
            case.name: f"the package {package} is not installed"
            for case in part.cases for package in case.needs if not installed(package)
        }  # fmt: skip
        if self.options.cases:
            left_out |= {
                case.name: "not asked for"
                for case in part.cases if case.name not in self.options.cases
            }  # fmt: skip
        cases = [case for case in part.cases if case.name not in left_out]
        if not cases:
            print(f"{part.name}: left out, {next(iter(left_out.values()))}")
            return True
        if part.loops:
            importlib.import_module("loops").load()  # compiled outside the workers' time
        wanted = self.rounds or part.rounds or self.topic.rounds
        conduct = part.conduct or Command.measure
        rounds = conduct(
            self, part, cases, part.warm_up + wanted, seconds,
            lambda found: self.results.keep(lambda: self.add_rows(part, found, left_out)),
        )  # fmt: skip
        for one in rounds:
            for case, figures in one.items():
                if figures.get("why"):
                    print(f"{case}: {figures['why']}")
        if not self.add_rows(part, rounds, left_out):
            print(f"{part.name}: nothing was measured{f' under {part.ours}' * bool(part.ours)}")
            return False
        complete = True
        for case in cases:
            # A case that failed is in no later round. The last round may lack one because the time
            # was over, and a case that runs once is in the first round alone.
            had = [number for number, one in enumerate(rounds) if case.name in one]
            fell_out = not case.once and had and had[-1] < len(rounds) - 2
            last = part.workers != STAYS or len(rounds) - 1 in had
            if part.conduct is None and (not had or not last or fell_out):
                print(f"{part.name}: {case.name} did not go through")
                complete = False
        return complete

    def run(self, parts: Sequence[Part], seconds: float) -> bool:
        """Whether all was measured and met its goals."""
        begin = time.monotonic()
        complete = True
        for index, part in enumerate(parts):
            left = seconds - (time.monotonic() - begin)
            if index and left <= 0:
                print(f"{part.name}: not begun, {seconds:.0f} s are over")
                complete = False
                continue
            complete &= self.run_part(part, left / (len(parts) - index))
            self.results.write()
        return self.results.run is not None and self.results.save() and complete


def parts_here(
    topic: Topic, named: Sequence[str], settings: Mapping[str, Any]
) -> tuple[list[Part], str | None]:
    """The parts that are measured, and why nothing can be."""
    chosen = [part for part in topic.parts if part.name in named or (not named and part.by_default)]
    needed = max(settings.get("ranks", part.gpus) for part in chosen)
    needed = min(needed, 1) if shares_a_gpu() else needed
    needed = 0 if settings.get("device") == "cpu" else needed
    why = workers.gpu_missing() if needed else None
    if needed > 1 and not why:
        count = importlib.import_module("torch").cuda.device_count()
        if count < needed:
            why = f"{needed} GPUs are needed, and there is {count}"
    return chosen, why


def setting(text: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """NAME=VALUE as the setting's own type. Raises ValueError."""
    name, _, value = text.partition("=")
    if name not in known:
        there = ", ".join(f"{key}={usual!r}" for key, usual in known.items())
        raise ValueError(f"--set {text}: no such setting; there are {there or 'none'}")
    usual = known[name]
    try:
        if isinstance(usual, tuple):
            return name, tuple(type(usual[0])(one) for one in value.split(","))
        return name, type(usual)(value)
    except ValueError:
        raise ValueError(f"--set {text}: the value is one like {usual!r}") from None


def describe(name: str) -> None:
    """Prints what a topic measures."""
    topic = TOPICS[name]
    print(f"{topic.about}\n\nparts (of --part):")
    for part in topic.parts:
        more = "" if part.by_default else "; only where it is named"
        print(f"  {part.name}: {'; '.join(case.name for case in part.cases)}{more}")
    for key, value in topic.settings.items():
        print(f"setting: {key}={value!r}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", nargs="?", choices=sorted(TOPICS), metavar="TOPIC")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help="repeatable")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="repeatable")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/TOPIC.json")
    parser.add_argument("--rounds", type=int, help="at most; each topic has its own default")
    parser.add_argument("--seconds", type=float, default=500.0, help="default: 500")
    parser.add_argument("--segments", choices=("classic", "mapped"), help="of ours")
    parser.add_argument("--small", action="store_true", help="tiny sizes: to try a benchmark")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return 0
    if options.topic is None:
        if not options.list:
            parser.error("name a topic, or ask with --list which there are")
        for name, topic in TOPICS.items():
            print(f"{name:18} {topic.about.splitlines()[0]}")
        return 0
    if options.list:
        describe(options.topic)
        return 0
    topic = TOPICS[options.topic]
    known = [part.name for part in topic.parts]
    unknown = [name for name in options.part if name not in known]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; {options.topic} has: {', '.join(known)}")
    cases = {case.name for part in topic.parts for case in part.cases}
    if strange := [name for name in options.case if name not in cases]:
        parser.error(f"no case {strange[0]!r}; {options.topic} has: {'; '.join(sorted(cases))}")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: one at least")
    settings = dict(topic.settings)
    try:
        settings.update(setting(one, topic.settings) for one in options.settings)
    except ValueError as wrong:
        parser.error(str(wrong))
    if shares_a_gpu() and options.out is None:
        parser.error("ESPER_ONE_GPU=1: ranks that share a GPU give no times to keep: name --out")
    asked = Options(options.small, options.segments, settings, options.case)
    command = Command(options.topic, asked, options.rounds, options.out)
    if options.out is None and (other := command.other_settings()):
        given = ", ".join(f"{name}={value}" for name, value in other["settings"].items())
        parser.error(f"{given}: rows of other settings need a file of their own: name --out")
    parts, why = parts_here(topic, options.part, settings)
    if why:
        print(f"nothing can be measured: {why}")
        return 1
    return 0 if command.run(parts, options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
