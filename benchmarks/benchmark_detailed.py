"""The simulator of examples/simulator.py: eager, compiled, and with CUDA graphs.

    python benchmarks/benchmark_detailed.py --sizes 256,512,1024 --device cuda --iterations 2
    python benchmarks/benchmark_detailed.py --sizes 256,512,1024 --device cpu --iterations 5
    python benchmarks/benchmark_detailed.py --sizes 256 --device cuda --unwrapped
    python benchmarks/benchmark_detailed.py --sizes 512 --device cuda --beside esper_alloc

One run makes an image from two angles, in two compiled functions of which the
second reads what the first returned. Times are of whole runs, launches and the
copies of cudagraph_outputs included, images checked against eager ones.

On CUDA: graphs with cudagraph_outputs beside eager and beside compiled without
graphs; bytes copied a run; how many sizes fail without the wrapper. On the CPU:
compiled, with the wrapper beside without it. ``--unwrapped`` runs the graphs
without the wrapper, measures nothing, and fails as they do. ``--beside`` runs all of
it under another allocator too, and adds rows of the graphs under both.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    ENVIRONMENTS,
    NATIVE,
    Results,
    WorkerFailed,
    column,
    machine,
    nothing_measurable,
    parser,
    report,
    run_worker,
    use_allocator,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

DTYPES = {"fp32": "float32", "fp64": "float64"}
SECONDS_PER_ITERATION = 0.4  # of each variant
BLOCKS = 20  # that the time of an iteration is cut into, the variants by turns


def simulator(size: int, options: argparse.Namespace, mode: str) -> Any:
    import torch
    from simulator import Simulator

    return Simulator(size, options.device, getattr(torch, DTYPES[options.dtype]), mode)


def angles(turn: int, options: argparse.Namespace) -> Any:
    import torch

    dtype = getattr(torch, DTYPES[options.dtype])
    return torch.tensor([0.001 * turn, -0.002 * turn], dtype=dtype, device=options.device)


def variants(size: int, options: argparse.Namespace) -> dict[str, Callable[[Any], Any]]:
    """What is compared, eager first."""
    from esper_alloc import cudagraph_outputs

    made = {"eager": simulator(size, options, "eager")}
    made["compiled"] = simulator(size, options, "default")
    if options.device == "cpu":
        made["wrapped"] = cudagraph_outputs(made["compiled"])
    else:
        made["graphs"] = cudagraph_outputs(simulator(size, options, "reduce-overhead"))
    return made


def check(made: dict[str, Callable[[Any], Any]], inputs: list[Any]) -> None:
    """Every variant's images are eager's, also after later runs. Warms everything."""
    import torch

    expected = [made["eager"](one) for one in inputs]
    scale = max(float(image.abs().max()) for image in expected)
    tolerance = scale * (2e-2 if expected[0].dtype == torch.float32 else 1e-9)
    for name, run in made.items():
        images = [run(one) for one in inputs]
        for image, wanted in zip(images, expected, strict=True):
            worst = float((image - wanted).abs().max())
            if not worst <= tolerance:
                raise SystemExit(f"{name}: an image is wrong by {worst:g} of {scale:g}")


def milliseconds(run: Callable[[Any], Any], inputs: list[Any], count: int, wait: Any) -> float:
    begin = time.perf_counter()
    for turn in range(count):
        run(inputs[turn % len(inputs)])
    wait()
    return (time.perf_counter() - begin) * 1e3 / count


def measure_size(size: int, options: argparse.Namespace) -> dict[str, float]:
    """Median ms a run of each variant, and bytes copied."""
    import torch

    wait = torch.cuda.synchronize if options.device == "cuda" else (lambda: None)
    torch._dynamo.reset()  # of the sizes before: there is a limit to recompilation
    inputs = [angles(turn, options) for turn in range(8)]
    block = SECONDS_PER_ITERATION * 1e3 / BLOCKS
    figures: dict[str, float] = {}
    with torch.no_grad():
        made = variants(size, options)
        check(made, inputs)
        counts = {
            name: max(1, int(block / milliseconds(run, inputs, 5, wait)))
            for name, run in made.items()
        }
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(options.iterations * BLOCKS):
            for name, run in made.items():
                times[name].append(milliseconds(run, inputs, counts[name], wait))
        figures = {name: statistics.median(found) for name, found in times.items()}
        if "graphs" in made:
            before = made["graphs"].counts.bytes
            image = made["graphs"](inputs[0])
            figures["bytes"] = made["graphs"].counts.bytes - before
            figures["image bytes"] = image.numel() * image.element_size()
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": about(options.device),
        "figures": {str(size): measure_size(size, options) for size in options.sizes},
    }


def fail(options: argparse.Namespace) -> dict[str, Any]:
    """How each size ends without the wrapper: the first line of the error, or ""."""
    import torch

    found = {}
    for size in options.sizes:
        torch._dynamo.reset()  # graphs too
        run = simulator(size, options, "reduce-overhead")
        found[str(size)] = ""
        try:
            with torch.no_grad():
                for turn in range(4):
                    run(angles(turn, options))
            torch.cuda.synchronize()
        except RuntimeError as error:
            found[str(size)] = str(error).split(". Stack trace")[0].splitlines()[0]
    return {"machine": about(options.device), "errors": found}


def about(device: str) -> dict[str, str]:
    if device == "cuda":
        return machine()
    import torch

    name = f"none: CPU {platform.machine()}, {torch.get_num_threads()} threads"
    return {"gpu": name, "driver": "none", "torch": torch.__version__}


# --- the conducting side ---------------------------------------------------


def sentence(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """When each wins, from the figures themselves."""
    names = {"eager": "eager", "compiled": "compiled without graphs", "graphs": "graphs"}
    winners: dict[str, list[str]] = {}
    for dtype, figures in found.items():
        for size, one in figures.items():
            best = min(names, key=lambda name: one[name])
            rest = min(one[name] for name in names if name != best)
            winners.setdefault(best, []).append(
                f"{dtype} {size} ({one[best]:.3g} ms, the next {rest:.3g} ms)"
            )
    said = [f"{names[name]} win at {', '.join(sizes)}" for name, sizes in winners.items()]
    return (
        "; ".join(said).capitalize()
        + ". A graph saves the launches of a call's kernels, and costs its own launch, the "
        "step's bookkeeping and the copy of the outputs: it wins where a call is left with many "
        "small kernels after compilation, and loses where few are left."
    )


def add_rows(
    results: Results, dtype: str, runs: list[dict[str, Any]], options: argparse.Namespace
) -> None:
    for size in map(str, options.sizes):
        figures = [run["figures"][size] for run in runs]

        def row(
            name: str, unit: str, ours: str, peer: str, where: str, goal: float | None = None
        ) -> None:
            name = f"simulator {dtype}, {size} x {size}: {name}"
            results.row(name, unit, column(figures, ours), column(figures, peer), where, goal)

        if options.device == "cpu":
            row("CPU, with the wrapper", "ms", "wrapped", "compiled", "without it", 1.05)
            row("CPU, compiled", "ms", "compiled", "eager", "eager")
            continue
        row("graphs with the wrapper", "ms", "graphs", "eager", "eager")
        row("graphs with the wrapper", "ms", "graphs", "compiled", "compiled without graphs")
        row("compiled without graphs", "ms", "compiled", "eager", "eager")
        row("copied a run", "bytes", "bytes", "image bytes", "the image")


def add_rows_beside(
    results: Results,
    dtype: str,
    ours: list[dict[str, Any]],
    peers: list[dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """The wrapped graphs under the allocator of --beside, and under --allocator."""
    for size in map(str, options.sizes):
        mine, theirs = ([run["figures"][size] for run in runs] for runs in (ours, peers))
        name = f"simulator {dtype}, {size} x {size}: graphs with the wrapper, {options.beside}"
        peer = f"allocator {options.allocator}"
        results.row(name, "ms", column(mine, "graphs"), column(theirs, "graphs"), peer)


def worker(
    dtype: str, options: argparse.Namespace, what: str, allocator: str | None = None
) -> dict[str, Any] | None:
    sizes = ",".join(map(str, options.sizes))
    args = ["--dtype", dtype, "--sizes", sizes, "--device", options.device, "--what", what]
    args += ["--iterations", str(options.iterations)]
    begin = time.monotonic()
    try:
        found = run_worker(__file__, allocator or options.allocator, args, timeout=400)
    except WorkerFailed as error:
        print(f"{dtype}, {what}: {error}", flush=True)
        return None
    print(
        f"{dtype}, {what}, {allocator or options.allocator}: {time.monotonic() - begin:.1f} s",
        flush=True,
    )
    return found


def show_failures(dtype: str, options: argparse.Namespace) -> dict[str, str] | None:
    """How each size ends without the wrapper; None: nobody knows."""
    found = worker(dtype, options, "fail")
    if found is None:
        return None
    for size, error in found["errors"].items():
        print(f"{dtype} {size} without the wrapper: {error or 'no error'}")
    return dict(found["errors"])


def add_failures(
    results: Results,
    dtype: str,
    measured: list[dict[str, Any]],
    errors: dict[str, str],
    options: argparse.Namespace,
) -> None:
    """Wanted: without the wrapper every size fails, with it none."""
    sizes = len(options.sizes)
    failed = [sizes - len(run["figures"]) for run in measured]
    without = sum("overwritten" in error for error in errors.values())
    results.row(
        f"simulator {dtype}: sizes that fail with overwritten outputs",
        "sizes",
        failed,
        [without],
        "graphs, without the wrapper",
        goal=-float(sizes),
        judged="difference",
    )


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=1)
    sizes = lambda text: [int(one) for one in text.split(",")]  # noqa: E731
    arguments.add_argument("--sizes", type=sizes, default=[256, 512, 1024])
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--iterations", type=int, default=3, help="of each variant, by turns")
    arguments.add_argument("--unwrapped", action="store_true", help="only show the failure")
    arguments.add_argument(
        "--allocator", choices=list(ENVIRONMENTS), default=NATIVE, help="where graphs run"
    )
    arguments.add_argument("--beside", choices=list(ENVIRONMENTS), help="another allocator, too")
    arguments.add_argument("--dtype", choices=list(DTYPES), help=argparse.SUPPRESS)
    arguments.add_argument("--what", choices=("measure", "fail"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        if options.device == "cuda":
            use_allocator(options.worker)
        report(fail(options) if options.what == "fail" else measure(options))
        return 0
    if options.beside and (options.device != "cuda" or options.beside == options.allocator):
        raise SystemExit("--beside takes another allocator than --allocator, and --device cuda")
    if options.device == "cuda" and nothing_measurable():
        return 1
    if options.unwrapped:
        ends = [show_failures(dtype, options) for dtype in DTYPES]
        return int(any(one is None or any(one.values()) for one in ends))

    results = Results("cudagraph_outputs", options.out)
    begin = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {}
    beside: dict[str, list[dict[str, Any]]] = {}
    for turn in range(options.rounds):
        if turn and time.monotonic() - begin > options.seconds:
            break
        for dtype in DTYPES:
            measured = worker(dtype, options, "measure")
            if measured is not None:
                found.setdefault(dtype, []).append(measured)
            if options.beside:
                measured = worker(dtype, options, "measure", options.beside)
                if measured is not None:
                    beside.setdefault(dtype, []).append(measured)
    if not found:
        print("nothing was measured")
        return 1
    described = next(iter(found.values()))[0]["machine"]
    if options.device == "cuda":
        medians = {dtype: runs[0]["figures"] for dtype, runs in found.items()}
        described["sentence"] = sentence(medians)
        print(described["sentence"])
    results.describe(described)
    for dtype, runs in found.items():
        add_rows(results, dtype, runs, options)
        if beside.get(dtype):
            add_rows_beside(results, dtype, beside[dtype], runs, options)
    complete = len(found) == len(DTYPES) and (not options.beside or len(beside) == len(DTYPES))
    if options.device == "cuda":
        for dtype, runs in found.items():
            errors = show_failures(dtype, options)
            complete &= errors is not None
            add_failures(results, dtype, runs, errors or {}, options)
    return 0 if results.save() and complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
