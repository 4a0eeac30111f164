"""Programs under the auditor: what it finds in correct ones (nothing), what it keeps, and what poison
finds.

audit.py ALLOCATOR clean PROGRAM
audit.py ALLOCATOR bound|poison|strays
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from device import held_up, hold_up, report, use_allocator
from torch import nn
from torch.nn import functional

WIDTH, LAYERS, HEADS, WORDS, LENGTH, BATCH = 768, 12, 12, 50257, 256, 4
Step = Callable[[], object]


class Block(nn.Module):
    """A transformer's layer: (batch, length, WIDTH) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.all(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """GPT-2's shape: words (batch, length) in, the loss of predicting the next one out."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        scores = functional.linear(self.last(x), self.words.weight)
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def training(model: Callable[[torch.Tensor], torch.Tensor], parameters: Iterator[nn.Parameter],
             batches: Iterator[torch.Tensor]) -> Step:  # fmt: skip
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def resident() -> Iterator[torch.Tensor]:
    words = torch.randint(WORDS, (BATCH, LENGTH), device="cuda")
    while True:
        yield words


def prefetched() -> Iterator[torch.Tensor]:
    """Batches of a DataLoader, copied a step ahead on a stream of their own, and marked."""
    data = torch.utils.data.TensorDataset(torch.randint(WORDS, (BATCH * 64, LENGTH)))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, pin_memory=True)
    copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    ahead: torch.Tensor | None = None
    while True:
        for (host,) in loader:
            compute.wait_stream(copies)
            now = ahead
            with torch.cuda.stream(copies):
                ahead = host.to("cuda", non_blocking=True)
            if now is not None:
                now.record_stream(compute)
                yield now


def eager() -> None:
    model = Gpt().cuda()
    step = training(model, model.parameters(), resident())
    for _ in range(4):
        step()


def prefetching() -> None:
    model = Gpt(layers=4).cuda()
    step = training(model, model.parameters(), prefetched())
    for _ in range(12):
        step()


def compiled() -> None:
    model = Gpt(layers=2).cuda()
    step = training(torch.compile(model), model.parameters(), prefetched())
    for _ in range(4):
        step()


def captured() -> None:
    """A whole training step as a graph; its input is filled by a stream of its own."""
    model = Gpt(layers=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    words = torch.randint(WORDS, (BATCH, LENGTH), device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(words)
        loss.backward()
        optimizer.step()
        return loss

    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    main.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    batches = prefetched()
    for _ in range(6):
        words.copy_(next(batches))
        graph.replay()
        loss.clone()
    torch.cuda.synchronize()


def checkpointed() -> None:
    """Recomputation and hooks in backward, and a copy of the loss to the host beside it."""
    from torch.utils.checkpoint import checkpoint

    model = Gpt(layers=3).cuda()
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    words = next(resident())
    for _ in range(3):
        x = model.words(words) + model.places.weight
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        loss = x.float().square().mean()
        loss.backward()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            host = loss.detach().to("cpu", non_blocking=True)
            loss.record_stream(side)
        side.synchronize()
        assert host.isfinite()


def branches() -> None:
    """One layer runs on a stream of its own, forward and backward."""
    first, second = nn.Linear(256, 256).cuda(), nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.ones(64, 256, device="cuda")
    for _ in range(4):
        h = first(x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = second(h)
        main.wait_stream(side)
        h.record_stream(side)
        y.record_stream(main)
        loss = (y + h).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def hugging_face() -> None:
    """GPT-2 of 124 M parameters as transformers has it, as in the benchmarks."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
    from models import gpt2

    step = gpt2(small=False)
    for _ in range(4):
        step()


def sharded() -> None:
    """FSDP2 as its tutorial has it, which gathers and reduces on streams of its own; one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Gpt(layers=4).cuda()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batches = resident()
        for _ in range(4):
            model(next(batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


CLEAN = {
    one.__name__: one
    for one in (
        eager, hugging_face, prefetching, compiled, captured, checkpointed, branches, sharded,
    )
}  # fmt: skip


def clean(name: str) -> None:
    import esper_alloc

    with esper_alloc.audit() as found:
        CLEAN[name]()
        torch.cuda.synchronize()
    report(findings=len(found.findings), text=found.text(), complete=found.complete)


def bound() -> None:
    """KiB that the auditor keeps after 50,000 operators on three streams, and after a million."""
    import esper_alloc
    from esper_alloc import _torch

    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = torch.ones(64, device="cuda")
    done, kept = 0, 0
    with esper_alloc.audit():
        while done < 1_000_000:
            for stream in streams:
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    y = x + 1
                    for _ in range(20):
                        y = y * 2
                    y.add_(x)
                main.wait_stream(stream)
                x = x.clone()
                done += 23
            if done % 4600 == 0:
                torch.cuda.synchronize()
            if not kept and done >= 50_000:
                kept = _torch.audit_state()[3]
        late = _torch.audit_state()[3] / 1024
    report(early=kept / 1024, late=late)


def poison() -> None:
    """A side stream writes, or reads, a tensor late: unmarked, and marked. With and without poison
    a training step gives the same loss."""
    import esper_alloc

    side = torch.cuda.Stream()
    main = torch.cuda.current_stream()
    driver = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(side.cuda_stream)

    def late(act: Callable[[torch.Tensor], object], marks: bool) -> tuple[list[str], object]:
        word = torch.zeros(1, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(side):  # loading a kernel later would wait for the stream
            act(torch.ones(1 << 20, device="cuda"))
        with esper_alloc.audit(poison=True):  # so might that of the first poison
            torch.ones(1 << 20, device="cuda")
        with held_up(side):
            pass
        torch.cuda.synchronize()
        with esper_alloc.audit(poison=True) as found:
            x = torch.ones(1 << 20, device="cuda")
            side.wait_stream(main)
            with torch.cuda.stream(side):
                hold_up(side, word)
                result = act(x)
            if marks:
                x.record_stream(side)
            del x
            main.synchronize()
            word[0] = 1
            assert driver.cuStreamSynchronize(stream) == 0  # nobody is told
            y = torch.empty(1 << 20, device="cuda")
        torch.cuda.synchronize()
        del y
        kinds = [one.kind for one in found.findings]
        return kinds, bool(result.isnan().all()) if isinstance(result, torch.Tensor) else None

    def write(x: torch.Tensor) -> object:
        return x.fill_(2.0) is None

    def read(x: torch.Tensor) -> object:
        return x * 1.0

    answers = {
        f"{act.__name__} {'marked' if marks else 'unmarked'}": late(act, marks)
        for act in (write, read)
        for marks in (False, True)
    }
    losses, seconds = [], []
    for poisons in (False, True):
        torch.manual_seed(0)
        model = Gpt(layers=4).cuda()
        step = training(model, model.parameters(), resident())
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with esper_alloc.audit(poison=poisons) as found:
            losses.append([float(step()) for _ in range(4)])  # type: ignore[arg-type]
        seconds.append((time.perf_counter() - begin) / 4)
        answers[f"training {poisons}"] = ([one.kind for one in found.findings], None)
    report(answers=answers, losses=losses, seconds=seconds)


def strays() -> None:
    """Random frees, and writes of the driver's own, of which nobody is told, to what was freed. Each
    is found when its memory is handed out; nobody else's bytes change; freed memory reads as 0xff."""
    import esper_alloc

    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    driver = ctypes.CDLL("libcuda.so.1")
    choose = random.Random(1)
    live: list[tuple[torch.Tensor, int]] = []
    written: list[int] = []
    expected = wrong = 0

    def write(address: int, value: int, size: int) -> None:
        at, count = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        assert driver.cuMemsetD8_v2(at, ctypes.c_ubyte(value), count) == 0
        torch.cuda.synchronize()

    def bytes_at(address: int, size: int) -> set[int]:
        torch.cuda.synchronize()
        buffer = ctypes.create_string_buffer(size)
        at, count = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        assert driver.cuMemcpyDtoH_v2(buffer, at, count) == 0
        return set(buffer.raw)

    with esper_alloc.audit(poison=True) as found:
        for step in range(1500):
            if len(live) > 30 or (live and choose.random() < 0.4):
                x, value = live.pop(choose.randrange(len(live)))
                begin, size = x.data_ptr(), x.numel()
                wrong += bytes_at(begin, size) != {value}
                if choose.random() < 0.3:
                    x.record_stream(side)
                    side.wait_stream(main)
                del x
                wrong += bytes_at(begin, size) != {255}
                if choose.random() < 0.2:
                    written.append(begin + choose.randrange(size))
                    write(written[-1], 1, 1)
            else:
                x = torch.empty(512 * choose.randrange(1, 500), dtype=torch.uint8, device="cuda")
                begin, size = x.data_ptr(), x.numel()
                hit = [one for one in written if begin <= one < begin + size]
                written = [one for one in written if one not in hit]
                expected += len(hit)
                write(begin, step % 200, size)
                live.append((x, step % 200))
                del x
    report(
        expected=expected, found=sum(one.count for one in found.findings), wrong=wrong,
        kinds=sorted({one.kind for one in found.findings}),
    )  # fmt: skip


if __name__ == "__main__":
    use_allocator(sys.argv[1])
    if sys.argv[2] == "clean":
        clean(sys.argv[3])
    else:
        {"bound": bound, "poison": poison, "strays": strays}[sys.argv[2]]()
