"""What every benchmark shares: allocators, fresh processes, alternation, result files.

PyTorch's allocator is chosen once per process, so each measurement runs in a
process of its own. A benchmark script is both sides: run plainly it *conducts*
(starts workers in turn, A B A B ..., and writes the result file); with
``--worker NAME`` it *measures* under that allocator and prints one JSON line.

A result file, ``benchmarks/results/<topic>.json``::

    {"runs": [{"gpu", "driver", "torch", "commit", "time", "id", "left_out"}],
     "rows": [{"name", "unit", "ours", "peer", "peer_name", "ratio", "goal",
               "run", "rounds", "ours_range", "peer_range", "met", "judged",
               "mean_ratio", "interval"}]}

``ours`` and ``peer`` are medians over the workers of one command on one GPU,
the ranges are the smallest and largest worker. ``goal`` is the largest value
that satisfies us of what ``judged`` names: the ``ratio`` (without a ratio,
``ours``), ``ours``, the ``difference`` ours - peer, or the ``mean_ratio``; of
``at_least`` it is the smallest ratio that does. It is null where a row is there
for the record only. ``no_worse`` bounds the low end of the ``interval``: nothing
shows that ours is more, and the interval is narrow enough to have shown it (at
most 0.05 either way). ``no_more`` bounds the ``mean_ratio``, and lets the high end
of the ``interval`` be 0.02 above. ``mean_ratio`` is the mean of the rounds' ratios and
``interval`` its 95% confidence interval (Student's t), where both sides were
measured in the same rounds. ``left_out`` names peers that could not be measured,
and why. A later run replaces the rows it measured again. ``ours_by_layer`` and
``peer_by_layer`` of pipeline.py's rows are MiB after each layer, in one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import io
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

OURS = "esper_alloc"
NATIVE = "native"
EXPANDABLE = "native, expandable"
ASYNC = "cudaMallocAsync"
CAPTURE_REUSE = "native, graph_capture_record_stream_reuse"
RMM = "RMM's pool"
#: Whom a benchmark compares with where nothing speaks against it.
PEERS = (NATIVE, EXPANDABLE, ASYNC, RMM)

#: What each allocator needs in the environment before torch is imported.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    OURS: {},
    NATIVE: {},
    EXPANDABLE: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ASYNC: {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    CAPTURE_REUSE: {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"},
    RMM: {},
}

MIB = 1 << 20
#: How far the high end of the interval may be above a goal of the kind "no_more".
NO_MORE_ABOVE = 0.02

#: Variables that would choose or tune an allocator behind our back.
_FOREIGN = (
    "ESPER_ALLOC",
    "ESPER_ALLOC_ALLOWANCE",
    "ESPER_ALLOC_SEGMENTS",
    "ESPER_ALLOC_USES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_LAUNCH_BLOCKING",
)

_MARK = "benchmark-result: "


class WorkerFailed(RuntimeError):
    """A measuring process ended badly; the message holds the end of its output."""


# --- the measuring side ----------------------------------------------------


def choose_allocator(name: str) -> None:
    """Makes `name` the allocator of this process, which has not used CUDA yet."""
    if name == OURS:
        import esper_alloc

        esper_alloc.enable()
        if not esper_alloc.is_enabled():
            raise RuntimeError("esper_alloc.enable() returned, but it is not enabled")
    elif name == RMM:
        _use_rmm()
    elif name not in ENVIRONMENTS:
        raise ValueError(f"unknown allocator {name!r}; known: {', '.join(ENVIRONMENTS)}")


def use_allocator(name: str) -> None:
    """The same, and initialises CUDA. Raises RuntimeError where another one is in use."""
    import torch

    choose_allocator(name)
    torch.cuda.init()
    if name not in (OURS, RMM):
        backend = torch.cuda.get_allocator_backend()
        expected = ASYNC if name == ASYNC else NATIVE
        if backend != expected:
            raise RuntimeError(f"asked for {name}, but torch runs on {backend!r}")


#: RMM's own figures: of what its pool handed out, and of what that took.
_rmm: tuple[Any, Any] | None = None


def _use_rmm() -> None:
    """RMM's pool, growing from nothing."""
    import torch
    from rmm.allocators.torch import rmm_torch_allocator

    _make_rmm_pool()
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)


def _make_rmm_pool() -> None:
    """A new one, with RMM's own statistics above and below it."""
    global _rmm
    import rmm

    below = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaMemoryResource())
    pool = rmm.mr.PoolMemoryResource(below, initial_pool_size=0)
    above = rmm.mr.StatisticsResourceAdaptor(pool)
    rmm.mr.set_current_device_resource(above)
    _rmm = (above, below)


def empty_cache() -> None:
    """Gives back what is reserved. Nothing may be live: RMM's pool is replaced by a new one."""
    import torch

    torch.cuda.empty_cache()
    if _rmm is not None:
        torch.cuda.synchronize()
        _make_rmm_pool()


def memory_figures() -> dict[str, float]:
    """MiB of this process, by its allocator: allocated and reserved at the most,
    reserved now, and tries of malloc that needed a second one; device_calls: how often
    memory was taken of the device or given back, or moved."""
    import torch

    if _rmm is not None:
        above, below = (one.allocation_counts for one in _rmm)
        return {
            "peak_allocated_mib": above.peak_bytes / MIB,
            "peak_reserved_mib": below.peak_bytes / MIB,
            "reserved_mib": below.current_bytes / MIB,
            "retries": 0,
            "device_calls": 0,
        }
    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "reserved_mib": torch.cuda.memory_reserved() / MIB,
        "retries": stats.get("num_alloc_retries", 0),
        "device_calls": stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0),
    }


def device_used_mib() -> float:
    """What is in use of the device, by everybody, as the driver says."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def nvidia_smi_used_mib() -> float | None:
    """The same as nvidia-smi says; None where it says nothing."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return float(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def report(result: dict[str, Any]) -> None:
    """Hands a worker's result to the conductor."""
    print(_MARK + json.dumps(result), flush=True)


def machine() -> dict[str, str]:
    """The GPU, driver and torch of this process, for the result file."""
    import torch

    name = torch.cuda.get_device_name(0)
    return {"gpu": name, "driver": driver_version(), "torch": torch.__version__}


@functools.cache
def driver_version() -> str:
    """As nvidia-smi says it, which takes long enough to ask once, before children are forked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


# --- the conducting side ---------------------------------------------------


def gpu_missing() -> str | None:
    """Why nothing can be measured on this machine, or None. Imports no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the CUDA driver of this machine finds no GPU"
    return None


def nothing_measurable() -> bool:
    """Whether there is no GPU to measure on; prints why there is none."""
    why = gpu_missing()
    if why:
        print(f"nothing can be measured: {why}")
    return bool(why)


def rmm_missing() -> str | None:
    """Why RMM's pool cannot be measured here, or None."""
    try:
        found = importlib.util.find_spec("rmm")
    except (ImportError, ValueError):
        found = None
    return None if found else "the package rmm is not installed"


def peers_here(peers: Sequence[str] = PEERS) -> tuple[list[str], dict[str, str]]:
    """Those of `peers` that can be measured here, and why the others cannot."""
    missing = rmm_missing() if RMM in peers else None
    left_out = {RMM: missing} if missing else {}
    return [peer for peer in peers if peer not in left_out], left_out


def peers_of(rounds: Sequence[Mapping[str, Any]], wanted: Sequence[str] = (NATIVE,)) -> list[str]:
    """The peers that rows are made of: those of the rounds, and those that may not be missing."""
    return [peer for peer in PEERS if peer in wanted or any(peer in one for one in rounds)]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--out", type=Path, help="result file (default: benchmarks/results/<topic>.json)"
    )
    made.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="of measurements, mostly fresh processes for each allocator (default: 5)",
    )
    made.add_argument(
        "--seconds", type=float, default=500.0, help="start no further round after this long"
    )
    made.add_argument("--worker", metavar="ALLOCATOR", help=argparse.SUPPRESS)
    return made


def result_in(line: str) -> dict[str, Any] | None:
    """What a line of a worker's output reports, if it does."""
    return json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None


def worker_process(
    script: str | Path, allocator: str, args: Sequence[str], more: Mapping[str, str] | None
) -> tuple[list[str], dict[str, str]]:
    """The command `script --worker allocator args` and its environment, with `more`."""
    env = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
    env.update(ENVIRONMENTS[allocator])
    env.update(more or {})
    env["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part
    )
    # Streams share hardware queues when there are more of them than queues.
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return [sys.executable, str(script), "--worker", allocator, *args], env


def run_worker(
    script: str | Path,
    allocator: str,
    args: Sequence[str] = (),
    timeout: float = 300.0,
    more: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measures once: `script --worker allocator args` in a fresh process.

    `more` is added to its environment.
    """
    command, env = worker_process(script, allocator, args, more)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"{allocator}: no result within {timeout:.0f} s") from error
    if done.returncode == 0:
        for line in reversed(done.stdout.splitlines()):
            found = result_in(line)
            if found is not None:
                return found
    tail = (done.stdout + done.stderr)[-3000:]
    raise WorkerFailed(f"{allocator}: exit status {done.returncode} and this output:\n{tail}")


@dataclass(frozen=True)
class Case:
    """One side of a comparison: an allocator, and how the worker shall use it."""

    name: str
    allocator: str
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


#: What the cases of a comparison reported, by case, for each round.
Rounds = list[dict[str, dict[str, Any]]]


def alternate_cases(
    script: str | Path,
    cases: Sequence[Case],
    rounds: int,
    *,
    timeout: float = 300.0,
    seconds: float = float("inf"),
    each: Callable[[Rounds], object] | None = None,
) -> Rounds:
    """Runs each case's worker once a round, in turn: what they reported, by case.

    A failed worker is printed, and its case missing from that round; a case
    that failed twice is not tried again. No round starts after `seconds`. `each`
    is told after every round what there is so far.
    """
    measured: Rounds = []
    failures: dict[str, int] = {}
    begin = time.monotonic()
    for turn in range(rounds):
        if turn and time.monotonic() - begin > seconds:
            print(f"stopped after {turn} of {rounds} rounds: {seconds:.0f} s are over", flush=True)
            break
        measured.append({})
        for case in cases:
            if failures.get(case.name, 0) >= 2:
                continue
            start = time.monotonic()
            try:
                result = run_worker(script, case.allocator, case.args, timeout, case.environment)
            except WorkerFailed as error:
                failures[case.name] = failures.get(case.name, 0) + 1
                print(f"round {turn + 1}: {case.name}: {error}", flush=True)
                continue
            measured[-1][case.name] = result
            took = time.monotonic() - start
            print(f"round {turn + 1}: {case.name}: measured in {took:.1f} s", flush=True)
        if each:
            each(measured)
    return measured


def alternate(
    script: str | Path,
    allocators: Sequence[str],
    rounds: int,
    args: Sequence[str] = (),
    *,
    timeout: float = 300.0,
    seconds: float = float("inf"),
) -> dict[str, list[dict[str, Any]]]:
    """alternate_cases() where the cases differ in the allocator alone: by allocator.

    An allocator all of whose workers failed is missing from the answer.
    """
    cases = [Case(allocator, allocator, tuple(args)) for allocator in allocators]
    results: dict[str, list[dict[str, Any]]] = {}
    for measured in alternate_cases(script, cases, rounds, timeout=timeout, seconds=seconds):
        for allocator, result in measured.items():
            results.setdefault(allocator, []).append(result)
    return results


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


def git(*arguments: str) -> str:
    """What git says of this tree."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def commit() -> str:
    """The commit that is measured: $ESPER_COMMIT, else git's, else "unknown"."""
    named = os.environ.get("ESPER_COMMIT", "").strip()
    if named:
        return named
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+changes" if changed else "")


class Results:
    """The rows of one command, and the result file that they go to."""

    def __init__(self, topic: str, path: Path | None = None) -> None:
        self.path = path or RESULTS / f"{topic}.json"
        self.rows: list[dict[str, Any]] = []
        self.run: dict[str, Any] | None = None
        self.complete = True  # no row with a goal is missing

    def describe(self, about: Mapping[str, str], left_out: Mapping[str, str] | None = None) -> None:
        """Says what machine the rows come from: what machine() gave in a worker.

        `left_out`: peers that could not be measured, and why.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.run = {**about, "commit": commit(), "time": now, "id": f"{now}-{os.getpid()}"}
        if left_out:
            self.run["left_out"] = dict(left_out)

    def row(
        self,
        name: str,
        unit: str,
        ours: Sequence[float],
        peer: Sequence[float],
        peer_name: str,
        goal: float | None = None,
        judged: str = "ratio",
    ) -> None:
        """Adds a row from the values that the workers of each side measured.

        `judged` says what `goal` bounds: "ratio", "ours", "difference" or "at_least".
        """
        if not ours or not peer:
            print(f"no row {name!r}: {'ours' if not ours else peer_name} gave no value")
            self.complete &= goal is None
            return
        self.rows.append(self._row(name, unit, ours, peer, peer_name, goal, judged))

    def compare(
        self,
        name: str,
        unit: str,
        rounds: Sequence[Mapping[str, Mapping[str, Any]]],
        key: str,
        ours: str,
        peer: str,
        goal: float | None = None,
        judged: str = "ratio",
    ) -> None:
        """Adds a row from two cases of alternate_cases(), paired by round.

        `ours` and `peer` are the cases' names, `key` the figure. `judged` may
        also be "mean_ratio", "no_worse" or "no_more" here.
        """
        pairs = [
            (one[ours][key], one[peer][key])
            for one in rounds
            if one.get(ours, {}).get(key) is not None and one.get(peer, {}).get(key) is not None
        ]
        if not pairs:
            print(f"no row {name!r}: {ours} and {peer} gave no value in the same round")
            self.complete &= goal is None
            return
        row = self._row(name, unit, *map(list, zip(*pairs, strict=True)), peer, goal, judged)
        if len(pairs) > 1 and all(b for _, b in pairs):
            ratios = [a / b for a, b in pairs]
            row["mean_ratio"] = statistics.fmean(ratios)
            row["interval"] = list(interval(ratios))
        row["met"] = verdict(row)
        self.rows.append(row)

    def _row(
        self,
        name: str,
        unit: str,
        ours: Sequence[float],
        peer: Sequence[float],
        peer_name: str,
        goal: float | None,
        judged: str,
    ) -> dict[str, Any]:
        a, b = statistics.median(ours), statistics.median(peer)
        row = {
            "name": name,
            "unit": unit,
            "ours": a,
            "peer": b,
            "peer_name": peer_name,
            "ratio": a / b if b else None,
            "goal": goal,
            "run": self.run["id"] if self.run else None,
            "rounds": len(ours),
            "ours_range": [min(ours), max(ours)],
            "peer_range": [min(peer), max(peer)],
            "judged": judged,
        }
        row["met"] = verdict(row)
        return row

    def keep(self, add: Callable[[], object]) -> None:
        """Writes the rows that `add` makes of what was measured so far, and forgets them: they
        are there if the command is cut off, and those of all rounds take their place."""
        rows, complete = [*self.rows], self.complete
        with contextlib.redirect_stdout(io.StringIO()):
            add()
        if self.run is not None and len(self.rows) > len(rows):
            add_to(self.path, self.rows, [self.run])
        self.rows, self.complete = rows, complete

    def of_rounds(
        self,
        measure: Callable[..., Rounds],
        add: Callable[[Rounds], object],
        left_out: Mapping[str, str] | None = None,
        ours: str | None = OURS,
    ) -> bool:
        """Lets `add` make the rows of the rounds that measure(each=...) gives, and writes those
        that there are after each round: see keep(). False: nothing was measured of the case
        `ours`, or of any where that is None."""

        def added(rounds: Rounds) -> bool:
            found = [
                figures["machine"]
                for one in rounds
                for name, figures in one.items()
                if ours in (None, name) and figures.get("machine")
            ]
            if not found:
                return False
            if self.run is None:
                self.describe(found[0], left_out)
            add(rounds)
            return True

        return added(measure(each=lambda rounds: self.keep(lambda: added(rounds))))

    def save(self) -> bool:
        """Writes the file and prints the rows; False when a goal was missed or
        could not be judged."""
        if self.run is None:
            raise RuntimeError("describe() the machine before saving")
        add_to(self.path, self.rows, [self.run])
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


def print_table(rows: Sequence[dict[str, Any]], run: Mapping[str, Any] | None = None) -> None:
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


def column(results: Sequence[dict[str, Any]], key: str) -> list[float]:
    """One figure of every worker's report."""
    return [result[key] for result in results if result.get(key) is not None]
