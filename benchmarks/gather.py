"""The gather iterator beside plain PyTorch, on data in CIFAR's shapes.

``batch``: 50,000 images as float32 in channels_last, batches for 1 x 512 to 64 x 32
samples (environments x batch size); the plain version copies each environment's
indices to the GPU and gathers inputs and targets one after the other. Time from
batch to batch within an epoch, the consumer dropping each when it has the next.
``copy``: the GPU time of a batch of 8192 beside a copy of as many bytes. ``epoch``:
uint8, normalised and augmented to half, beside processing the whole set for each
epoch and then indexing. ``loader``: torch's DataLoader over the same GPU tensors.
``conv``: a small network on batches in either memory format. The profiler's tables
of DataLoader and of ours go to gather_profile.txt beside the result file.

All rounds of ``batch`` and ``loader``, which have goals, come first; the others get
the time that is left, but one round at least.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator

from common import (
    NATIVE,
    OURS,
    Results,
    alternate,
    column,
    machine,
    nothing_measurable,
    parser,
    report,
    use_allocator,
)

SAMPLES = 50_000
#: Environments, samples for each, and how many times as fast as plain is wanted.
BATCHES = ((1, 512, 3), (4, 128, 8), (16, 32, 20), (64, 32, 25))
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CROP = 4
PLAIN = "native, plain PyTorch"
#: What a worker measures: what has goals, or all else.
GOALS, OTHERS = "goals", "others"


class PlainBatches:
    """Batches as one writes them first: for each environment its indices are copied to
    the device, and inputs and targets are gathered by them."""

    def __init__(self, inputs, targets, envs: int, size: int) -> None:
        import torch

        self.inputs, self.targets, self.envs = inputs, targets, envs
        self.step = envs * size
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[list]:
        import torch

        order = torch.randperm(len(self.inputs), generator=self.generator)
        return self.batches(order)

    def batches(self, order) -> Iterator[list]:
        for start in range(0, len(order) - self.step + 1, self.step):
            found = []
            for part in order[start : start + self.step].tensor_split(self.envs):
                index = part.to(self.inputs.device)
                found.append((self.inputs[index], self.targets[index]))
            yield found


def data(dtype: str):
    """Random images in channels_last and labels, on the GPU."""
    import torch

    torch.manual_seed(0)
    if dtype == "uint8":
        images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, device="cuda")
    else:
        images = torch.randn(SAMPLES, 3, 32, 32, device="cuda")
    labels = torch.randint(0, 10, (SAMPLES,), device="cuda")
    return images.contiguous(memory_format=torch.channels_last), labels


def ours(images, labels, envs: int, size: int, **more):
    from esper_alloc import GatherBatchIterator

    return GatherBatchIterator(
        images,
        labels,
        batch_size_per_env=size,
        n_envs=envs,
        env_devices=["cuda"] * envs,
        seed=0,
        **more,
    )


def a_batch_us(batches, epochs: int, *, marked: bool = False) -> float:
    """Median over the epochs of the microseconds a batch, the epoch's start left out."""
    import torch

    figures = []
    for _ in range(epochs + 2):
        steps = iter(batches)
        torch.cuda.synchronize()
        count, batch = 0, None
        begin = time.perf_counter()
        # Not `for`, which would call iter() again, and that starts the next epoch.
        while (batch := next(steps, None)) is not None:
            count += 1
            if marked:
                batch.done()
        torch.cuda.synchronize()
        figures.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(figures[2:])


def median_ms(call: Callable[[], object], repeats: int) -> float:
    import torch

    figures = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        figures.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(figures[2:])


def gpu_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of GPU time for a call of which many are enqueued ahead."""
    import torch

    call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)  # the host gets ahead meanwhile
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def measure_batches(figures: dict[str, float], allocator: str) -> None:
    images, labels = data("float32")
    for envs, size, _ in BATCHES:
        name = f"{envs} x {size}"
        figures[f"ours, {name}"] = a_batch_us(ours(images, labels, envs, size), 15)
        if allocator == NATIVE:
            figures[f"plain, {name}"] = a_batch_us(PlainBatches(images, labels, envs, size), 3)
    ring = ours(images, labels, 64, 32, reuse=2)
    figures["ours, 64 x 32, reuse"] = a_batch_us(ring, 15, marked=True)
    start = ours(images, labels, 64, 32)
    figures["ours, epoch start"] = median_ms(lambda: iter(start), 15) * 1e3
    plain = PlainBatches(images, labels, 64, 32)
    figures["plain, epoch start"] = median_ms(lambda: iter(plain), 15) * 1e3


def measure_copy(figures: dict[str, float]) -> None:
    """A batch of 8192: the kernel, and copies of the same bytes."""
    import torch

    images, labels = data("float32")
    batches = ours(images, labels, 1, 8192)
    steps = [iter(batches)]

    def gather() -> None:
        if next(steps[0], None) is None:
            raise RuntimeError("the epoch was too short")

    per_epoch = len(batches) - 1  # one is taken to warm up
    found = []
    for _ in range(10):
        steps[0] = iter(batches)
        found.append(gpu_us(gather, per_epoch))
    figures["ours, 1 x 8192"] = statistics.median(found)
    ordered = ours(images, labels, 1, 8192, shuffle=False)
    found = []
    for _ in range(10):
        steps[0] = iter(ordered)
        found.append(gpu_us(gather, per_epoch))
    figures["ours, 1 x 8192, in order"] = statistics.median(found)
    source = [images[i * 8192 : (i + 1) * 8192] for i in range(6)]
    target = torch.empty_like(source[0])
    turn = iter(range(1 << 30))
    figures["copy of 8192"] = statistics.median(
        gpu_us(lambda: target.copy_(source[next(turn) % 6]), per_epoch) for _ in range(10)
    )


class WholeSet:
    """Each epoch: the whole set augmented at once, then indexed batch by batch.

    The images are kept normalised, as half, with a border for the crops.
    """

    def __init__(self, images, labels, size: int) -> None:
        import torch

        self.size, self.labels = size, labels
        mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) for v in (MEAN, STD))
        normal = images.float().div(255).sub(mean).div(std).half()
        edge = (-mean / std).half()
        side = images.shape[2] + 2 * CROP
        padded = edge.expand(len(images), 3, side, side).contiguous(
            memory_format=torch.channels_last
        )
        padded[:, :, CROP:-CROP, CROP:-CROP] = normal
        self.padded = padded

    def epoch(self) -> None:
        import torch

        count, side = len(self.padded), self.padded.shape[2] - 2 * CROP
        images = self.padded
        for axis in (2, 3):
            shifts = torch.randint(0, 2 * CROP + 1, (count,), device="cuda")
            cut = list(images.shape)
            cut[axis] = side
            moved = torch.empty(
                cut, dtype=images.dtype, device="cuda", memory_format=torch.channels_last
            )
            for shift in range(2 * CROP + 1):
                chosen = shifts == shift
                moved[chosen] = images[chosen].narrow(axis, shift, side)
            images = moved
        flipped = torch.rand(count, device="cuda") < 0.5
        images = torch.where(flipped[:, None, None, None], images.flip(3), images)
        order = torch.randperm(count, device="cuda")
        for start in range(0, count - self.size + 1, self.size):
            index = order[start : start + self.size]
            images[index], self.labels[index]


def measure_epochs(figures: dict[str, float]) -> None:
    """uint8, normalised and augmented to half: an epoch in batches of 512."""
    import torch

    from esper_alloc import ImageTransform

    images, labels = data("uint8")
    how = ImageTransform(dtype=torch.float16, mean=MEAN, std=STD, crop=CROP, flip=0.5)

    def grown(make) -> tuple[float, float]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call = make()
        took = median_ms(call, 7)
        return took, (torch.cuda.max_memory_allocated() - before) / (1 << 20)

    def gathered() -> Callable[[], object]:
        batches = ours(images, labels, 1, 512, transform=how)

        def epoch() -> None:
            for _ in batches:
                pass

        return epoch

    figures["ours, epoch ms"], figures["ours, epoch MiB"] = grown(gathered)
    figures["whole set, epoch ms"], figures["whole set, epoch MiB"] = grown(
        lambda: WholeSet(images, labels, 512).epoch
    )


def measure_loader(figures: dict[str, float]) -> str:
    """torch's DataLoader over GPU tensors, and the operators that either calls: the
    profiler's tables."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = data("float32")
    tables = []

    def calls(who: str, steps: Iterator, batches: int) -> dict[str, float]:
        next(steps)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(batches):
                next(steps)
            torch.cuda.synchronize()
        table = seen.key_averages()
        text = table.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=60)
        tables.append(f"{who}, {batches} batches of 512\n{text}")
        count = {event.key: event.count / batches for event in table}
        kernels = sum(
            event.count
            for event in table
            if event.device_type == torch.autograd.DeviceType.CUDA
            and event.self_device_time_total > 0
        )
        return {
            "aten::select": count.get("aten::select", 0.0),
            "aten::stack": count.get("aten::stack", 0.0),
            "aten::index": count.get("aten::index", 0.0),
            "kernels": kernels / batches,
        }

    loader = DataLoader(TensorDataset(images, labels), batch_size=512, shuffle=True)
    steps = iter(loader)
    next(steps)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(8):
        next(steps)
    torch.cuda.synchronize()
    figures["loader, 1 x 512"] = (time.perf_counter() - begin) / 8 * 1e6
    for name, value in calls("DataLoader over GPU tensors", steps, 2).items():
        figures[f"loader, {name}"] = value
    mine = ours(images, labels, 64, 8)
    list(mine)
    found = calls("GatherBatchIterator, 64 environments x 8", iter(mine), 20)
    for name, value in found.items():
        figures[f"ours, {name}"] = value
    for name in ("aten::select", "aten::stack"):
        if found[name] != 0:
            raise AssertionError(f"a batch calls {name} {found[name]} times")
    return "\n".join(tables)


def measure_convolution(figures: dict[str, float]) -> None:
    """Forward and backward of a small half-precision network on gathered batches."""
    import torch
    from torch import nn

    from esper_alloc import ImageTransform

    images, labels = data("uint8")
    torch.backends.cudnn.benchmark = True
    for name, last in (("channels_last", True), ("contiguous", False)):
        form = torch.channels_last if last else torch.contiguous_format
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers).cuda().half().to(memory_format=form)
        how = ImageTransform(dtype=torch.float16, mean=MEAN, std=STD, channels_last=last)
        batches = ours(images, labels, 1, 512, transform=how)
        steps = [iter(batches)]

        def step() -> None:
            inputs, _ = next(steps[0])[0]
            model(inputs).float().mean().backward()

        found = []
        for _ in range(5):
            steps[0] = iter(batches)
            found.append(gpu_us(step, 40))
        figures[f"conv, {name}"] = statistics.median(found)


def measure(allocator: str, part: str) -> dict:
    """The figures of a part under one allocator."""
    use_allocator(allocator)
    from esper_alloc.helpers import kernels

    if not kernels.usable(0):
        raise RuntimeError("the kernels cannot run here")
    figures: dict[str, float] = {}
    tables = ""
    gc.disable()
    if part == GOALS:
        measure_batches(figures, allocator)
        if allocator == OURS:
            tables = measure_loader(figures)
    else:
        measure_copy(figures)
        measure_epochs(figures)
        measure_convolution(figures)
    return {"machine": machine(), "figures": figures, "tables": tables}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=(GOALS, OTHERS), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        report(measure(options.worker, options.part))
        return 0

    if nothing_measurable():
        return 1
    begin = time.monotonic()
    found = alternate(
        __file__, (OURS, NATIVE), options.rounds, ("--part", GOALS), seconds=options.seconds
    )
    if OURS not in found:
        print("nothing was measured under esper_alloc")
        return 1
    left = options.seconds - (time.monotonic() - begin)
    rest = alternate(__file__, (OURS,), options.rounds, ("--part", OTHERS), seconds=left)
    results = Results("gather", options.out)
    results.describe(found[OURS][0]["machine"])
    enabled, native = ([one["figures"] for one in found.get(name, [])] for name in (OURS, NATIVE))
    others = [one["figures"] for one in rest.get(OURS, [])]

    def row(
        name: str, unit: str, mine: list, key: str, peers: list, peer: str, who: str, goal=None
    ) -> None:
        results.row(name, unit, column(mine, key), column(peers, peer), who, goal)

    for envs, size, times in BATCHES:
        form = f"{envs} x {size}"
        row(f"a batch, {form}", "us", enabled, f"ours, {form}", native, f"plain, {form}", PLAIN,
            1 / times)  # fmt: skip
    for name, goal in (
        ("aten::select", 0.0),
        ("aten::stack", 0.0),
        ("aten::index", None),
        ("kernels", None),
    ):
        what = "kernels launched" if name == "kernels" else f"calls of {name}"
        row(f"a batch of 512: {what}", "calls", enabled, f"ours, {name}", enabled, f"loader, {name}",
            "DataLoader over GPU tensors", goal)  # fmt: skip
    for envs, size, _ in BATCHES:
        form = f"{envs} x {size}"
        row(f"a batch, {form}, native allocator", "us", native, f"ours, {form}", native,
            f"plain, {form}", PLAIN)  # fmt: skip
    row("a batch, 64 x 32, reuse=2", "us", enabled, "ours, 64 x 32, reuse", enabled, "ours, 64 x 32",
        "fresh memory")  # fmt: skip
    row("start of an epoch", "us", enabled, "ours, epoch start", native, "plain, epoch start",
        PLAIN)  # fmt: skip
    row("a batch, 1 x 512, beside DataLoader", "us", enabled, "ours, 1 x 512", enabled, "loader, 1 x 512",
        "DataLoader over GPU tensors")  # fmt: skip
    for kind in ("", ", in order"):
        row(f"a batch, 1 x 8192{kind}, GPU time", "us", others, f"ours, 1 x 8192{kind}", others, "copy of 8192",
            "a copy of as many bytes")  # fmt: skip
    for unit in ("ms", "MiB"):
        row("an epoch of uint8, normalised and augmented", unit, others, f"ours, epoch {unit}", others,
            f"whole set, epoch {unit}", f"the whole set at once, {unit}")  # fmt: skip
    row("convolutions on a batch of 512", "us", others, "conv, channels_last", others, "conv, contiguous",
        "contiguous batches")  # fmt: skip
    results.path.parent.mkdir(parents=True, exist_ok=True)
    results.path.with_name("gather_profile.txt").write_text(found[OURS][-1]["tables"])
    return 0 if results.save() else 1


if __name__ == "__main__":
    raise SystemExit(main())
