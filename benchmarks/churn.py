"""What it costs to replace a block among many live ones, beside every peer.

In C++, on one stream: a block drawn at random is freed and another size asked for in
its place, again and again, among

  100 to 100,000 live blocks of 512 B to 8 MiB; small ones are more frequent, as
                 2^(9 + 14 u^2) with u uniform: 100,000 of them are about 40 GiB
  1,000,000      live blocks of 512 B to 64 KiB, each power of two as likely: 13 GiB

The time of a free and a malloc, and reserved over live bytes at the end. Goals: 0.3 of
native's time each, and growth no worse than logarithmic: among 100,000 blocks at most
2.5 times the time among 100. What would take more than three quarters of the device's
free memory is left out. Who is slow makes fewer replacements: of each setting six times
200,000 are made, but of none for longer than 0.3 s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    empty_cache,
    machine,
    memory_figures,
    parser,
    peers_here,
    peers_of,
    use_allocator,
)
from turns import CORES, in_children, measured_beside, take_turns

MIB = 1 << 20
ROUNDS = 5  # timed ones in a process
LONGEST = 0.3  # seconds of a round


@dataclass(frozen=True)
class Setting:
    """`live` blocks of 2^least to 2^most bytes, the exponent drawn by u^power."""

    live: int
    most: float
    power: float
    least: float = 9.0

    @property
    def name(self) -> str:
        top = 2**self.most
        size = f"{top // MIB:.0f} MiB" if top >= MIB else f"{top // 1024:.0f} KiB"
        return f"{self.live:,} live blocks up to {size}"

    def expected_bytes(self) -> float:
        """Of all live blocks together."""
        steps = 10_000
        exponents = (
            self.least + (self.most - self.least) * ((i + 0.5) / steps) ** self.power
            for i in range(steps)
        )
        return self.live / steps * math.fsum(2.0**one for one in exponents)


SETTINGS = (
    Setting(100, 23, 2),
    Setting(1_000, 23, 2),
    Setting(10_000, 23, 2),
    Setting(100_000, 23, 2),
    Setting(1_000_000, 16, 1),
)
FEW, MANY = SETTINGS[0], SETTINGS[3]


def measure(allocator: str, most: int, operations: int) -> dict[str, Any]:
    """ns a replacement, and reserved over live, of each setting of at most `most` blocks."""
    use_allocator(allocator)
    import loops
    import torch

    module = loops.load("churn")
    figures: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for one in SETTINGS:
        if one.live > most:
            continue
        free = torch.cuda.mem_get_info()[0]
        wanted = one.expected_bytes()
        if wanted > 0.75 * free:
            left_out[one.name] = f"needs {wanted / MIB:,.0f} MiB, {free / MIB:,.0f} are free"
            continue
        ns, live, reserved = module.churn(
            one.live, one.least, one.most, one.power, operations, ROUNDS, LONGEST
        )
        if math.isnan(reserved):  # of an allocator without PyTorch's statistics: its own
            reserved = memory_figures()["reserved_mib"] * MIB
        figures[f"{one.name}: ns"] = statistics.median(ns)
        figures[f"{one.name}: reserved"] = reserved / live
        empty_cache()
    return {"machine": machine(), "figures": figures, "left_out": left_out}


def add_rows(results: Results, rounds: Sequence[dict[str, dict[str, Any]]]) -> None:
    figures = [{case: found["figures"] for case, found in one.items()} for one in rounds]
    known = {key for one in figures for found in one.values() for key in found}
    for peer in peers_of(figures):
        for one in SETTINGS:
            ns, reserved = f"{one.name}: ns", f"{one.name}: reserved"
            if ns in known:
                title, goal = f"free and malloc among {one.name}", 0.3 if peer == NATIVE else None
                results.compare(title, "ns", figures, ns, OURS, peer, goal)
                results.compare(f"reserved / live, {one.name}", "", figures, reserved, OURS, peer)
    few, many = f"{FEW.name}: ns", f"{MANY.name}: ns"
    ours = [one[OURS] for one in figures if OURS in one]
    if few in known and many in known:
        results.row(
            f"free and malloc among {MANY.name}, growth",
            "ns",
            [one[many] for one in ours if many in one],
            [one[few] for one in ours if few in one],
            f"among {FEW.live}",
            math.log(MANY.live) / math.log(FEW.live),
        )


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--most", type=int, default=SETTINGS[-1].live, help="live blocks")
    arguments.add_argument(
        "--operations", type=int, default=200_000, help="replacements that are timed at once"
    )
    options = arguments.parse_args()
    if options.worker:
        of_one = partial(measure, options.worker, options.most, options.operations)
        take_turns(in_children(options.worker, of_one), CORES)
        return 0
    args = ("--most", str(options.most), "--operations", str(options.operations))
    peers, left_out = peers_here()
    cases = [Case(name, name, args) for name in (OURS, *peers)]
    results = Results("churn", options.out)

    def add(rounds: Rounds) -> None:
        for one in rounds:
            too_large = one[OURS]["left_out"] if OURS in one else {}
            if too_large and results.run:
                results.run["left_out"] = {**left_out, **too_large}
        add_rows(results, rounds)

    if not measured_beside(__file__, cases, options, "churn", add, results, left_out):
        return 1
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
