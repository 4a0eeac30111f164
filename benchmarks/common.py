"""What every benchmark shares: how it is defined, and the result file that it writes.

A benchmark is a Topic in topics.py: parts, each with cases that take turns, a function that
measures one of them, and rows that compare their figures. run.py runs it.

A result file, ``benchmarks/results/<topic>.json``::

    {"runs": [{"gpu", "driver", "torch", "commit", "time", "id", "left_out", "settings"}],
     "rows": [{"name", "unit", "ours", "peer", "peer_name", "ratio", "goal",
               "run", "rounds", "ours_range", "peer_range", "met", "judged",
               "mean_ratio", "interval"}]}

``ours`` and ``peer`` are medians over the rounds of one command on one GPU, the ranges are the
smallest and largest. Where both sides were measured in the same rounds, ``mean_ratio`` is the mean
of the rounds' ratios and ``interval`` its 95% confidence interval (Student's t). ``left_out`` names
peers that could not be measured, and why; ``settings`` those that differ from the topic's. A later
run replaces the rows it measured again.

``goal`` is the largest value that satisfies us of what ``judged`` names: the ``ratio`` (without a
ratio, ``ours``), ``ours``, the ``difference`` ours - peer, or the ``mean_ratio``; of ``at_least``
it is the smallest ratio that does. Without a goal a row is there for the record. ``no_worse``
bounds the low end of the ``interval``, which must be narrow enough to have shown more (at most 0.05
either way). ``no_more`` bounds the ``mean_ratio``, and lets the high end be 0.02 above.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # where the package is not installed
# By its path: who measures another allocator does not import the package.
_path = ROOT / "esper_alloc" / "cli" / "workers.py"
_spec = importlib.util.spec_from_file_location("workers", _path)
assert _spec is not None and _spec.loader is not None
workers = sys.modules["workers"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(workers)


OURS, NATIVE = workers.OURS, workers.NATIVE
EXPANDABLE, ASYNC = workers.EXPANDABLE, workers.ASYNC
#: What was measured: figures by the name of the case, for each round.
Rounds = list[dict[str, dict[str, Any]]]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20

CAPTURE_REUSE = "native, graph_capture_record_stream_reuse"
#: Whom a benchmark compares with where nothing speaks against it.
PEERS = (NATIVE, EXPANDABLE, ASYNC)
#: How far the high end of the interval may be above a goal of the kind "no_more".
NO_MORE_ABOVE = 0.02


# --- what a benchmark is -----------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One side of a comparison: an allocator, and what the measuring function is told.

    It is left out where a package that it needs is not installed. `once`: it is measured in the
    first round alone.
    """

    name: str
    allocator: str
    how: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    once: bool = False


#: A side of a row: a case, whose figure is taken, or values.
Side = str | float | Sequence[float]


@dataclass(frozen=True)
class Row:
    """The figure `key` of a case beside that of another one, or `peer_key` if that is named.

    Two cases are compared round by round; see above for `goal` and `judged`. `more` is added to
    the row of the result file.
    """

    name: str
    unit: str
    key: str
    ours: Side
    peer: Side
    goal: float | None = None
    judged: str = "ratio"
    peer_key: str = ""
    peer_name: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What a command asks for, beside the parts."""

    small: bool = False
    segments: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[str] = ()  # none: all


#: How the cases of a part are measured. CHILDREN: workers that have imported all that they need
#: take turns, and each measurement is a forked child. STAYS: the workers themselves measure, pass
#: after pass. FRESH: each measurement is a new process.
CHILDREN, STAYS, FRESH = "children", "stays", "fresh"


@dataclass(frozen=True)
class Part:
    """Cases that are compared.

    measure: MODULE.FUNCTION, called as function(allocator, small=, **how) with the case's `how`
        and the topic's settings, as far as it has such parameters; it gives the figures and,
        under "machine", what machine() says. before_FUNCTION, if there is one, is called once,
        before children are forked.
    rows: of these rounds, or a function that makes them of rounds and Options.
    ours: the case that must have been measured; None: any.
    same_cores: each case runs on the same four cores, once it has imported what it needs.
    imports: the job of models.py whose packages are imported before children are forked.
    warm_up: rounds that are measured beside those that were asked for, of which one is measured
        however short the time is.
    tight, may_fail, together: as turns() in turns.py explains. To set up together, `measure` is
        given `ready`, and calls it before what it times.
    derive: makes of the rounds what rows are made of.
    conduct: measures the rounds itself, and is called as Command.measure() in run.py.
    """

    name: str
    measure: str
    cases: Sequence[Case]
    rows: Sequence[Row] | Callable[[Rounds, Options], Iterable[Row]]
    workers: str = CHILDREN
    ours: str | None = OURS
    rounds: int | None = None
    same_cores: bool = False
    imports: str = ""
    warm_up: int = 0
    timeout: float = 300.0
    loops: bool = False
    gpus: int = 1
    by_default: bool = True
    tight: bool = False
    may_fail: bool = False
    together: bool = False
    derive: Callable[[Rounds], Rounds] = lambda rounds: rounds
    conduct: Callable[..., Rounds] | None = None


class Topic:
    """A question and how it is answered; `settings` are what --set may change."""

    def __init__(
        self, about: str, *parts: Part, rounds: int = 5, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.about, self.parts, self.rounds = about, parts, rounds
        self.settings = settings or {}


# --- statistics and verdicts -------------------------------------------------
#: Student's t: 97.5% of the distribution lie below, by degrees of freedom from 1.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the mean, by Student's t. Needs two values."""
    mean = statistics.fmean(values)
    t = _T_975[min(len(values) - 2, len(_T_975) - 1)]
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def column(rounds: Rounds, case: str, key: str) -> list[float]:
    """A figure of a case in each round that has it."""
    found = (one.get(case, {}).get(key) for one in rounds)
    return [value for value in found if value is not None]


def values(side: Side, key: str, rounds: Rounds) -> list[float]:
    """Those of a side of a row."""
    if isinstance(side, str):
        return column(rounds, side, key)
    return [side] if isinstance(side, int | float) else list(side)


def medians(rounds: Rounds, key: str) -> dict[str, float]:
    """The median of a figure over the rounds, for each case that has it."""
    cases = dict.fromkeys(case for one in rounds for case in one)
    found = {case: column(rounds, case, key) for case in cases}
    return {case: statistics.median(values) for case, values in found.items() if values}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(len(ordered) * share, 6)) - 1)]


def verdict(row: Mapping[str, Any]) -> bool | None:
    """Whether a row meets its goal; None: it has none."""
    if row["goal"] is None:
        return None
    judged = row.get("judged", "ratio")
    if judged == "at_least":
        return row["ratio"] is not None and bool(row["ratio"] >= row["goal"])
    if judged in ("no_worse", "no_more"):
        if not row.get("interval"):
            return False  # one round shows nothing
        low, high = row["interval"]
        if judged == "no_more":
            return bool(row["mean_ratio"] <= row["goal"] and high <= row["goal"] + NO_MORE_ABOVE)
        return bool(low <= row["goal"] and (high - low) / 2 <= 0.05)
    if judged == "difference":
        value = row["ours"] - row["peer"]
    elif judged in ("ratio", "mean_ratio", "ours"):
        value = row.get(judged)
    else:
        raise ValueError(f"a goal cannot be of {judged!r}")
    if value is None:  # one round alone, or a peer of zero
        value = row["ours"] if row["ratio"] is None else row["ratio"]
    return bool(value <= row["goal"])


# --- result files ------------------------------------------------------------
def commit() -> str:
    """The commit that is measured: $ESPER_COMMIT, else git's, else "unknown"."""
    named = os.environ.get("ESPER_COMMIT", "").strip()
    if named:
        return named
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=12"]
    command += ["--dirty=+changes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


class Results:
    """The rows of one command, and the result file that they go to."""

    def __init__(self, topic: str, path: Path | None = None) -> None:
        self.path = path or RESULTS / f"{topic}.json"
        self.rows: list[dict[str, Any]] = []
        self.run: dict[str, Any] | None = None
        self.complete = True  # no row with a goal is missing

    def describe(self, about: Mapping[str, Any]) -> None:
        """Says what machine the rows come from: what machine() gave in a worker."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.run = {**about, "commit": commit(), "time": now, "id": f"{now}-{os.getpid()}"}

    def leave_out(self, left_out: Mapping[str, str]) -> None:
        """Names peers that could not be measured, and why."""
        if self.run is not None and left_out:
            self.run["left_out"] = {**self.run.get("left_out", {}), **left_out}

    def add(self, row: Row, rounds: Rounds) -> None:
        """Adds a row of these rounds; says so where a side gave no value."""
        peer_key = row.peer_key or row.key
        paired = isinstance(row.ours, str) and isinstance(row.peer, str)
        if paired:  # the rounds in which both were measured
            rounds = [
                one for one in rounds
                if column([one], row.ours, row.key) and column([one], row.peer, peer_key)
            ]  # fmt: skip
        ours = values(row.ours, row.key, rounds)
        peer = values(row.peer, peer_key, rounds)
        peer_name = row.peer_name or str(row.peer)
        if not ours or not peer:
            who = f"{row.ours} and {row.peer}" if paired else peer_name if ours else row.ours
            print(f"no row {row.name!r}: {who} gave no value{' in the same round' * paired}")
            self.complete &= row.goal is None
            return
        a, b = statistics.median(ours), statistics.median(peer)
        made = {
            "name": row.name, "unit": row.unit, "ours": a, "peer": b, "peer_name": peer_name,
            "ratio": a / b if b else None, "goal": row.goal,
            "run": self.run["id"] if self.run else None, "rounds": len(ours),
            "ours_range": [min(ours), max(ours)], "peer_range": [min(peer), max(peer)],
            "judged": row.judged,
        }  # fmt: skip
        if paired and len(ours) > 1 and all(peer):
            ratios = [one / other for one, other in zip(ours, peer, strict=True)]
            made["mean_ratio"] = statistics.fmean(ratios)
            made["interval"] = list(interval(ratios))
        made["met"] = verdict(made)
        self.rows.append({**made, **row.more})

    def keep(self, add: Callable[[], object]) -> None:
        """Writes the rows that `add` makes of what was measured so far, and forgets them: they
        are there if the command is cut off, and those of all rounds take their place."""
        rows, complete = [*self.rows], self.complete
        with contextlib.redirect_stdout(io.StringIO()):
            add()
        if len(self.rows) > len(rows):
            self.write()
        self.rows, self.complete = rows, complete

    def write(self) -> None:
        if self.run is not None:
            add_to(self.path, self.rows, [self.run])

    def save(self) -> bool:
        """Writes the file and prints the rows; False when a goal was missed or
        could not be judged."""
        self.write()
        print_table(self.rows, self.run)
        return self.complete and all(row["met"] is not False for row in self.rows)


Rows = Sequence[dict[str, Any]]


def add_to(path: Path, rows: Rows, runs: Rows) -> None:
    """Writes rows and their runs into a result file: in place of all rows of these names,
    also of peers that are there no more, and without the runs of which nothing is left."""
    old_rows, old_runs = read(path)
    fresh = {row["name"] for row in rows}
    rows = [row for row in old_rows if row["name"] not in fresh] + [*rows]
    used = {row["run"] for row in rows}
    known = {run["id"] for run in runs}
    runs = [run for run in old_runs if run["id"] not in known] + [*runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.new")
    found = {"runs": [run for run in runs if run["id"] in used], "rows": rows}
    scratch.write_text(json.dumps(found, indent=1) + "\n")
    scratch.replace(path)


def read(path: Path) -> tuple[Rows, Rows]:
    """A result file's rows and runs; none where there is no file."""
    try:
        found = json.loads(path.read_text())
        return list(found["rows"]), list(found["runs"])
    except FileNotFoundError:
        return [], []
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is no result file; move it away") from None


def print_table(rows: Rows, run: Mapping[str, Any] | None = None) -> None:
    """Prints rows for people: one line each, missed goals marked."""
    for name, why in (run or {}).get("left_out", {}).items():
        print(f"{name}: not measured, {why}")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"  ratio {row['ratio']:.3f}"
        if row.get("interval"):
            low, high = row["interval"]
            ratio += f" (mean {row['mean_ratio']:.4f}, 95% in {low:.4f} to {high:.4f})"
        of = row.get("judged", "ratio").replace("_", " ")
        goal = "" if row["goal"] is None else f"  goal {row['goal']:g}"
        goal += f" ({of})" if goal and of != "ratio" else ""
        met = {True: "  met", False: "  MISSED", None: ""}[row["met"]]
        print(
            f"{row['name']}: {row['ours']:.6g} {row['unit']}, "
            f"{row['peer_name']} {row['peer']:.6g}{ratio}{goal}{met}"
        )


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is a part of
        return False
