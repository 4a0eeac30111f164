"""One process of ``python -m esper_alloc bench``: measures under one allocator.

``python -m esper_alloc.cli.bench_worker NAME [--small]`` prints one line of JSON. It must
be a process of its own: PyTorch's allocator is chosen once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from .workers import OURS, report

MIB = 1 << 20

SIZES = {"pair_512b_ns": 512, "pair_1mib_ns": MIB, "pair_64mib_ns": 64 * MIB}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("allocator", metavar="NAME")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    report(measure(options.allocator, options.small))
    return 0


def measure(allocator: str, small: bool) -> dict[str, Any]:
    """Every figure of this process; ns, us, ms and MiB as their names say."""
    import torch

    if allocator == OURS:
        import esper_alloc

        esper_alloc.enable()
        protect: Callable[[Any, Any], Any] = esper_alloc.record_use
    else:

        def protect(tensor: Any, stream: Any) -> None:
            tensor.record_stream(stream)

    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for name, size in SIZES.items():
        figures[name] = _pair_ns(size, 300 if small else 5000)
    figures["mark_ns"] = _mark_ns(protect, 300 if small else 3000)
    figures.update(_pipeline(protect, small))
    figures.update(_lengths(small))
    return figures


def _median_ns(work: Callable[[], None], times: int) -> float:
    import torch

    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(times):
            work()
        found.append((time.perf_counter_ns() - begin) / times)
    return statistics.median(found[1:])


def _pair_ns(size: int, times: int) -> float:
    """How long it takes to make and drop a tensor of `size` bytes, from Python."""
    import torch

    def work() -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda")

    return _median_ns(work, times)


def _mark_ns(protect: Callable[[Any, Any], Any], times: int) -> float:
    """The same with 4 KiB and a mark for another stream."""
    import torch

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]

    def work() -> None:
        protect(torch.empty(4096, dtype=torch.uint8, device="cuda"), side)

    return _median_ns(work, times)


def _pipeline(protect: Callable[[Any, Any], Any], small: bool) -> dict[str, float]:
    """Weights gathered on one stream a layer ahead, used on another, marked, dropped:
    memory active at the most over what was there before, and ms a step."""
    import torch

    layers, width, rows = (4, 128, 128) if small else (24, 2048, 2048)
    compute = torch.cuda.current_stream()
    comm = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.no_grad():
        shards = [torch.randn(2, width // 2, width, device="cuda") for _ in range(layers)]
        x = torch.randn(rows, width, device="cuda")

        def gather(layer: int) -> tuple[Any, Any]:
            with torch.cuda.stream(comm):
                return torch.cat(tuple(shards[layer])), comm.record_event()

        def step() -> None:
            y, coming = x, gather(0)
            for layer in range(layers):
                weight, ready = coming
                if layer + 1 < layers:
                    coming = gather(layer + 1)
                compute.wait_event(ready)
                y = torch.tanh(y @ weight)
                protect(weight, compute)

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) * 1e3 / 5
        peak = torch.cuda.max_memory_reserved() - base
    return {"pipeline_step_ms": took, "pipeline_mib": peak / MIB}


def _lengths(small: bool) -> dict[str, float]:
    """Training a small transformer on batches of 1 to 6 sequences of random length:
    reserved at the most over allocated at the most, and ms a step."""
    import torch
    from torch import nn

    width, layers, longest, steps = (64, 1, 64, 4) if small else (512, 6, 1024, 40)
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    draw = random.Random(7)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, device="cuda")
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    head = nn.Linear(width, 8000, device="cuda")
    weights = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)

    def step() -> None:
        batch, length = draw.randint(1, 6), draw.randint(longest // 16, longest)
        x = torch.randn(batch, length, width, device="cuda")
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = head(model(x)).float().logsumexp(dim=-1).mean()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return {
        "lengths_step_ms": (time.perf_counter() - begin) * 1e3 / steps,
        "lengths_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "lengths_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
    }


if __name__ == "__main__":
    raise SystemExit(main())
