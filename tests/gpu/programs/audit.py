"""Programs under the auditor: what it finds in correct ones: nothing.

audit.py ALLOCATOR PROGRAM
"""

import sys
from collections.abc import Callable, Iterator

import torch
from device import report, use_allocator
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


PROGRAMS = (prefetching, compiled, captured, checkpointed, branches, sharded)

if __name__ == "__main__":
    use_allocator(sys.argv[1])
    import esper_alloc

    [program] = [one for one in PROGRAMS if one.__name__ == sys.argv[2]]
    with esper_alloc.audit() as found:
        program()
        torch.cuda.synchronize()
    report(findings=len(found.findings), text=found.text(), complete=found.complete)
