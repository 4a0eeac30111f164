"""How much memory does a CUDA graph hold whose temporaries are read on a side stream?

A chain of layers is captured. Each layer makes a tensor, a side stream reads it
late, and the chain goes on; two layers later the main stream waits for that read,
as a program does that hands results over. The tensor is dropped at once and
protected by one line: ``record_stream`` under PyTorch's own allocator, with and
without its option ``graph_capture_record_stream_reuse``, and ``record_use`` or
``record_stream`` here. Counted are the memory of the graph's private pool, the
time of the capture and of a replay, and wrong elements.
"""

from __future__ import annotations

import statistics
import time

from common import (
    CAPTURE_REUSE,
    NATIVE,
    OURS,
    Case,
    Results,
    Rounds,
    machine,
    parser,
    use_allocator,
)
from turns import CORES, compare_children, in_children, take_turns

MIB = 1 << 20
ELEMENTS = 4 * MIB  # of float32: 16 MiB
STRIDE = 4096
LAYERS = 32
JOIN_AFTER = 2  # layers
CAPTURES = 7
REPLAYS = 5

MARKED = Case("esper_alloc, record_use", OURS, ("--protection", "record_use"))
RECORD_STREAM = ("--protection", "record_stream")
CASES = (
    MARKED,
    Case("native, record_stream", NATIVE, RECORD_STREAM),
    Case(CAPTURE_REUSE, CAPTURE_REUSE, RECORD_STREAM),
    Case("esper_alloc, record_stream", OURS, RECORD_STREAM),
)


def measure(allocator: str, protection: str) -> dict:
    """Figures over the captures: medians, but sums of what is wrong.

    pool_mib: memory of the graph's private pool after the capture.
    capture_ms: the captured code itself, on the host.
    replay_ms: one replay, on the GPU.
    wrong: elements that the side stream, or the end of the chain, got wrong.
    """
    use_allocator(allocator)
    import torch

    with torch.no_grad():
        captures = _captures(protection)
    return {
        "machine": machine(),
        "wrong": sum(one["wrong"] for one in captures),
        **{
            key: statistics.median(one[key] for one in captures[1:])
            for key in ("pool_mib", "capture_ms", "replay_ms")
        },
    }


def _captures(protection: str) -> list[dict]:
    import torch

    if protection == "record_use":
        import esper_alloc

        protect = esper_alloc.record_use
    else:

        def protect(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
            tensor.record_stream(stream)

    side = torch.cuda.Stream()
    x = torch.zeros(ELEMENTS, device="cuda")
    last = torch.zeros_like(x)
    samples = torch.zeros(LAYERS, ELEMENTS // STRIDE, device="cuda")

    def chain() -> None:
        main = torch.cuda.current_stream()
        reads: list[torch.cuda.Event] = []
        y = x
        for layer in range(LAYERS):
            y = y + 1
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000)  # some 30 us
                samples[layer].copy_(y.view(-1, STRIDE)[:, 0])
            protect(y, side)
            reads.append(side.record_event())
            if layer >= JOIN_AFTER:
                main.wait_event(reads[layer - JOIN_AFTER])
        last.copy_(y)
        main.wait_stream(side)

    def once(value: float) -> dict:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            begin = time.perf_counter()
            chain()
            end = time.perf_counter()
        pool = graph.pool()
        held = sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        )
        wrong = 0
        times = []
        for turn in range(REPLAYS):
            start = torch.cuda.Event(enable_timing=True)
            done = torch.cuda.Event(enable_timing=True)
            x.fill_(value + turn)
            samples.zero_()
            start.record()
            graph.replay()
            done.record()
            done.synchronize()
            times.append(start.elapsed_time(done))
            layers = torch.arange(1, LAYERS + 1, device="cuda").view(-1, 1)
            wrong += int((samples != value + turn + layers).sum())
            wrong += int((last != value + turn + LAYERS).sum())
        return {
            "pool_mib": held / MIB,
            "capture_ms": (end - begin) * 1e3,
            "replay_ms": statistics.median(times),
            "wrong": wrong,
        }

    chain()  # every kernel loaded
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [once(100.0 * number) for number in range(CAPTURES)]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--protection", choices=("record_use", "record_stream"))
    options = arguments.parse_args()
    if options.worker:
        how = options.worker, options.protection or "record_use"
        take_turns(in_children(options.worker, lambda: measure(*how)), CORES)
        return 0

    return compare_children(__file__, CASES, options, add_rows, MARKED.name)


def add_rows(results: Results, rounds: Rounds) -> None:
    for peer, memory_goal in zip(CASES[1:], (0.5, 1.0, None), strict=True):
        for title, unit, key, goal in (
            ("a graph's private pool", "MiB", "pool_mib", memory_goal),
            ("capture time", "ms", "capture_ms", None),
            ("replay time", "ms", "replay_ms", None),
            ("elements that replays got wrong", "elements", "wrong", 0.0),
        ):
            results.compare(title, unit, rounds, key, MARKED.name, peer.name, goal)


if __name__ == "__main__":
    raise SystemExit(main())
