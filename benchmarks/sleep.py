"""What it costs to put memory to sleep and to wake it.

    python benchmarks/sleep.py [--gib 20] [--cycles 6]

Weights and optimizer state of a few hundred tensors, and the private pools of two CUDA graphs,
together --gib, sleep and wake --cycles times in one process. Between the cycles the same process
copies as many bytes from the device to pinned memory and back, one piece after the other: the
plain copy. Where the package torch_memory_saver is installed, a process of its own pauses and
resumes the same tensors.

  sleep, wake    GiB/s of live bytes from the second cycle on, over the plain copy (goal: 90%)
  first sleep    which pins the host memory
  nothing        keep="nothing": seconds, for the record
  left           device memory while asleep beyond the context (goal: 64 MiB at most)
  host           pinned host memory over live bytes (goal: 1.02 at most)
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any

from common import (
    MIB,
    NATIVE,
    OURS,
    Case,
    Results,
    alternate_cases,
    choose_allocator,
    column,
    device_used_mib,
    machine,
    nothing_measurable,
    parser,
    report,
)

SAVER = "torch_memory_saver"
PLAIN = "plain pinned copy"
GIB = 1 << 30
PIECE = 256 * MIB  # of the plain copy
GRAPHS = 2


def seconds_of(work: Any) -> float:
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def make_tensors(size: int) -> list[Any]:
    """`size` bytes: for each parameter its weights and AdamW's two moments, of many sizes."""
    import torch

    made: list[Any] = []
    left, number = size, 0
    while left > 0:
        piece = min(left, (1 + number * 37 % 64) * MIB)
        made.append(torch.full((piece // 4,), float(number), device="cuda"))
        left -= piece
        number += 1
    return made


def make_graphs() -> list[tuple[Any, Any, Any]]:
    """Graphs with private pools of their own: (graph, output, what a replay gave)."""
    import torch

    made = []
    for i in range(GRAPHS):
        x = torch.full((64 * MIB // 4,), float(i + 1), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2 + 1).sqrt()
        graph.replay()
        made.append((graph, y, y.clone()))
    return made


class PlainCopy:
    """As many bytes out and in again, through pinned memory of the size of a piece."""

    def __init__(self, size: int) -> None:
        import torch

        self.count = max(size // PIECE, 1)
        self.device = torch.empty(PIECE, device="cuda", dtype=torch.uint8)
        self.host = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)

    def out(self) -> None:
        for _ in range(self.count):
            self.host.copy_(self.device, non_blocking=True)

    def back(self) -> None:
        for _ in range(self.count):
            self.device.copy_(self.host, non_blocking=True)

    @property
    def bytes(self) -> int:
        return self.count * PIECE


def measure_ours(size: int, cycles: int) -> dict[str, Any]:
    import torch

    import esper_alloc

    choose_allocator(OURS)
    torch.zeros(1, device="cuda")
    plain = PlainCopy(size)
    torch.cuda.synchronize()
    beside_mib = device_used_mib()
    with esper_alloc.tag("kept"):
        kept, graphs = make_tensors(size), make_graphs()
    expected = [float(x[-1]) for x in kept]
    found: dict[str, list[float]] = {"sleep": [], "wake": [], "out": [], "back": []}
    live = left_mib = 0.0
    for _ in range(cycles):
        done: list[Any] = []
        found["sleep"].append(seconds_of(lambda: done.append(esper_alloc.sleep("kept"))))
        left_mib = max(left_mib, device_used_mib() - beside_mib)
        live = float(done[0].kept)
        if done[0].stays:
            raise RuntimeError(f"some memory stays: {done[0].stays}")
        found["wake"].append(seconds_of(lambda: esper_alloc.wake("kept")))
        found["out"].append(seconds_of(plain.out))
        found["back"].append(seconds_of(plain.back))
        for graph, _, _ in graphs:
            graph.replay()
        same = all(torch.equal(y, before) for _, y, before in graphs)
        if not same or [float(x[-1]) for x in kept] != expected:
            raise RuntimeError("contents are not what they were")
    host = esper_alloc.tag_stats()["kept"]["host_bytes"]
    nothing = [seconds_of(lambda: esper_alloc.sleep("kept", keep="nothing"))]
    nothing.append(seconds_of(lambda: esper_alloc.wake("kept")))
    return {
        "machine": machine(),
        **rates(found, live, float(plain.bytes)),
        "first_sleep_s": found["sleep"][0],
        "nothing_sleep_s": nothing[0],
        "nothing_wake_s": nothing[1],
        "left_mib": left_mib,
        "host_share": host / live,
    }


def rates(found: dict[str, list[float]], live: float, copied: float) -> dict[str, float]:
    """GiB/s from the second cycle on."""
    return {
        f"{name}_gib_s": (copied if name in ("out", "back") else live)
        / GIB
        / statistics.median(seconds[1:])
        for name, seconds in found.items()
    }


def measure_saver(size: int, cycles: int) -> dict[str, Any]:
    """The same tensors in a region of torch_memory_saver's. Its graphs do not keep contents."""
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    with saver.region(tag="kept", enable_cpu_backup=True):
        kept = make_tensors(size)
    found: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(cycles):
        found["sleep"].append(seconds_of(lambda: saver.pause("kept")))
        found["wake"].append(seconds_of(lambda: saver.resume("kept")))
    live = float(sum(x.numel() * x.element_size() for x in kept))
    return {**rates(found, live, live), "first_sleep_s": found["sleep"][0]}


def add_rows(results: Results, rounds: list[dict[str, dict[str, Any]]]) -> None:
    ours = [one[OURS] for one in rounds if OURS in one]
    for name, key, plain in (
        ("sleep", "sleep_gib_s", "out_gib_s"),
        ("wake", "wake_gib_s", "back_gib_s"),
    ):
        results.row(
            name, "GiB/s", column(ours, key), column(ours, plain), PLAIN, 0.9, "at_least"
        )  # fmt: skip
    results.row("device memory left asleep", "MiB", column(ours, "left_mib"),
                [0.0], "nothing", 64.0, "ours")  # fmt: skip
    results.row("host memory over live bytes", "", column(ours, "host_share"),
                [1.0], "live bytes", 1.02, "ours")  # fmt: skip
    for name, key in (
        ("sleep with keep='nothing'", "nothing_sleep_s"),
        ("wake after keep='nothing'", "nothing_wake_s"),
        ("first sleep, which pins host memory", "first_sleep_s"),
    ):
        kept = [1 / one["sleep_gib_s"] for one in ours]
        results.row(name, "s", column(ours, key), kept, "a GiB of a later sleep")
    if any(SAVER in one for one in rounds):
        for name, key in (("sleep", "sleep_gib_s"), ("wake", "wake_gib_s")):
            results.compare(name, "GiB/s", rounds, key, OURS, SAVER)
        results.compare("first sleep", "s", rounds, "first_sleep_s", OURS, SAVER)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=20.0, help="of tensors")
    arguments.add_argument("--cycles", type=int, default=6, help="of sleep and wake, two at least")
    arguments.add_argument("--saver", action="store_true", help="what a worker measures")
    options = arguments.parse_args()
    if options.cycles < 2:
        arguments.error("--cycles: the first cycle pins host memory, so there must be two")
    size = int(options.gib * GIB)
    if options.worker:
        measure = measure_saver if options.saver else measure_ours
        report(measure(size, options.cycles))
        return 0
    if nothing_measurable():
        return 1
    how = ("--gib", str(options.gib), "--cycles", str(options.cycles))
    cases = [Case(OURS, OURS, how)]
    left_out = {}
    if importlib.util.find_spec(SAVER):
        cases.append(Case(SAVER, NATIVE, (*how, "--saver")))
    else:
        left_out[SAVER] = "it is not installed (pip install torch_memory_saver)"
    rounds = alternate_cases(__file__, cases, options.rounds, seconds=options.seconds)
    found = [one[OURS] for one in rounds if OURS in one]
    if not found:
        print("nothing was measured under esper_alloc")
        return 1
    results = Results("sleep", options.out)
    results.describe(found[0]["machine"], left_out)
    add_rows(results, rounds)
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
