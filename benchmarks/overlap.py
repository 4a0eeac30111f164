"""A pipeline of copies and computation: does waiting for memory cost it its overlap?

A tensor is copied in on one stream, six matrix products run over it on a second, and the result
is copied out on a third. Each tensor is marked where it is used last, and dropped at once. The
host waits after every 8 batches. Nothing else bounds how many tensors are under way, so an
allocator that holds the host back shortens the pipeline.

  small   tensors of 4 to 64 MiB, three streams
  four    the same, and every other batch is computed on a fourth stream
  large   tensors of 256 MiB to 1 GiB, three streams
  four-large

Native marks by record_stream, ours by record_use, by record_stream, and not at all, under
automatic uses; with --allowances also with other allowances than the default. Sizes are drawn
anew for each batch, the same for everybody.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from common import (
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    machine,
    nothing_measurable,
    parser,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
WIDTH = 1024
BATCHES = 8  # of a step
PRODUCTS = 6
#: The least and the most MiB of a tensor, streams that compute, steps in a block, blocks.
PIPELINES = {
    "small": (4, 64, 1, 40, 3),
    "four": (4, 64, 2, 40, 3),
    "large": (256, 1024, 1, 12, 3),
    "four-large": (256, 1024, 2, 12, 3),
}
DEFAULT = "esper_alloc"
OTHERS = {f"esper_alloc, allowance {one}": one for one in ("0", "256MiB", "off")}
AUTOMATIC = "esper_alloc, automatic uses"
RECORD_STREAM = "esper_alloc, record_stream"
NATIVE_MARKS = "native, record_stream"


class Pipeline:
    """The streams, the host's memory, and one step over them."""

    def __init__(self, marks: str, least: int, most: int, computing: int) -> None:
        import torch

        self.least, self.most, self.marks = least, most, marks
        self.copy_in, self.copy_out = torch.cuda.Stream(), torch.cuda.Stream()
        self.compute = [torch.cuda.Stream() for _ in range(computing)]
        rows = most * MIB // (2 * WIDTH)
        self.source = torch.zeros((rows, WIDTH), dtype=torch.bfloat16, pin_memory=True)
        self.target = torch.empty_like(self.source, pin_memory=True)
        self.weight = torch.eye(WIDTH, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        self.drawn = random.Random(1)

    def mark(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        if self.marks == "record_use":
            import esper_alloc

            esper_alloc.record_use(tensor, stream)
        elif self.marks == "record_stream":
            tensor.record_stream(stream)

    def batch(self, index: int) -> None:
        import torch

        rows = self.drawn.randint(self.least, self.most) * MIB // (2 * WIDTH)
        compute = self.compute[index % len(self.compute)]
        with torch.cuda.stream(self.copy_in):
            x = torch.empty((rows, WIDTH), dtype=torch.bfloat16, device="cuda")
            x.copy_(self.source[:rows], non_blocking=True)
        compute.wait_stream(self.copy_in)
        with torch.cuda.stream(compute):
            y = torch.empty_like(x)
            for _ in range(PRODUCTS):
                torch.mm(x, self.weight, out=y)
        self.mark(x, compute)
        del x
        self.copy_out.wait_stream(compute)
        with torch.cuda.stream(self.copy_out):
            self.target[:rows].copy_(y, non_blocking=True)
        self.mark(y, self.copy_out)

    def step(self) -> None:
        import torch

        for index in range(BATCHES):
            self.batch(index)
        torch.cuda.synchronize()


def measure(allocator: str, marks: str, pipeline: str, small: bool) -> dict:
    """One process: ms a step, MiB reserved at the most over what was there before."""
    use_allocator(allocator)
    import torch

    least, most, computing, steps, blocks = PIPELINES[pipeline]
    if small:
        least, most, steps, blocks = 1, 4, 1, 2
    with torch.no_grad():
        job = Pipeline(marks, least, most, computing)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_reserved()
        for _ in range(steps):
            job.step()
        times = []
        for _ in range(blocks):
            begin = time.perf_counter()
            for _ in range(steps):
                job.step()
            times.append((time.perf_counter() - begin) * 1e3 / steps)
        return {
            "machine": machine(),
            "step_ms": statistics.mean(times),
            "reserved_mib": torch.cuda.max_memory_reserved() / MIB - base / MIB,
        }


def add_rows(results: Results, pipeline: str, cases: Sequence[str], rounds: Rounds) -> None:
    for peer, step_goal, memory_goal in (
        (NATIVE_MARKS, 1.01, 0.55),
        *((name, None, None) for name in OTHERS),
    ):
        if peer not in cases:
            continue
        results.compare(
            f"{pipeline}: step time", "ms", rounds, "step_ms", DEFAULT, peer, step_goal,
            "mean_ratio",
        )  # fmt: skip
        results.compare(
            f"{pipeline}: peak reserved", "MiB", rounds, "reserved_mib", DEFAULT, peer,
            memory_goal, "ratio",
        )  # fmt: skip
    for title, case in (("record_stream", RECORD_STREAM), ("automatic uses", AUTOMATIC)):
        results.compare(
            f"{pipeline}, {title}: step time", "ms", rounds, "step_ms", case, NATIVE_MARKS, 1.01,
            "mean_ratio",
        )  # fmt: skip
        results.compare(
            f"{pipeline}, {title}: peak reserved", "MiB", rounds, "reserved_mib", case,
            NATIVE_MARKS, 0.55, "ratio",
        )  # fmt: skip


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=5)
    arguments.add_argument("--pipeline", choices=PIPELINES, action="append", help="default: all")
    arguments.add_argument(
        "--marks", choices=("record_use", "record_stream", "none"), default="record_use"
    )
    arguments.add_argument(
        "--allowances", action="store_true", help=f"ours with {', '.join(OTHERS.values())}, too"
    )
    arguments.add_argument("--small", action="store_true", help="tiny tensors: to try the script")
    options = arguments.parse_args()
    pipelines = options.pipeline or list(PIPELINES)
    if options.worker:
        take_turns(
            in_children(
                options.worker,
                lambda: measure(options.worker, options.marks, pipelines[0], options.small),
            )
        )
        return 0

    if nothing_measurable():
        return 1
    results = Results("overlap", options.out)
    for pipeline in pipelines:
        extra = ("--pipeline", pipeline, *(("--small",) if options.small else ()))
        cases = [
            Case(NATIVE_MARKS, NATIVE, ("--marks", "record_stream", *extra)),
            Case(DEFAULT, OURS, extra),
            Case(RECORD_STREAM, OURS, ("--marks", "record_stream", *extra)),
            Case(AUTOMATIC, OURS, ("--marks", "none", *extra), {"ESPER_ALLOC_USES": "automatic"}),
        ]
        if options.allowances:
            cases += [
                Case(name, OURS, extra, {"ESPER_ALLOC_ALLOWANCE": one})
                for name, one in OTHERS.items()
            ]
        if not results.of_rounds(
            partial(
                turns_of_children, __file__, cases, options.rounds,
                seconds=options.seconds / len(pipelines),
            ),
            partial(add_rows, results, pipeline, [case.name for case in cases]),
            ours=DEFAULT,
        ):  # fmt: skip
            print(f"{pipeline}: nothing was measured")
            results.complete = False
    return 0 if results.run is not None and results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
