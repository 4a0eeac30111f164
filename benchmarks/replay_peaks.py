"""Peak reserved over peak active of recorded jobs, replayed with each kind of segments.

    replay_peaks.py                      # the traces that come along
    replay_peaks.py FILE...              # others: what _dump_snapshot() wrote

Runs on any machine, on the simulated device. Each kind of segments is a column,
beside what the recording allocator itself reserved; a line for each device of each
file, and the sum of all. ESPER_TRACES names a folder of further traces.

The result file has a row for each kind and recording: the replayed peak of
reserved bytes over the recorded peak of active ones. tests/replay/test_replay.py has the
bounds that these ratios may not exceed.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import MIB, ROOT, Results

from esper_alloc.replay import replay
from esper_alloc.replay.snapshot import SnapshotError

RECORDED = "recorded"


@dataclass(frozen=True)
class Line:
    """One recording: bytes; `reserved` by kind of segments, RECORDED for the recording's own."""

    name: str
    active: int
    reserved: dict[str, int]

    def ratio(self, column: str) -> float:
        return self.reserved[column] / self.active


def traces() -> list[Path]:
    """The recorded jobs that come along, and those in $ESPER_TRACES: of two with the same
    name the first."""
    folders = [ROOT / "examples" / "traces", ROOT / "tests" / "traces"]
    if os.environ.get("ESPER_TRACES"):
        folders.append(Path(os.environ["ESPER_TRACES"]))
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.pickle.gz")):
            found.setdefault(path.name, path)
    return list(found.values())


def measure(paths: Sequence[Path | str], kinds: Sequence[replay.Segments]) -> list[Line]:
    """Replays every recording with every kind of segments. Raises SnapshotError, ReplayError."""
    lines = []
    for path in paths:
        recordings = replay.load_recordings(path)
        for recording in recordings:
            name = Path(path).name.split(".")[0]
            if len(recordings) > 1:
                name += f", device {recording.history.device}"
            reserved = {RECORDED: recording.recorded.peak_reserved}
            for kind in kinds:
                reserved[kind] = replay.replay(recording, kind).peak_reserved
            lines.append(Line(name, recording.recorded.peak_active, reserved))
    return lines


def total(lines: Sequence[Line]) -> Line:
    """The sum of all lines, as one."""
    columns = lines[0].reserved
    reserved = {column: sum(line.reserved[column] for line in lines) for column in columns}
    return Line("all", sum(line.active for line in lines), reserved)


def table(lines: Sequence[Line]) -> str:
    """A line for each recording: peak active in MiB, and the ratio in each column."""
    columns = list(lines[0].reserved)
    rows = [["", "peak active", *columns]]
    rows += [
        [line.name, f"{line.active / MIB:,.1f} MiB", *(f"{line.ratio(c):.4f}" for c in columns)]
        for line in lines
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    )


def add_rows(results: Results, lines: Sequence[Line]) -> None:
    for line in lines:
        for kind in line.reserved:
            if kind != RECORDED:
                results.row(
                    f"{line.name}: peak reserved, replayed {kind}", "MiB",
                    [line.reserved[kind] / MIB], [line.active / MIB], "peak active",
                )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", metavar="FILE", nargs="*", help="snapshots; default: as above")
    parser.add_argument(
        "--segments", choices=replay.SEGMENTS, action="append", help="default: both kinds"
    )
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    try:
        lines = measure(options.files or traces(), options.segments or replay.SEGMENTS)
    except (SnapshotError, replay.ReplayError) as error:
        print(f"replay_peaks.py: {error}")
        return 2
    if not lines:
        print("replay_peaks.py: there is nothing to replay")
        return 2
    lines.append(total(lines))
    print(table(lines))
    results = Results("replay_peaks", options.out)
    results.describe(
        {"gpu": "none: the simulated device", "driver": "none", "torch": "none",
         "machine": platform.machine()}
    )  # fmt: skip
    add_rows(results, lines)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
