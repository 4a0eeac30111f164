#!/usr/bin/env python3
"""Takes result files that were made on another machine into benchmarks/results.

    python benchmarks/take.py DIR            # what tools/gpu --results DIR left, lanes and all
    python benchmarks/take.py FILE.json ...  # of the topic that the file is named after

Rows take the place of all rows of their names; runs of which no row is left go.
What was measured last wins. Nothing is taken where a run has no commit to be repeated
from, or tiny sizes, or where a file is named after no topic. `python benchmarks/readme.py`
writes the README's figures then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from common import RESULTS, add_to, read
from topics import TOPICS


def found_in(path: Path) -> Iterator[Path]:
    """The result files of a folder, whatever else is there, or the one file."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*.json")):
        with contextlib.suppress(ValueError, TypeError):
            if {"rows", "runs"} <= set(json.loads(file.read_text())):
                yield file


def take(paths: Iterable[Path], into: Path = RESULTS) -> list[str]:
    """Adds result files to those in `into`; their topics. Raises SystemExit, and takes
    nothing, for a file that is none, or of a commit that nobody has."""
    files = [file for path in paths for file in found_in(path)]
    missing = [str(file) for file in files if not file.exists()]
    if missing or not files:
        raise SystemExit(f"no result file: {', '.join(missing) or 'nothing was found'}")
    made = [(file, *read(file)) for file in files]
    for file, _, runs in made:
        if file.stem not in TOPICS:
            raise SystemExit(f"{file}: there is no topic {file.stem!r}; name it TOPIC.json")
        for run in runs:
            if run.get("settings", {}).get("small"):
                raise SystemExit(f"{file}: measured with --small, which tries a benchmark")
            if run["commit"].endswith("+changes") or run["commit"] == "unknown":
                raise SystemExit(
                    f"{file}: measured at {run['commit']}, which nobody else has; measure at a "
                    "commit, named by ESPER_COMMIT where there is no .git"
                )
    made.sort(key=lambda one: max((run["time"] for run in one[2]), default=""))
    for file, rows, runs in made:
        add_to(into / file.name, rows, runs)
    return sorted({file.stem for file in files})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="take.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="DIR|FILE")
    for topic in take(parser.parse_args().paths):
        print(f"{topic}: taken")


if __name__ == "__main__":
    main()
