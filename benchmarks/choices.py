"""What else the sizes that the core has written into it could have been.

    choices.py                       # every alternative, on the traces that come along
    choices.py --only "largest page" # those of one choice (may be repeated)
    choices.py --list
    choices.py FILE...               # other recordings

Runs on any machine with a C compiler. For each alternative the core is compiled with
another value in its source, and the recorded jobs of replay_peaks.py are replayed on the
simulated device. A row of the result file compares the core as it is with an
alternative: peak reserved over peak active, the mean of the recordings; and for sizes of
pages how many pages were made and mapped, which is what the driver's time goes with.

There are no goals: the rows say what was chosen from.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Results
from growth import GrowthError, compiler
from replay_peaks import traces

CORE = Path("csrc") / "core"
BOTH, MAPPED, CLASSIC = ("mapped", "classic"), ("mapped",), ("classic",)


class ChoiceError(RuntimeError):
    """It cannot be measured; the message says why."""


@dataclass(frozen=True)
class Choice:
    """A value in a file of the core, and what else it could be, as C."""

    name: str
    file: str
    text: str  # stands there once; {} is the value
    chosen: str
    alternatives: tuple[str, ...]
    kinds: tuple[str, ...] = MAPPED

    def source(self, value: str) -> str:
        """The file with this value. Raises ChoiceError where it has no such text."""
        source = (ROOT / CORE / self.file).read_text()
        now = self.text.format(self.chosen)
        if source.count(now) != 1:
            raise ChoiceError(
                f"{self.name}: {CORE / self.file} does not say {now!r} once: choices.py names "
                "values that are there no more"
            )
        return source.replace(now, self.text.format(value))


CHOICES = (
    Choice(
        "largest small block", "base/config.c", "SMALL_MOST = {};", "1 * MIB",
        ("512 * KIB", "2 * MIB"), BOTH,
    ),
    Choice(
        "rest that stays in a large block", "base/config.c", "LARGE_REST = {};", "256 * KIB",
        ("64 * KIB", "512 * KIB", "1 * MIB"), BOTH,
    ),
    Choice(
        "sizes are multiples of", "base/config.c", "  return round_up(size, {});", "BLOCK_ALIGN",
        ("4 * KIB", "size > MIB ? 64 * KIB : BLOCK_ALIGN", "size > MIB ? MIB : BLOCK_ALIGN"), BOTH,
    ),
    Choice(
        "largest block that shares a segment", "base/config.c", "LARGE_SHARED_MOST = {};", "10 * MIB",
        ("5 * MIB", "20 * MIB"), CLASSIC,
    ),
    Choice("one part in this many is slack", "memory/slack.c", "SLACK_SHARE = {},", "25", ("10", "100")),
    Choice("largest page", "memory/grow.c", "LARGE_PAGE = {},", "32 << 20", ("16 << 20", "64 << 20")),
    Choice("largest page while memory is short", "memory/grow.c", "TIGHT_PAGE = {},", "8 << 20", ("2 << 20", "32 << 20")),
    Choice("while memory is short a page is such a part of the request", "memory/grow.c", "PAGES = {} ", "5", ("2", "10")),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The mean over the recordings, by kind of segments."""

    ratios: dict[str, float]  # peak reserved over peak active
    pages: dict[str, float]  # made and mapped


def build(folder: Path, choice: Choice | None, value: str) -> None:
    """Puts the package into `folder`, its core compiled with that value."""
    package = folder / "esper_alloc"
    shutil.copytree(
        ROOT / "esper_alloc", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    if choice:
        (folder / CORE / choice.file).write_text(choice.source(value))
    sources = [str(path) for path in sorted((folder / "csrc").rglob("*.c"))]
    made = package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [*compiler(), "-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-D_GNU_SOURCE"]
    command += ['-DESPER_VERSION="choices"', "-I", sysconfig.get_path("include")]
    command += ["-o", str(made), *sources, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ChoiceError(f"the core does not compile with {value}:\n{done.stderr[-3000:]}")


def replayed(
    choice: Choice | None, value: str, kinds: Sequence[str], files: Sequence[Path]
) -> Found:
    """What the recordings take with that value. Raises ChoiceError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, choice, value)
        command = [sys.executable, __file__, "--measure", ",".join(kinds), *map(str, files)]
        done = subprocess.run(
            command, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]])},
        )  # fmt: skip
    if done.returncode != 0:
        raise ChoiceError(f"nothing was replayed with {value}:\n{done.stderr[-3000:]}")
    return Found(**json.loads(done.stdout))


def measure(kinds: Sequence[str], files: Sequence[Path]) -> Found:
    """In a process that has the core in question."""
    from esper_alloc.replay import replay

    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    pages: dict[str, list[float]] = {kind: [] for kind in kinds}
    for path in files:
        for recording in replay.load_recordings(path):
            for kind in kinds:
                found = replay.replay(recording, kind)  # type: ignore[arg-type]
                ratios[kind].append(found.peak_reserved / recording.recorded.peak_active)
                pages[kind].append(found.device_calls.get("page_map", 0))
    return Found(
        {kind: statistics.fmean(values) for kind, values in ratios.items()},
        {kind: statistics.fmean(values) for kind, values in pages.items()},
    )


def add_rows(results: Results, choice: Choice, value: str, ours: Found, other: Found) -> None:
    for kind in choice.kinds:
        results.row(
            f"{choice.name}: {choice.chosen}, {kind}, peak reserved / peak active", "",
            [ours.ratios[kind]], [other.ratios[kind]], value,
        )  # fmt: skip
        if choice.file != "base/config.c":
            results.row(
                f"{choice.name}: {choice.chosen}, {kind}, pages made and mapped", "",
                [ours.pages[kind]], [other.pages[kind]], value,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [choice.name for choice in CHOICES]
    parser.add_argument("files", metavar="FILE", type=Path, nargs="*", help="what to replay")
    parser.add_argument("--only", choices=names, action="append", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="the choices, and measure nothing")
    parser.add_argument("--measure", metavar="KINDS", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    if options.measure:
        found = measure(options.measure.split(","), options.files)
        print(json.dumps({"ratios": found.ratios, "pages": found.pages}))
        return 0
    if options.list:
        for choice in CHOICES:
            print(f"{choice.name}: {choice.chosen}; else {', '.join(choice.alternatives)}")
        return 0
    results = Results("choices", options.out)
    results.describe(
        {"gpu": "none: the simulated device", "driver": "none", "torch": "none",
         "machine": platform.machine()}
    )  # fmt: skip
    try:
        files = options.files or traces()
        ours = replayed(None, "what it has", BOTH, files)
        for choice in CHOICES:
            if options.only and choice.name not in options.only:
                continue
            for value in choice.alternatives:
                other = replayed(choice, value, choice.kinds, files)
                add_rows(results, choice, value, ours, other)
    except (ChoiceError, GrowthError) as error:
        print(f"choices.py: {error}")
        return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
