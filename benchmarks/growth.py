"""How cost, metadata and host memory grow with live blocks, and a long drifting run.

    growth.py                        # measures, on any machine with a C compiler
    growth.py --plot growth.svg      # and draws what the result file has (needs matplotlib)
    growth.py --rounds 0 --plot growth.svg   # draws it, and measures nothing
    growth.py --drift 100000000      # only the long run: sizes drift, eight times over
    growth.py --segments mapped      # either on a device that can map pages

The core runs on the simulated device (growth.c), so what is timed is the core. Each
round goes from 100 to 1,000,000 live blocks of 512 B to 64 KiB in fresh processes.
Goals: time grows no faster than the logarithm of the live blocks, counted from 1,000;
metadata is at most 128 bytes a block, live or free, where there are many.

The long run is tests/core/whole/test_drift.c: reserved over live, at their peaks, of the
last three of eight cycles is compared with that of the second to fourth (goal: at
most 1.02).
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Results, Rows, read

SOURCE = Path(__file__).with_suffix(".c")
BASE = 1000  # live blocks that growth is counted from
MANY = 10_000  # live blocks from which metadata is judged by the block
METADATA_GOAL = 128  # bytes a block
TICKS = (100, 150, 200, 300, 500, 1000, 1500)  # of all panels
DRIFT_GOAL = 1.02
#: The test of the long run, by the kind of segments.
DRIFT_TESTS = {
    "classic": "drifting_sizes_do_not_fragment_more_and_more",
    "mapped": "drifting_sizes_on_pages_do_not_fragment_more_and_more",
}


class GrowthError(RuntimeError):
    """It cannot be measured, or drawn; the message says why and what helps."""


@dataclass(frozen=True)
class Point:
    """So many live blocks. Bytes, and ns of a free and a malloc."""

    live: int
    free: int
    ns: float
    metadata: int
    host: int
    live_bytes: int
    reserved: int

    @property
    def metadata_per_block(self) -> float:
        return self.metadata / (self.live + self.free)

    @property
    def host_per_block(self) -> float:
        return self.host / (self.live + self.free)


def parse(printed: str) -> list[Point]:
    """What growth.c printed. Raises GrowthError for anything else."""
    points = []
    for line in printed.splitlines():
        words = line.split()
        try:
            live, free, ns, *rest = words
            metadata, host, live_bytes, reserved = map(int, rest)
            points.append(
                Point(int(live), int(free), float(ns), metadata, host, live_bytes, reserved)
            )
        except ValueError:
            raise GrowthError(f"growth.c printed {line!r}") from None
    if not points:
        raise GrowthError("growth.c printed nothing")
    return points


def compiler() -> list[str]:
    found = shlex.split(os.environ.get("CC") or "cc")
    if not shutil.which(found[0]):
        raise GrowthError("there is no C compiler: install gcc, or name one in CC")
    return found


def build(folder: Path) -> Path:
    """Compiles growth.c with the core and the simulated device."""
    program = folder / "growth"
    sources = [SOURCE, *sorted((ROOT / "csrc" / "core").glob("*/*.c"))]
    sources += sorted((ROOT / "csrc" / "sleep").glob("*.c"))
    sources += sorted((ROOT / "csrc" / "device" / "sim").glob("*.c"))
    command = [*compiler(), "-std=gnu11", "-O2", "-pthread", "-o", str(program), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise GrowthError(f"growth.c does not compile:\n{done.stderr[-3000:]}")
    return program


def run_growth(
    program: Path, most: int, operations: int, seed: int, segments: str = "classic"
) -> list[Point]:
    command = [str(program), "--most", str(most), "--operations", str(operations)]
    command += ["--seed", str(seed), *(["--mapped"] if segments == "mapped" else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise GrowthError(f"growth.c failed: {done.stderr.strip()}")
    return parse(done.stdout)


def allowed(live: int) -> float:
    """Logarithmic growth from BASE live blocks: the ratio that is as good as it."""
    return max(1.0, math.log(live) / math.log(BASE))


def add_rows(
    results: Results, rounds: Sequence[Sequence[Point]], segments: str = "classic"
) -> None:
    kind = f"{segments} segments"
    by_live = {
        live: [point for points in rounds for point in points if point.live == live]
        for live in sorted({point.live for points in rounds for point in points})
    }
    base = [point.ns for point in by_live.get(BASE, [])]
    for live, points in by_live.items():
        results.row(
            f"free and malloc among {live:,} live blocks, simulated device, {kind}", "ns",
            [point.ns for point in points], base, f"among {BASE:,}",
            allowed(live) if live > BASE else None,
        )  # fmt: skip
        for name, values, goal in (
            ("metadata a block", [one.metadata_per_block for one in points], METADATA_GOAL),
            ("host memory a block", [one.host_per_block for one in points], None),
        ):
            results.row(
                f"{name}, {live:,} live blocks, {kind}", "bytes", values, [float(METADATA_GOAL)],
                "128 bytes", goal if live >= MANY else None, "ours",
            )  # fmt: skip


#: What is drawn, and the names of its rows; each kind of segments is a line.
PANELS = (
    ("ns of a free and a malloc", "free and malloc among {} live blocks, simulated device"),
    ("metadata, bytes a block", "metadata a block, {} live blocks"),
    ("host memory, bytes a block", "host memory a block, {} live blocks"),
)
KINDS = {"mapped": "-o", "classic": "--s"}  # and how their lines look


def line(rows: Rows, name: str, kind: str) -> dict[int, float]:
    """The figures of one kind of segments, by live blocks."""
    wanted = re.compile(re.escape(f"{name}, {kind} segments").replace(r"\{\}", "([0-9,]+)"))
    found = ((wanted.fullmatch(row["name"]), row["ours"]) for row in rows)
    return dict(sorted((int(match[1].replace(",", "")), ours) for match, ours in found if match))


def draw(rows: Rows, path: Path) -> None:
    """Three panels over the live blocks, both axes logarithmic. Raises GrowthError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError:
        raise GrowthError(
            f"--plot {path}: needs matplotlib: python -m pip install matplotlib"
        ) from None
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same bytes for the same figures
    figure = Figure(figsize=(11.5, 3.4), layout="constrained")
    for axis, (title, name) in zip(figure.subplots(1, len(PANELS)), PANELS):
        lines = {kind: line(rows, name, kind) for kind in KINDS}
        for kind, values in lines.items():
            axis.plot(
                list(values), list(values.values()), KINDS[kind],
                label=f"{kind} segments", markersize=4, linewidth=1.3,
            )  # fmt: skip
        cost = lines["mapped"]
        if axis is figure.axes[0] and BASE in cost:
            grown = [cost[BASE] * math.log(live) / math.log(BASE) for live in cost]
            axis.plot(list(cost), grown, ":", color="gray", label="logarithmic")
        elif axis is not figure.axes[0]:
            axis.axhline(METADATA_GOAL, linestyle=":", color="gray", label=f"{METADATA_GOAL} bytes")
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_yticks(TICKS, [f"{tick:,}" for tick in TICKS])
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("live blocks", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse_drift(printed: str) -> tuple[float, float]:
    """Early and late reserved over live, of what test_drift.c printed."""
    found = re.search(r"early ([\d.]+), late ([\d.]+)", printed)
    if not found:
        raise GrowthError(f"test_drift.c printed no figures:\n{printed[-2000:]}")
    return float(found[1]), float(found[2])


def run_drift(operations: int, segments: str) -> tuple[float, float]:
    compiler()
    folder = ROOT / "tests" / "core"
    made = subprocess.run(
        ["make", "-s", "-C", str(folder), "VARIANT=plain", "build/plain/test_drift"],
        capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode != 0:
        raise GrowthError(f"test_drift.c does not compile:\n{made.stderr[-3000:]}")
    done = subprocess.run(
        [str(folder / "build" / "plain" / "test_drift"), DRIFT_TESTS[segments]],
        capture_output=True, text=True,
        env={**os.environ, "ESPER_DRIFT_OPERATIONS": str(operations)},
    )  # fmt: skip
    print(done.stdout, end="")
    return parse_drift(done.stdout)


def machine() -> Mapping[str, Any]:
    name = platform.machine()
    try:
        models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        name = models[0] if models else name
    except OSError:
        pass
    return {"gpu": "none: the simulated device", "driver": "none", "torch": "none", "cpu": name}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    parser.add_argument("--rounds", type=int, default=3, help="times to measure everything")
    parser.add_argument("--most", type=int, default=1_000_000, help="live blocks")
    parser.add_argument("--operations", type=int, default=1_000_000, help="frees, and mallocs")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw what the result file has"
    )
    parser.add_argument("--drift", type=int, metavar="N", help="the long run, of N operations")
    parser.add_argument("--segments", choices=DRIFT_TESTS, default="classic")
    options = parser.parse_args()
    results = Results("growth", options.out)
    results.describe(machine())
    try:
        if options.drift:
            early, late = run_drift(options.drift, options.segments)
            results.row(
                f"drifting sizes, {options.drift:,} operations, {options.segments} segments: "
                "reserved / live, last cycles",
                "",
                [late], [early], "early cycles", DRIFT_GOAL,
            )  # fmt: skip
        elif options.rounds:
            with tempfile.TemporaryDirectory() as folder:
                program = build(Path(folder))
                rounds = [
                    run_growth(program, options.most, options.operations, seed, options.segments)
                    for seed in range(1, options.rounds + 1)
                ]
            add_rows(results, rounds, options.segments)
        met = results.save() if results.rows else True
        if options.plot:
            draw(read(results.path)[0], options.plot)
    except GrowthError as error:
        print(f"growth.py: {error}")
        return 1
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
