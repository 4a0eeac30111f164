"""A training loop with 16 environments on streams, end to end: plain against ours.

The loop is examples/cifar_envs.py's. Plain: PyTorch's allocator; each environment's
indices are copied and its inputs and targets gathered one after the other, its
stream waits for the whole current stream, and batches are protected by
record_stream. Ours: esper_alloc, the gather iterator, protected uses. With two GPUs
or more, a second pass spreads the environments 10 and 6 over two of them.

Two steps of each are drawn as a picture of the GPU's streams, cifar_envs.svg beside
the result file, where matplotlib is installed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    NATIVE,
    OURS,
    ROOT,
    Results,
    alternate,
    column,
    machine,
    nothing_measurable,
    parser,
    report,
    use_allocator,
)

ENVS, SIZE, SAMPLES = 16, 64, 20_480
EPOCHS = 6
PLAIN = "native, plain PyTorch"
MIB = 1 << 20


def layout(gpus: int) -> list[str]:
    """The environments' devices: all on one GPU, or 10 and 6."""
    if gpus == 1:
        return ["cuda:0"] * ENVS
    return ["cuda:0"] * 10 + ["cuda:1"] * (ENVS - 10)


def plain_epoch(environments: Sequence[Any], columns: dict, order: Any) -> int:
    """One epoch without the helpers: the number of batches."""
    import torch

    step = ENVS * SIZE
    count = 0
    for start in range(0, SAMPLES - step + 1, step):
        batch = []
        for environment, part in zip(environments, order[start : start + step].tensor_split(ENVS)):
            images, labels = columns[environment.device]
            index = part.to(environment.device)
            batch.append((images[index], labels[index]))
        for environment, (inputs, targets) in zip(environments, batch):
            stream = environment.stream
            stream.wait_stream(torch.cuda.current_stream(environment.device))
            with torch.cuda.stream(stream):
                environment.step(inputs, targets)
            inputs.record_stream(stream)
            targets.record_stream(stream)
        count += 1
    return count


def measure(allocator: str, gpus: int) -> dict:
    """ms a step (median over epochs), peaks in MiB, the losses, and the timeline."""
    use_allocator(allocator)
    import torch
    from torch.profiler import ProfilerActivity, profile

    sys.path.insert(0, str(ROOT / "examples"))
    import cifar_envs as example

    from esper_alloc import GatherBatchIterator

    devices = layout(gpus)
    torch.manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (SAMPLES,))
    columns = {torch.device(d): (images.to(d), labels.to(d)) for d in dict.fromkeys(devices)}
    environments = [example.Environment(device) for device in devices]
    epoch: Callable[[], int]
    if allocator == OURS:
        batches = GatherBatchIterator(
            *columns[torch.device("cuda:0")], batch_size_per_env=SIZE, n_envs=ENVS,
            env_devices=devices, seed=0, order="global",
        )  # fmt: skip

        def epoch() -> int:
            return example.train(environments, batches)

    else:
        generator = torch.Generator().manual_seed(0)

        def epoch() -> int:
            order = torch.randperm(SAMPLES, generator=generator)
            return plain_epoch(environments, columns, order)

    def wait() -> None:
        for device in dict.fromkeys(devices):
            torch.cuda.synchronize(device)

    epoch()
    wait()
    times = []
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        count = epoch()
        wait()
        times.append((time.perf_counter() - begin) * 1e3 / count)
    peak = sum(torch.cuda.max_memory_reserved(d) for d in dict.fromkeys(devices)) / MIB
    losses = [environment.last_loss() for environment in environments]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        epoch()
        wait()
    return {
        "machine": machine(),
        "step_ms": statistics.median(times),
        "peak_reserved_mib": peak,
        "mean_loss": sum(losses) / len(losses),
        "timeline": timeline(seen, count),
    }


def timeline(seen: Any, batches: int) -> list[list[Any]]:
    """[device, stream, start us, length us, kind] of what ran in two steps."""
    found = []
    for event in seen.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()) or event.duration_ns() <= 0:
            continue
        name = event.name()
        gathers = any(word in name for word in ("gather", "index_elementwise", "Memcpy"))
        where = [event.device_index(), event.device_resource_id()]
        found.append(
            [
                *where,
                event.start_ns() / 1e3,
                event.duration_ns() / 1e3,
                "gather" if gathers else "train",
            ]
        )
    if not found:
        return []
    begin = min(one[2] for one in found)
    end = max(one[2] + one[3] for one in found)
    step = (end - begin) / batches
    low = begin + step * (batches // 2)  # in the middle of the epoch
    chosen = [one for one in found if low <= one[2] < low + 2 * step]
    return [[d, s, round(at - low, 1), round(took, 1), kind] for d, s, at, took, kind in chosen]


def draw(panels: dict[str, list[list[Any]]], path: Path) -> None:
    """For each panel a line a stream, kernels as bars."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        print(f"{path} is not drawn: python -m pip install matplotlib")
        return
    matplotlib.rcParams["svg.hashsalt"] = "cifar_envs"  # the same bytes for the same figures
    colours = {"gather": "#d1495b", "train": "#30638e"}
    streams = [sorted({(one[0], one[1]) for one in events}) for events in panels.values()]
    lines = [max(1, len(found)) for found in streams]
    figure = Figure(figsize=(11, 0.14 * sum(lines) + 0.7 * len(panels) + 0.5), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=lines)[:, 0]
    for axis, (title, events), found in zip(axes, panels.items(), streams):
        span = max((one[2] + one[3] for one in events), default=0.0)
        for number, where in enumerate(found):
            for kind, colour in colours.items():
                bars = [
                    (e[2] / 1e3, e[3] / 1e3) for e in events if (*e[:2], e[4]) == (*where, kind)
                ]
                # The outline keeps kernels visible that are shorter than a pixel.
                axis.broken_barh(bars, (number - 0.4, 0.8), color=colour, linewidth=0.3)
        axis.set_title(f"{title}: two steps, {span / 1e3:.1f} ms", fontsize=10, loc="left")
        axis.set_yticks(range(len(found)), [f"GPU {d}, stream {s}" for d, s in found], fontsize=6)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    figure.legend(
        handles=[
            Patch(color=colours["gather"], label="gathers and copies of indices"),
            Patch(color=colours["train"], label="the networks"),
        ],
        loc="outside lower center", ncols=2, frameon=False,
    )  # fmt: skip
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--gpus", type=int, choices=(1, 2), help="default: both, as far as there are"
    )
    options = arguments.parse_args()
    if options.worker:
        report(measure(options.worker, options.gpus or 1))
        return 0

    if nothing_measurable():
        return 1
    import torch

    there = torch.cuda.device_count()
    passes = [options.gpus] if options.gpus else [n for n in (1, 2) if n <= there]
    results = Results("cifar_envs", options.out)
    panels: dict[str, list[list[Any]]] = {}
    begin = time.monotonic()
    for number, gpus in enumerate(passes):
        left = options.seconds - (time.monotonic() - begin)
        found = alternate(
            __file__, (OURS, NATIVE), options.rounds, ["--gpus", str(gpus)],
            seconds=left / (len(passes) - number),
        )  # fmt: skip
        if OURS not in found or NATIVE not in found:
            print(f"{gpus} GPUs: a side gave nothing")
            return 1
        if results.run is None:
            results.describe(found[OURS][0]["machine"])
        ours, plain = found[OURS], found[NATIVE]
        where = "one GPU" if gpus == 1 else "two GPUs, 10 and 6 environments"
        for name, unit, key in (
            ("a step", "ms", "step_ms"),
            ("peak reserved", "MiB", "peak_reserved_mib"),
        ):
            results.row(
                f"16 environments on {where}: {name}",
                unit,
                column(ours, key),
                column(plain, key),
                PLAIN,
            )
        panels[f"Plain PyTorch, {where}"] = plain[-1]["timeline"]
        panels[f"esper_alloc, {where}"] = ours[-1]["timeline"]
        results.save()
        draw(panels, Path(results.path).with_name("cifar_envs.svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
