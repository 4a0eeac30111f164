"""What it costs to put memory to sleep and to wake it, and what is as it was afterwards.

    python benchmarks/sleep.py [--part bandwidth] [--gib 20] [--cycles 6]
    python benchmarks/sleep.py --part bandwidth --saver-wheel torch_memory_saver-....whl
    python benchmarks/sleep.py --rounds 0 --plot sleep.svg  # draws what the result file has

Each part can be measured alone; by default all are.

bandwidth: weights and optimizer state of a few hundred tensors, and the private pools of two CUDA
graphs, together --gib, sleep and wake --cycles times in one process. Between the cycles the same
process copies as many bytes from the device to pinned memory and back: the plain copy, through
--plain-gib of pinned memory. Where the package torch_memory_saver is installed, or its wheel is
named, a process of its own pauses and resumes the same tensors, and keeps its host memory for the
next time, too.

  sleep, wake    GiB/s of live bytes from the second cycle on, over the plain copy (goal: 90%)
  first sleep    which pins the host memory
  nothing        keep="nothing": seconds, over giving the same memory back to the driver once it is
                 free (goal: 1.1)
  left           device memory while asleep beyond what the process had before (goal: 64 MiB at most)
  host           pinned host memory over live bytes (goal: 1.02 at most)

graphs: captured before, and replayed after each of 100 cycles: replays whose outputs differ in a
bit (goal: none).

training: GPT-2 that sleeps after each step, beside one that does not: losses that differ (goal:
none), pinned host memory over live bytes (goal: 1.02 at most), and seconds of a sleep and a wake.

picture: examples/ppo_sleep.py, device memory over time: the most that its halves hold at a time,
over what both are together. --plot draws it (needs matplotlib).

turns: two processes take 50 turns on a device that has room for one of them: turns without memory
(goal: none), and what a turn takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from common import (
    MIB,
    NATIVE,
    OURS,
    RESULTS,
    ROOT,
    Case,
    Results,
    WorkerFailed,
    alternate_cases,
    choose_allocator,
    column,
    device_used_mib,
    machine,
    nothing_measurable,
    nvidia_smi_used_mib,
    parser,
    read,
    report,
    run_worker,
)

SAVER = "torch_memory_saver"
PLAIN = "plain pinned copy"
GIB = 1 << 30
PIECE = 256 * MIB  # of the plain copy: a chunk of sleep's pinned memory
GRAPHS = 2
GRAPH_CYCLES = 100
STEPS = 12  # of training
TURNS = 50
PARTS = ("bandwidth", "graphs", "training", "turns", "picture")
EXAMPLE = ROOT / "examples" / "ppo_sleep.py"
PICTURE_ROUNDS, PICTURE_SAMPLES = 12, 500
PICTURE_ROW = "PPO in turns: device memory of trainer and engine"


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


def make_graphs() -> list[tuple[Any, Any, Any, Any]]:
    """Graphs with private pools of their own: (graph, input, output, what a replay gave)."""
    import torch

    made = []
    for i in range(GRAPHS):
        x = torch.full((64 * MIB // 4,), float(i + 1), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2 + 1).sqrt()
        graph.replay()
        made.append((graph, x, y, y.clone()))
    return made


class PlainCopy:
    """As many bytes out and in again, through `room` bytes of pinned memory, a piece after the other.

    Pinning takes far longer than copying, so there is less of it than of tensors. That makes the
    copies no faster as long as it is several times as large as the processor's caches, 1 GiB at
    most: by the time that a piece has its turn again, the others have taken its place there. It is
    pinned in chunks as large as those of sleep, by the same thread, so it lies as near to the GPU.
    """

    def __init__(self, size: int, room: int) -> None:
        import torch

        self.device = torch.empty(PIECE, device="cuda", dtype=torch.uint8)
        self.count = max(size // PIECE, 1)
        self.host = [
            torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            for _ in range(min(max(room // PIECE, 1), self.count))
        ]

    def pieces(self) -> Iterator[Any]:
        return islice(cycle(self.host), self.count)

    def out(self) -> None:
        for piece in self.pieces():
            piece.copy_(self.device, non_blocking=True)

    def back(self) -> None:
        for piece in self.pieces():
            self.device.copy_(piece, non_blocking=True)

    @property
    def bytes(self) -> int:
        return self.count * PIECE


def used_mib() -> float:
    """Of the device, as nvidia-smi says, or else the driver."""
    found = nvidia_smi_used_mib()
    return device_used_mib() if found is None else found


def warm_up() -> None:
    """Loads kernels and has PyTorch and the driver allocate what they keep."""
    import torch

    import esper_alloc

    with esper_alloc.tag("warm"):
        kept, graphs = make_tensors(64 * MIB), make_graphs()
    esper_alloc.sleep("warm")
    esper_alloc.wake("warm")
    for graph, _, y, before in graphs:
        graph.replay()
        torch.equal(y, before)
    del kept, graphs, graph, _, y, before
    torch.cuda.empty_cache()
    esper_alloc.trim_sleep()


def measure_ours(size: int, cycles: int, room: int) -> dict[str, Any]:
    import torch

    import esper_alloc

    choose_allocator(OURS)
    torch.zeros(1, device="cuda")
    plain = PlainCopy(size, room)
    warm_up()
    torch.cuda.synchronize()
    beside_mib = used_mib()
    with esper_alloc.tag("kept"):
        kept, graphs = make_tensors(size), make_graphs()
    expected = [float(x[-1]) for x in kept]
    found: dict[str, list[float]] = {"sleep": [], "wake": [], "out": [], "back": []}
    live = left_mib = 0.0
    for _ in range(cycles):
        done: list[Any] = []
        found["sleep"].append(seconds_of(lambda: done.append(esper_alloc.sleep("kept"))))
        left_mib = max(left_mib, used_mib() - beside_mib)
        live = float(done[0].kept)
        if done[0].stays:
            raise RuntimeError(f"some memory stays: {done[0].stays}")
        found["wake"].append(seconds_of(lambda: esper_alloc.wake("kept")))
        found["out"].append(seconds_of(plain.out))
        found["back"].append(seconds_of(plain.back))
        for one in graphs:
            one[0].replay()
        same = all(torch.equal(y, before) for _, _, y, before in graphs)
        if not same or [float(x[-1]) for x in kept] != expected:
            raise RuntimeError("contents are not what they were")
    host = esper_alloc.tag_stats()["kept"]["host_bytes"]
    nothing = [seconds_of(lambda: esper_alloc.sleep("kept", keep="nothing"))]
    nothing.append(seconds_of(lambda: esper_alloc.wake("kept")))
    del kept, graphs, one
    torch.cuda.synchronize()
    return {
        "machine": machine(),
        **rates(found, live, float(plain.bytes)),
        "first_sleep_s": found["sleep"][0],
        "nothing_sleep_s": nothing[0],
        "nothing_wake_s": nothing[1],
        "unmap_s": seconds_of(torch.cuda.empty_cache),
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
    """The same tensors in a region of torch_memory_saver's. Its graphs do not keep contents.

    A block of the region that goes back to the driver while its thread is in no region ends the
    process. So nothing here empties PyTorch's cache, and the worker leaves before the region does.
    """
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"  # no library is preloaded
    saver.retain_cpu_backup = True
    with saver.region(tag="kept", enable_cpu_backup=True):
        kept = make_tensors(size)
    found: dict[str, list[float]] = {"sleep": [], "wake": []}
    for _ in range(cycles):
        found["sleep"].append(seconds_of(lambda: saver.pause("kept")))
        found["wake"].append(seconds_of(lambda: saver.resume("kept")))
    live = float(sum(x.numel() * x.element_size() for x in kept))
    return {**rates(found, live, live), "first_sleep_s": found["sleep"][0]}


def measure_graphs() -> dict[str, Any]:
    """Replays after many cycles: how many of them have another bit somewhere."""
    import torch
    from torch import nn

    import esper_alloc

    choose_allocator(OURS)
    torch.manual_seed(0)
    square = torch.ones(64, 64, device="cuda")
    torch.mm(square, square)  # cuBLAS's workspace has no tag
    with esper_alloc.tag("graphs"), torch.no_grad():
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
        x = torch.randn(512, 1024, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
            z = y * 2 + x
    graph.replay()
    expected = y.clone(), z.clone()
    wrong = 0
    for _ in range(GRAPH_CYCLES):
        with esper_alloc.asleep("graphs") as result:
            if result.stays:
                raise RuntimeError(f"some memory stays: {result.stays}")
        graph.replay()
        wrong += not (torch.equal(y, expected[0]) and torch.equal(z, expected[1]))
    return {"machine": machine(), "wrong": float(wrong)}


def measure_training() -> dict[str, Any]:
    """The losses of GPT-2, asleep after each step and not."""
    import torch
    import train

    import esper_alloc

    choose_allocator(OURS)
    torch.use_deterministic_algorithms(True)
    found: dict[str, Any] = {"sleep_s": [], "wake_s": [], "host_share": 1.0}

    def losses(sleeps: bool) -> list[str]:
        torch.manual_seed(0)
        step, seen = train.gpt2(small=False), []
        for _ in range(STEPS):
            seen.append(step())
            if not sleeps:
                continue
            done: list[Any] = []
            found["sleep_s"].append(seconds_of(lambda: done.append(esper_alloc.sleep())))
            host = sum(one["host_bytes"] for one in esper_alloc.tag_stats().values())
            found["host_share"] = max(found["host_share"], host / done[0].kept)
            found["wake_s"].append(seconds_of(esper_alloc.wake))
        return [float(loss).hex() for loss in seen]

    plain, sleeping = losses(False), losses(True)
    if len(set(plain)) < STEPS // 2:
        raise RuntimeError(f"the losses hardly change: {plain}")
    return {
        "machine": machine(),
        "differing": float(sum(a != b for a, b in zip(plain, sleeping, strict=True))),
        "host_share": found["host_share"],
        "sleep_s": statistics.median(found["sleep_s"][1:]),
        "wake_s": statistics.median(found["wake_s"][1:]),
    }


def wait_for(file: Path, number: int) -> None:
    while not (file.exists() and int(file.read_text()) >= number):
        time.sleep(0.0005)


def measure_turns(size: int, folder: str, me: str) -> dict[str, Any]:
    """Takes turns with the other process. `a` first fills the device but for half as much again
    as one of them needs, once both have their contexts."""
    import torch

    import esper_alloc

    choose_allocator(OURS)
    first = me == "a"
    mine, theirs = Path(folder, me), Path(folder, "b" if first else "a")

    def tell(number: int) -> None:
        scratch = mine.with_suffix(".new")
        scratch.write_text(str(number))
        os.replace(scratch, mine)

    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    tell(0)
    wait_for(theirs, 0)
    ballast: list[Any] = []
    if first:
        free = torch.cuda.mem_get_info()[0] - size * 3 // 2
        with esper_alloc.tag("ballast"):
            ballast.append(torch.empty(max(free, 0), device="cuda", dtype=torch.uint8))
    kept: list[Any] = []
    wrong = short = 0
    seconds: list[float] = []
    for turn in range(TURNS):
        wait_for(theirs, turn if first else turn + 1)
        begin = time.perf_counter()
        if not kept:
            with esper_alloc.tag("kept"):
                kept = make_tensors(size)
            expected = [float(x[0]) for x in kept]
        else:
            try:
                esper_alloc.wake("kept")
            except torch.OutOfMemoryError:
                short += 1
        if not short:
            wrong += [float(x[0]) for x in kept] != expected
            wrong += len(esper_alloc.sleep("kept").stays)
            torch.cuda.empty_cache()
        seconds.append(time.perf_counter() - begin)
        tell(turn + 1)
    if wrong:
        raise RuntimeError(f"contents were not what they were, or memory stayed: {wrong} times")
    del ballast
    return {
        "machine": machine(),
        "short": float(short),
        "turn_s": statistics.median(seconds[1:]),
        "longest_s": max(seconds[1:]),
    }


def add_rows(results: Results, rounds: list[dict[str, dict[str, Any]]]) -> None:
    ours = [one[OURS] for one in rounds if OURS in one]
    for name, key, plain in (
        ("sleep", "sleep_gib_s", "out_gib_s"),
        ("wake", "wake_gib_s", "back_gib_s"),
    ):
        results.row(
            name, "GiB/s", column(ours, key), column(ours, plain), PLAIN, 0.9, "at_least"
        )  # fmt: skip
    results.row("sleep with keep='nothing'", "s", column(ours, "nothing_sleep_s"),
                column(ours, "unmap_s"), "giving free memory back", 1.1)  # fmt: skip
    results.row("device memory left asleep", "MiB", column(ours, "left_mib"),
                [0.0], "nothing", 64.0, "ours")  # fmt: skip
    results.row("host memory over live bytes", "", column(ours, "host_share"),
                [1.0], "live bytes", 1.02, "ours")  # fmt: skip
    for name, key in (
        ("wake after keep='nothing'", "nothing_wake_s"),
        ("first sleep, which pins host memory", "first_sleep_s"),
    ):
        kept = [1 / one["sleep_gib_s"] for one in ours]
        results.row(name, "s", column(ours, key), kept, "a GiB of a later sleep")
    if any(SAVER in one for one in rounds):
        for name, key in (("sleep", "sleep_gib_s"), ("wake", "wake_gib_s")):
            results.compare(name, "GiB/s", rounds, key, OURS, SAVER)
        results.compare("first sleep", "s", rounds, "first_sleep_s", OURS, SAVER)


def measure_picture() -> dict[str, Any]:
    """What the example says of its memory over time."""
    import torch

    torch.zeros(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.json")
        command = [sys.executable, str(EXAMPLE), "--rounds", str(PICTURE_ROUNDS)]
        subprocess.run([*command, "--samples", str(path)], check=True, stdout=sys.stderr)
        samples: list[dict[str, float]] = json.loads(path.read_text())
    return {
        "machine": machine(),
        "halves_mib": max(one["engine"] + one["trainer"] for one in samples),
        "both_mib": max(one["engine"] + one["trainer"] + one["asleep"] for one in samples),
        "samples": samples[:: len(samples) // PICTURE_SAMPLES + 1],
    }


def unpack(wheel: Path, folder: str) -> None:
    """Makes the package in a wheel importable for the workers."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    path = [folder, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in path if part)


def bandwidth(options: Any, results: Results) -> bool:
    how = ("--part", "bandwidth", "--gib", str(options.gib), "--cycles", str(options.cycles))
    how += ("--plain-gib", str(options.plain_gib))
    cases, left_out = [Case(OURS, OURS, how)], {}
    with tempfile.TemporaryDirectory() as folder:
        if options.saver_wheel:
            unpack(options.saver_wheel, folder)
        if options.saver_wheel or importlib.util.find_spec(SAVER):
            cases.append(Case(SAVER, NATIVE, (*how, "--saver")))
        else:
            left_out[SAVER] = "it is not installed (pip install torch_memory_saver)"
        return results.of_rounds(
            partial(alternate_cases, __file__, cases, options.rounds, seconds=options.seconds),
            partial(add_rows, results),
            left_out,
        )


def graphs(options: Any, results: Results) -> bool:
    found = alternate_cases(__file__, [Case(OURS, OURS, ("--part", "graphs"))], 1)[0]
    if not found:
        return False
    results.describe(found[OURS]["machine"])
    results.row(f"graph replays that differ, of {GRAPH_CYCLES} after a sleep", "",
                [found[OURS]["wrong"]], [0.0], "nothing", 0.0, "ours")  # fmt: skip
    return True


def training(options: Any, results: Results) -> bool:
    case = Case(OURS, OURS, ("--part", "training"), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    found = alternate_cases(__file__, [case], 1)[0]
    if not found:
        return False
    one = found[OURS]
    results.describe(one["machine"])
    results.row(f"GPT-2 asleep after each step: losses that differ, of {STEPS}", "",
                [one["differing"]], [0.0], "GPT-2 awake", 0.0, "ours")  # fmt: skip
    results.row("GPT-2: host memory over live bytes", "", [one["host_share"]], [1.0],
                "live bytes", 1.02, "ours")  # fmt: skip
    results.row("GPT-2: a sleep", "s", [one["sleep_s"]], [one["wake_s"]], "a wake")
    return True


def turns(options: Any, results: Results) -> bool:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        how = ("--part", "turns", "--turn-gib", str(options.turn_gib), "--folder", folder, "--me")
        both = [pool.submit(run_worker, __file__, OURS, (*how, me)) for me in ("a", "b")]
        try:
            found = [one.result() for one in both]
        except WorkerFailed as error:
            print(f"turns: {error}", flush=True)
            return False
    results.describe(found[0]["machine"])
    size = f"{options.turn_gib:g} GiB"
    results.row(f"two processes, {size} each, turns without memory, of {TURNS}", "",
                [sum(column(found, "short"))], [0.0], "nothing", 0.0, "ours")  # fmt: skip
    results.row(f"two processes, {size} each: a turn", "s", column(found, "turn_s"),
                column(found, "longest_s"), "the longest")  # fmt: skip
    return True


def picture(options: Any, results: Results) -> bool:
    found = alternate_cases(__file__, [Case(OURS, OURS, ("--part", "picture"))], 1)[0]
    if not found:
        return False
    one = found[OURS]
    results.describe(one["machine"])
    results.row(PICTURE_ROW, "MiB", [one["halves_mib"]], [one["both_mib"]], "both awake")
    results.rows[-1]["over_time"] = one["samples"]
    return True


def draw(options: Any) -> bool:
    """The picture of the result file's samples, as the example draws it."""
    rows, _ = read(options.out or RESULTS / "sleep.json")
    samples = [row["over_time"] for row in rows if row["name"] == PICTURE_ROW]
    if not samples:
        print("nothing is drawn: the result file has no samples (--part picture takes them)")
        return False
    spec = importlib.util.spec_from_file_location("ppo_sleep", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.draw(samples[0], options.plot)
    return True


def work(options: Any) -> dict[str, Any]:
    """What a worker reports."""
    size = int(options.gib * GIB)
    if options.part == "graphs":
        return measure_graphs()
    if options.part == "training":
        return measure_training()
    if options.part == "picture":
        return measure_picture()
    if options.part == "turns":
        return measure_turns(int(options.turn_gib * GIB), options.folder, options.me)
    if options.saver:
        return measure_saver(size, options.cycles)
    return measure_ours(size, options.cycles, int(options.plain_gib * GIB))


def missing(part: str) -> str | None:
    """What a part needs that is not here."""
    if part == "training" and not importlib.util.find_spec("transformers"):
        return "the package transformers is not installed"
    return None


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=PARTS, help="this one alone")
    arguments.add_argument("--gib", type=float, default=20.0, help="of tensors")
    arguments.add_argument("--plain-gib", type=float, default=5.0, help="pinned for the plain copy")
    arguments.add_argument("--cycles", type=int, default=6, help="of sleep and wake, two at least")
    arguments.add_argument("--turn-gib", type=float, default=8.0, help="of each of two processes")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="draws memory over time")
    arguments.add_argument("--saver-wheel", type=Path, metavar="FILE", help=f"of {SAVER}")
    for what in ("--saver", "--folder", "--me"):  # what a worker is told
        how: Any = {"action": "store_true"} if what == "--saver" else {}
        arguments.add_argument(what, help=argparse.SUPPRESS, **how)
    options = arguments.parse_args()
    if options.cycles < 2:
        arguments.error("--cycles: the first cycle pins host memory, so there must be two")
    if options.saver_wheel and not options.saver_wheel.is_file():
        arguments.error(f"--saver-wheel: there is no file {options.saver_wheel}")
    if options.worker:
        report(work(options))
        if options.saver:  # at the interpreter's exit the library would fail
            sys.stderr.flush()
            os._exit(0)
        return 0
    parts = () if options.plot and not options.rounds else PARTS
    if parts and nothing_measurable():
        return 1
    good = measure_parts(options, (options.part,) if parts and options.part else parts)
    return 0 if (not options.plot or draw(options)) and good else 1


def measure_parts(options: Any, parts: Sequence[str]) -> bool:
    """Each part's rows are saved as soon as it is over."""
    measure = {
        "bandwidth": bandwidth,
        "graphs": graphs,
        "training": training,
        "turns": turns,
        "picture": picture,
    }
    good = True
    for part in parts:
        results, lacking = Results("sleep", options.out), missing(part)
        if lacking:
            print(f"{part}: not measured, {lacking}")
        if lacking or not measure[part](options, results):
            print(f"{part}: nothing was measured")
            good = False
            continue
        good = results.save() and good
    return good


if __name__ == "__main__":
    raise SystemExit(main())
