#!/usr/bin/env python3
"""How long freed memory stays pending in recorded histories, by the host's clock.

    python benchmarks/pending.py HISTORY...

A history is a file of ``torch.cuda.memory._dump_snapshot``. A free is pending
from its ``free_requested`` to its ``free_completed``, which come together where
no other stream uses the memory. Reuse order ``auto`` lets a stream wait for
another that is up to 3 ms further behind the host: the column of that name says
how many of the pending frees were over by then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from esper_alloc.replay.snapshot import SnapshotError, load_snapshot

AUTO_MS = 3
LIMITS_MS = (1, AUTO_MS, 10, 30)
#: Shorter ones waited for nobody: PyTorch writes the two entries one after the other.
LEAST_MS = 0.02


def pending_ms(entries: list[Any]) -> tuple[int, list[float]]:
    """Frees of one device's entries, and for each pending one how long it was, ms."""
    requested: dict[int, int] = {}
    frees, pending = 0, []
    for entry in entries:
        if entry["action"] == "free_requested":
            requested[entry["addr"]] = entry["time_us"]
        elif entry["action"] == "free_completed" and entry["addr"] in requested:
            frees += 1
            lasted = (entry["time_us"] - requested.pop(entry["addr"])) / 1000
            if lasted >= LEAST_MS:
                pending.append(lasted)
    return frees, sorted(pending)


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    head = "".join(f"{f'<= {limit} ms':>11}" for limit in LIMITS_MS)
    print(f"{'history, device':<40}{'frees':>9}{'pending':>9}{'median ms':>11}{head}")
    for path in sys.argv[1:]:
        try:
            traces = load_snapshot(path).traces
        except SnapshotError as error:
            print(error, file=sys.stderr)
            return 1
        for device, entries in enumerate(traces):
            frees, pending = pending_ms(entries)
            if not frees:
                continue
            row = f"{f'{Path(path).name}, {device}':<40}{frees:>9,}{len(pending):>9,}"
            if pending:
                row += f"{pending[len(pending) // 2]:>11.1f}"
                for limit in LIMITS_MS:
                    within = sum(lasted <= limit for lasted in pending)
                    row += f"{within / len(pending):>11.0%}"
            print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
