"""An FSDP-like pipeline: weights are gathered on one stream and used on another.

    pipeline.py                  # layers of 32 MiB, then layers of 512 MiB
    pipeline.py --layers large   # those of 512 MiB alone

48 layers, or 8 large ones. Each layer's weight, 4096 x 4096 in bf16 (32 MiB; large:
16384 x 16384, 512 MiB), is concatenated from two shards on a communication stream, layer
i+1's before layer i is used. The compute stream waits for it and computes x = tanh(x @ w),
x of 8192 x 4096 (large: 2048 x 16384).
The weight is dropped right after; what keeps its memory until it was read is
what is compared:

  record_stream  native's own: held until everything that is queued on the
                 compute stream by then is done
  recipe         the hand-written one: an event after the use, the two latest
                 weights kept, and before the next gather the communication
                 stream waits for the oldest one's event and drops it
  record_use     one line, after the use; also with an allowance of 64 MiB
  views          the same in grad mode, where the weight is a view of what was gathered
  none           no protection: wrong, for reference
  automatic      nothing in the program; esper_alloc sees the uses

record_stream, record_use and automatic run under esper_alloc; record_stream and the recipe
under PyTorch's own allocator, too.

A round takes about 40 s with either, beside 15 s to start, and 40 GiB of the GPU.
Nobody waits within a measurement, so the host runs far ahead of the GPU. Peaks
are of PyTorch's active_bytes over what was active with only the shards there;
they include x and cuBLAS's workspace. Afterwards steps are run with x compared,
element by element, with that of a step in which each layer was waited for.

After each layer of a few steps in a row it is also noted what is active: the
README's picture, benchmarks/results/pipeline.svg, shows that (benchmarks/readme.py
draws it). Where there is no GPU,

    python benchmarks/pipeline.py --simulated

notes it on the simulated device. Nothing is computed there, and no work ends before
the steps are over, as if the host were infinitely far ahead.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import (
    NATIVE,
    OURS,
    ROOT,
    Case,
    Results,
    alternate_cases,
    machine,
    nothing_measurable,
    parser,
    report,
    use_allocator,
)
from turns import in_children, take_turns, turns_of_children

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
LAYERS = 48
WIDTH = 4096
ROWS = 8192
#: Layers, width and rows of x: as they are measured, and to try the script.
SHAPES = {
    "small": ((LAYERS, WIDTH, ROWS), (4, 256, 512)),
    "large": ((8, 16384, 2048), (3, 512, 128)),
}
LARGE_MIB = 512  # of a layer
ALLOWANCE = 128  # MiB, the default
WARM_STEPS = 2
TIMED_STEPS = 6
BLOCKS = 10  # of TIMED_STEPS steps each
CHECKED_STEPS = 3
PEAK = "peak active over base"
ON_SIM = f"{PEAK}, simulated device"

CASES = [
    Case("native, record_stream", NATIVE, ("--protection", "record_stream")),
    Case("native, recipe", NATIVE, ("--protection", "recipe")),
    Case("native, no protection", NATIVE, ("--protection", "none")),
    Case("esper_alloc, record_use", OURS, ("--protection", "record_use")),
    Case(
        "esper_alloc, record_use, allowance 64MiB",
        OURS,
        ("--protection", "record_use"),
        {"ESPER_ALLOC_ALLOWANCE": "64MiB"},
    ),
    Case("esper_alloc, record_use of views", OURS, ("--protection", "views")),
    Case("esper_alloc, record_stream", OURS, ("--protection", "record_stream")),
    Case(
        "esper_alloc, automatic uses",
        OURS,
        ("--protection", "none"),
        {"ESPER_ALLOC_USES": "automatic"},
    ),
    Case("esper_alloc, recipe", OURS, ("--protection", "recipe")),
]


class Pipeline:
    """The shards, the two streams, and one step over them."""

    def __init__(self, protection: str, layers: int, width: int, rows: int) -> None:
        import torch

        self.compute = torch.cuda.current_stream()
        self.comm = torch.cuda.Stream()
        self.random: torch.Generator | None = None
        # Large enough that x keeps its scale, so a wrong weight shows at the end.
        scale = 1.5 / width**0.5
        self.shards = [
            tuple(self.normal(scale, width // 2, width) for _ in range(2)) for _ in range(layers)
        ]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.base = torch.cuda.memory_stats()["active_bytes.all.current"]
        self.reserved_base = torch.cuda.memory_reserved()
        self.x = self.normal(1.0, rows, width)
        self.views = protection == "views"
        self.kept: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self.protect: Callable[[torch.Tensor], None] = {
            "record_stream": self._record_stream,
            "recipe": self._keep,
            "record_use": self._record_use,
            "views": self._record_use,
            "none": lambda w: None,
        }[protection]

    def normal(self, scale: float, *shape: int) -> torch.Tensor:
        """Numbers that are the same in each process."""
        import torch

        if self.random is None:
            self.random = torch.Generator("cuda").manual_seed(1)
        made = torch.randn(shape, generator=self.random, device="cuda", dtype=torch.bfloat16)
        return made.mul_(scale)

    def whole(self, layer: int) -> torch.Tensor:
        """A layer's weight, made on the current stream."""
        import torch

        return torch.cat(self.shards[layer])

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.tanh(x @ w)

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The whole weight, and the event after which it is there."""
        import torch

        with torch.cuda.stream(self.comm):
            while len(self.kept) >= 2:  # the recipe: drop the oldest on this stream
                oldest, used = self.kept.popleft()
                self.comm.wait_event(used)
                del oldest
            w = self.whole(layer)
            if self.views:
                w = w.view(w.shape)
            ready = torch.cuda.Event()
            ready.record(self.comm)
        return w, ready

    def step(self, wait: bool = False, after: Callable[[], None] | None = None) -> torch.Tensor:
        """x after all layers. `wait`: the host waits for the GPU after each; `after` is
        called after each."""
        import torch

        x = self.x
        coming = self.gather(0)
        for layer in range(len(self.shards)):
            w, ready = coming
            if layer + 1 < len(self.shards):
                coming = self.gather(layer + 1)
            self.compute.wait_event(ready)
            x = self.layer(x, w)
            self.protect(w)
            if wait:
                torch.cuda.synchronize()
            if after:
                after()
        return x

    def active(self) -> float:
        """MiB over what was active with only the shards there."""
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict()  # quick: the host shall stay ahead
        return (stats["active_bytes"]["all"]["current"] - self.base) / MIB

    def by_layer(self, steps: int) -> list[float]:
        """active() after each layer of so many steps, among which nobody waits."""
        found: list[float] = []
        for _ in range(steps):
            self.step(after=lambda: found.append(self.active()))
        return found

    def _record_stream(self, w: torch.Tensor) -> None:
        w.record_stream(self.compute)

    def _keep(self, w: torch.Tensor) -> None:
        import torch

        used = torch.cuda.Event()
        used.record(self.compute)
        self.kept.append((w, used))

    def _record_use(self, w: torch.Tensor) -> None:
        import esper_alloc

        esper_alloc.record_use(w, self.compute)


class SimulatedPipeline(Pipeline):
    """The same memory on the same streams, on the simulated device: work that takes a while
    stands for what is computed."""

    def normal(self, scale: float, *shape: int) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def whole(self, layer: int) -> torch.Tensor:
        halves = self.shards[layer]
        w = halves[0].new_empty((len(halves) * halves[0].shape[0], *halves[0].shape[1:]))
        self.work(self.comm)
        return w

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.new_empty((x.shape[0], w.shape[1]))
        self.work(self.compute)
        return x

    @staticmethod
    def work(stream: torch.cuda.Stream) -> None:
        importlib.import_module("simulated").work(stream)


def measure(allocator: str, protection: str, layers: str, small: bool) -> dict:
    """One process: ms a step, and MiB.

    step_ms: median over the blocks of steps.
    peak_over_base_mib: active memory at its highest, less the shards.
    reserved_mib: the same of what was taken from the device.
    by_layer: active memory over the shards after each layer of TIMED_STEPS steps.
    wrong: elements of x that differ from those of the step that waited.
    """
    use_allocator(allocator)
    import torch

    with torch.set_grad_enabled(protection == "views"):
        job = Pipeline(protection, *SHAPES[layers][small])
        for _ in range(WARM_STEPS):
            job.step()
        torch.cuda.synchronize()
        times = []
        for _ in range(2 if small else BLOCKS):
            begin = time.perf_counter()
            for _ in range(TIMED_STEPS):
                job.step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3 / TIMED_STEPS)
        stats = torch.cuda.memory_stats()
        by_layer = job.by_layer(TIMED_STEPS)
        wanted = job.step(wait=True)
        if float(wanted.float().square().mean()) < 0.01:
            raise RuntimeError("x vanished on the way: a wrong weight would not show in it")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        (job.step() != wanted).sum()  # loads what the check needs
        torch.cuda.synchronize()
        for _ in range(CHECKED_STEPS):
            wrong += (job.step() != wanted).sum()
        return {
            "machine": machine(),
            "step_ms": statistics.median(times),
            "peak_over_base_mib": (stats["active_bytes.all.peak"] - job.base) / MIB,
            "reserved_mib": (stats["reserved_bytes.all.peak"] - job.reserved_base) / MIB,
            "by_layer": by_layer,
            "wrong": int(wrong),
        }


def measure_simulated(protection: str, small: bool) -> dict:
    """The peak, and active memory after each layer, on the simulated device."""
    sys.path.insert(0, str(ROOT / "tests" / "shim"))
    importlib.import_module("simulated")  # before torch; it chooses the allocator, too
    import torch

    with torch.no_grad():
        job = SimulatedPipeline(protection, *SHAPES["small"][small])
        by_layer = job.by_layer(TIMED_STEPS)
        stats = torch.cuda.memory_stats()
    return {
        "machine": {
            "gpu": "none: the simulated device", "driver": "none", "torch": torch.__version__,
        },
        "peak_over_base_mib": (stats["active_bytes.all.peak"] - job.base) / MIB,
        "by_layer": by_layer,
    }  # fmt: skip


def conduct_simulated(out: Path | None, extra: Sequence[str]) -> bool:
    """Adds the row of the simulated device to the result file."""
    sys.path.insert(0, str(ROOT / "tests" / "shim"))
    simulation = importlib.import_module("build")
    with tempfile.TemporaryDirectory() as folder:
        environment = simulation.environment(simulation.build(Path(folder)))
        environment["SIM_CAPACITY_MB"] = "32768"
        environment["SIM_MAPS_PAGES"] = "1"
        cases = [
            dataclasses.replace(
                case,
                args=(*case.args, "--simulated", *extra),
                environment={**environment, "ESPER_SIMULATED_ALLOCATOR": case.allocator},
            )
            for case in CASES
            if case.name in ("native, record_stream", "esper_alloc, record_use")
        ]
        rounds = alternate_cases(__file__, cases, 1)
    results = Results("pipeline", out)
    results.describe(rounds[0]["esper_alloc, record_use"]["machine"])
    compare_peaks(results, ON_SIM, rounds)
    return results.save()


def compare_peaks(results: Results, name: str, rounds: Sequence[dict[str, Any]]) -> None:
    """The peak beside record_stream's, and both by layer as the first round had them."""
    ours, peer = "esper_alloc, record_use", "native, record_stream"
    results.compare(name, "MiB", rounds, "peak_over_base_mib", ours, peer)
    both = [one for one in rounds if ours in one and peer in one]
    if both:
        results.rows[-1]["ours_by_layer"] = both[0][ours]["by_layer"]
        results.rows[-1]["peer_by_layer"] = both[0][peer]["by_layer"]


Rounds = Sequence[dict[str, dict[str, Any]]]
OURS_MARKED, RECIPE = "esper_alloc, record_use", "native, recipe"
VIEWS, TIGHT = "esper_alloc, record_use of views", "esper_alloc, record_use, allowance 64MiB"
RECORD_STREAM, AUTOMATIC = "esper_alloc, record_stream", "esper_alloc, automatic uses"
#: The recipe's 384 MiB and half of the allowance.
ACTIVE_GOAL = 448
#: Title, figure and unit.
STEP = ("step time", "step_ms", "ms")
ACTIVE = (PEAK, "peak_over_base_mib", "MiB")
RESERVED = ("reserved over base", "reserved_mib", "MiB")
WRONG = ("elements of x that differ from those of a step that waited", "wrong", "elements")
#: What is compared of which case with which peer, and the goal. Rows of the case that says
#: record_use alone have no title of their own.
Wanted = tuple[str, str, tuple[str, str, str], str, float | None, str]
WANTED: dict[str, list[Wanted]] = {
    "small": [
        ("", OURS_MARKED, STEP, RECIPE, 1.01, "mean_ratio"),
        ("", OURS_MARKED, STEP, "native, record_stream", None, "ratio"),
        ("", OURS_MARKED, STEP, "native, no protection", None, "ratio"),
        ("", OURS_MARKED, STEP, "esper_alloc, recipe", None, "ratio"),
        ("", OURS_MARKED, ACTIVE, RECIPE, ACTIVE_GOAL, "ours"),
        ("", OURS_MARKED, ACTIVE, "native, no protection", None, "ratio"),
        ("", OURS_MARKED, ACTIVE, "esper_alloc, recipe", None, "ratio"),
        ("", OURS_MARKED, RESERVED, RECIPE, ALLOWANCE, "difference"),
        ("", OURS_MARKED, RESERVED, "native, record_stream", None, "ratio"),
        ("", OURS_MARKED, RESERVED, "esper_alloc, recipe", None, "ratio"),
        ("", OURS_MARKED, WRONG, RECIPE, 0, "ours"),
        ("", OURS_MARKED, WRONG, "native, record_stream", 0, "ours"),
        ("", OURS_MARKED, WRONG, "native, no protection", None, "ratio"),
        *(
            (title, case, figure, RECIPE, goal, of)
            for title, case in (
                ("views, grad mode: ", VIEWS),
                ("record_stream: ", RECORD_STREAM),
                ("automatic uses: ", AUTOMATIC),
            )
            for figure, goal, of in (
                (STEP, 1.01, "mean_ratio"),
                (ACTIVE, ACTIVE_GOAL, "ours"),
                (RESERVED, ALLOWANCE, "difference"),
                (WRONG, 0, "ours"),
            )
        ),
        ("allowance 64MiB: ", TIGHT, STEP, RECIPE, 1.01, "mean_ratio"),
        ("allowance 64MiB: ", TIGHT, ACTIVE, RECIPE, 64, "difference"),
        # The recipe as it stands, on ours beside on native.
        ("recipe untouched: ", "esper_alloc, recipe", STEP, RECIPE, None, "ratio"),
        ("recipe untouched: ", "esper_alloc, recipe", ACTIVE, RECIPE, None, "ratio"),
        ("recipe untouched: ", "esper_alloc, recipe", RESERVED, RECIPE, None, "ratio"),
    ],
    "large": [
        *(
            (f"layers of {LARGE_MIB} MiB{title}: ", case, figure, RECIPE, goal, of)
            for title, case in (
                ("", OURS_MARKED),
                (", views", VIEWS),
                (", record_stream", RECORD_STREAM),
                (", automatic uses", AUTOMATIC),
                (", allowance 64MiB", TIGHT),
            )
            for figure, goal, of in (
                (STEP, 1.01 if case != TIGHT else None, "mean_ratio"),
                (ACTIVE, LARGE_MIB if case != TIGHT else None, "difference"),
                (RESERVED, None, "ratio"),
                (WRONG, 0, "ours"),
            )
        ),
        (f"layers of {LARGE_MIB} MiB: ", OURS_MARKED, STEP, "native, record_stream", None, "ratio"),
        (f"layers of {LARGE_MIB} MiB: ", OURS_MARKED, ACTIVE, "native, record_stream", None, "ratio"),
    ],
}  # fmt: skip


def add_rows(results: Results, layers: str, rounds: Rounds) -> None:
    for title, case, (name, key, unit), peer, goal, of in WANTED[layers]:
        results.compare(title + name, unit, rounds, key, case, peer, goal, of)
    if layers == "small":
        compare_peaks(results, PEAK, rounds)


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=6)
    arguments.add_argument("--protection", default="record_use")
    arguments.add_argument("--layers", choices=SHAPES, action="append", help="default: both")
    arguments.add_argument("--small", action="store_true", help="tiny layers: to try the script")
    arguments.add_argument(
        "--simulated", action="store_true", help="only memory by layer, on the simulated device"
    )
    options = arguments.parse_args()
    extra = ("--small",) if options.small else ()
    sizes = options.layers or list(SHAPES)
    if options.worker and options.simulated:
        report(measure_simulated(options.protection, options.small))
        return 0
    if options.worker:
        asked = (options.worker, options.protection, sizes[0], options.small)
        take_turns(in_children(options.worker, lambda: measure(*asked)))
        return 0

    if options.simulated:
        return 0 if conduct_simulated(options.out, extra) else 1
    if nothing_measurable():
        return 1
    results = Results("pipeline", options.out)
    begin = time.monotonic()
    for index, layers in enumerate(sizes):
        more = ("--layers", layers, *extra)
        cases = [dataclasses.replace(case, args=(*case.args, *more)) for case in CASES]
        left = (options.seconds - (time.monotonic() - begin)) / (len(sizes) - index)
        rounds = turns_of_children(__file__, cases, options.rounds, seconds=left)
        found = [one[OURS_MARKED] for one in rounds if OURS_MARKED in one]
        if not found:
            print(f"layers {layers}: nothing was measured with record_use under esper_alloc")
            return 1
        if results.run is None:
            results.describe(found[0]["machine"])
        add_rows(results, layers, rounds)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
