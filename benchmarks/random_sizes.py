"""Jobs of workloads.py whose sizes never repeat: no step is like another of any pass.

  moe          training a mixture of experts: the router decides how many tokens each
               expert gets, and nothing is padded
  resolutions  training a U-Net on images of random height and width
  serving      continuous batching: requests of random lengths come and go, each with a
               cache of its own
  packed       training on sequences of random lengths that are packed into one row

Everything is drawn from generators of a fixed seed that go on from pass to pass, so the
same pass is the same for every allocator. What is drawn never depends on what was
computed. Only the experts' loads do, and those repeat as the losses do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import workloads
from torch import nn
from torch.nn import functional
from workloads import SMALL, Shape, Step

T = TypeVar("T")

#: mix(layer, q, k, v): attention of that layer, all [tokens, heads, head] with positions in
#: q and k.
Mix = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

MIXED = Shape(vocabulary=16000, layers=6, hidden=1408)
PACKED = Shape(vocabulary=16000, layers=8)
SERVED = Shape(width=2048, hidden=5632, longest=4096)


def never_twice(draw: Callable[[], T]) -> Iterator[T]:
    """What `draw` gives, without what it gave before."""
    seen: set[T] = set()
    while True:
        one = draw()
        if one not in seen:
            seen.add(one)
            yield one


# --- a decoder over one row of tokens ----------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of [batch, tokens, heads, head]: causal, or one token that sees all of k."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    return mixed.transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Experts(nn.Module):
    """Each token of x [tokens, width] goes to its router's `chosen` best experts, whose
    answers are summed, weighted by the router's probabilities.

    loads: tokens for each expert in the last call; imbalance: the auxiliary loss of that
    call, 1 where all experts are used alike.
    """

    imbalance: torch.Tensor

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(experts))
        self.chosen = chosen
        self.loads: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        likes = self.router(x).float().softmax(dim=-1)
        # Without topk's own backward, which is not deterministic.
        best = likes.detach().topk(self.chosen, dim=-1).indices.flatten()
        expert, order = best.sort(stable=True)
        token = order // self.chosen
        counts = (best[:, None] == torch.arange(len(self.experts), device=x.device)).sum(dim=0)
        self.loads = counts.tolist()  # the host waits: sizes depend on it
        self.imbalance = len(counts) * (counts / len(best) * likes.mean(dim=0)).sum()
        parts = x.index_select(0, token).split(self.loads)
        answers = torch.cat([one(part) for one, part in zip(self.experts, parts, strict=True)])
        weighted = answers * likes[token, expert][:, None]
        return weighted.new_zeros(x.shape).index_add(0, token, weighted)


class Block(nn.Module):
    def __init__(self, shape: Shape, feed: nn.Module) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.between = nn.RMSNorm(shape.width)
        self.feed = feed

    def forward(
        self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, layer: int, mix: Mix
    ) -> torch.Tensor:
        def rotate(x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, dim=-1)
            return x * cosine.to(x.dtype) + torch.cat((-right, left), dim=-1) * sine.to(x.dtype)

        q, k, v = self.qkv(self.before(x)).view(len(x), 3, self.heads, -1).unbind(dim=1)
        x = x + self.out(mix(layer, rotate(q), rotate(k), v).flatten(1))
        return x + self.feed(self.between(x))


class Decoder(nn.Module):
    """model(ids, positions, mix), both int64 [tokens]: [tokens, width], of which `logits`
    makes [tokens, vocabulary]. `feed` makes the second half of each layer."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, shape: Shape, feed: Callable[[], nn.Module]) -> None:
        super().__init__()
        head = shape.width // shape.heads
        rates = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
        angles = (torch.arange(shape.longest).float()[:, None] * rates).repeat(1, 2)[:, None]
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape, feed()) for _ in range(shape.layers))
        self.last = nn.RMSNorm(shape.width)
        self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mix: Mix) -> torch.Tensor:
        x = self.embed(ids)
        cosine, sine = self.cosine[positions], self.sine[positions]
        for number, layer in enumerate(self.layers):
            x = layer(x, cosine, sine, number, mix)
        return self.last(x)


def decoder(shape: Shape, feed: Callable[[], nn.Module] | None = None) -> Decoder:
    """One on the GPU; by default each layer ends in a SwiGLU."""
    with torch.device(workloads.DEVICE):
        return Decoder(shape, feed or (lambda: SwiGLU(shape.width, shape.hidden)))


def each_apart(lengths: Sequence[int]) -> Mix:
    """Attention of sequences that lie one behind the other, none of which sees another."""

    def mix(_: int, *qkv: torch.Tensor) -> torch.Tensor:
        parts = (one[None].split(list(lengths), dim=1) for one in qkv)
        return torch.cat([attend(*one) for one in zip(*parts, strict=True)], dim=1)[0]

    return mix


def positions_of(lengths: Sequence[int]) -> torch.Tensor:
    """int64 [sum of lengths]: each sequence begins at 0."""
    counted = itertools.chain.from_iterable(map(range, lengths))
    return torch.tensor(list(counted), device=workloads.DEVICE)


class Texts:
    """Random tokens, of which each sequence has its own stretch."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        self.tokens = torch.randint(shape.vocabulary, (1 << 18,), device=workloads.DEVICE)
        self.draw = draw

    def take(self, length: int) -> torch.Tensor:
        """int64 [length], a view."""
        begin = self.draw.randrange(len(self.tokens) - length)
        return self.tokens[begin : begin + length]

    def pack(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences of these lengths in one row, and the token that follows each of theirs."""
        taken = [self.take(length + 1) for length in lengths]
        return torch.cat([one[:-1] for one in taken]), torch.cat([one[1:] for one in taken])


def trainer(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """step(...): one step of AdamW under bf16 autocast on loss_of(...), which it gives."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-4)

    def step(*inputs: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(workloads.DEVICE, dtype=torch.bfloat16):
            loss = loss_of(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# --- the jobs ----------------------------------------------------------------


def moe(small: bool) -> Step:
    """Four sequences of one random length a step; 8 experts a layer, 2 for each token."""
    shape = SMALL if small else MIXED
    shortest, batch = (64, 2) if small else (512, 4)
    draw = random.Random(11)
    texts = Texts(shape, draw)
    model = decoder(shape, lambda: Experts(shape.width, shape.hidden, 8, 2))

    def loss_of(length: int) -> torch.Tensor:
        lengths = [length] * batch
        ids, targets = texts.pack(lengths)

        def mix(_: int, *qkv: torch.Tensor) -> torch.Tensor:
            return attend(*(one.unflatten(0, (batch, length)) for one in qkv)).flatten(0, 1)

        logits = model.logits(model(ids, positions_of(lengths), mix))
        spread = sum(layer.feed.imbalance for layer in model.layers)
        return functional.cross_entropy(logits.float(), targets) + 0.01 * spread

    step = trainer(model, loss_of)
    return lambda number: step(draw.randint(shortest, shape.longest))


def packing(draw: random.Random, least: int, most: int, longest: int) -> tuple[int, ...]:
    """Lengths of sequences whose sum is from `least` to `most`: random up to `longest`, of
    which the last is cut off."""
    left = draw.randint(least, most)
    lengths = []
    while left:
        lengths.append(min(left, draw.randint(min(64, longest // 4), longest)))
        left -= lengths[-1]
    return tuple(lengths)


def packed(small: bool) -> Step:
    """Rows of 2,048 to 8,192 tokens of a Llama, of sequences of up to 2,048."""
    shape = SMALL if small else PACKED
    least, most = (64, 256) if small else (2048, 8192)
    draw = random.Random(12)
    texts = Texts(shape, draw)
    model = decoder(shape)

    def loss_of(lengths: Sequence[int]) -> torch.Tensor:
        ids, targets = texts.pack(lengths)
        logits = model.logits(model(ids, positions_of(lengths), each_apart(lengths)))
        return functional.cross_entropy(logits.float(), targets)

    step = trainer(model, loss_of)
    rows = never_twice(lambda: packing(draw, least, most, shape.longest))
    return lambda number: step(next(rows))


@dataclass
class Request:
    """latest: what goes through the model next, int64: the prompt, then token by token.
    caches: (keys, values) of each layer, [seen, heads, head]."""

    latest: torch.Tensor
    left: int
    seen: int = 0
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def serve(model: Decoder, requests: Sequence[Request]) -> torch.Tensor:
    """The next token of each request, int64 [requests], in one step for all of them,
    whether they bring a prompt or one token."""
    counts = [len(one.latest) for one in requests]

    def mix(layer: int, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        mixed = []
        parts = (one.split(counts) for one in (q, *kv))
        for request, one, k, v in zip(requests, *parts, strict=True):
            if layer in request.caches:
                keys, values = request.caches[layer]
                k, v = torch.cat((keys, k)), torch.cat((values, v))
            else:  # a view would keep the whole step's
                k, v = k.clone(), v.clone()
            request.caches[layer] = k, v
            mixed.append(attend(one[None], k[None], v[None])[0])
        return torch.cat(mixed)

    places = [range(one.seen, one.seen + count) for one, count in zip(requests, counts)]
    positions = torch.tensor(list(itertools.chain(*places)), device=workloads.DEVICE)
    x = model(torch.cat([one.latest for one in requests]), positions, mix)
    ends = torch.tensor(list(itertools.accumulate(counts)), device=workloads.DEVICE) - 1
    tokens = model.logits(x[ends]).argmax(dim=-1)
    for request, count, token in zip(requests, counts, tokens.split(1), strict=True):
        request.latest, request.seen, request.left = token, request.seen + count, request.left - 1
    return tokens


def serving(small: bool) -> Step:
    """bf16 inference for up to 32 requests with prompts of 128 to 3,072 tokens, which get 8 to
    128 more; up to two join a step."""
    shape = SMALL if small else SERVED
    most, prompts, answers = (4, (8, 96), (2, 16)) if small else (32, (128, 3072), (8, 128))
    draw = random.Random(13)
    texts = Texts(shape, draw)
    model = decoder(shape).to(torch.bfloat16).eval()
    running: list[Request] = []

    def step(number: int) -> torch.Tensor:
        for _ in range(draw.randint(0 if running else 1, 2)):
            if len(running) < most:
                running.append(Request(texts.take(draw.randint(*prompts)), draw.randint(*answers)))
        with torch.inference_mode():
            tokens = serve(model, running)
        running[:] = [one for one in running if one.left]
        return tokens.sum().float()

    return step


class UNet(nn.Module):
    """A U-Net without attention: x [batch, 3, height, width] to the same shape, whatever
    height and width are; half the size and twice the channels with each level."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()

        def twice(before: int, after: int) -> nn.Module:
            layers: list[nn.Module] = []
            for width in (before, after):
                layers += [
                    nn.Conv2d(width, after, 3, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(inplace=True),
                ]
            return nn.Sequential(*layers)

        pairs = list(itertools.pairwise(channels))
        self.first = twice(3, channels[0])
        self.halve = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.down = nn.ModuleList(twice(b, b) for _, b in pairs)
        self.up = nn.ModuleList(twice(a + b, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(channels[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skipped = []
        for halve, down in zip(self.halve, self.down, strict=True):
            skipped.append(x)
            x = down(halve(x))
        for up in self.up:
            beside = skipped.pop()
            x = functional.interpolate(x, size=beside.shape[2:], mode="nearest")
            x = up(torch.cat((x, beside), dim=1))
        return self.last(x)


def resolutions(small: bool) -> Step:
    """Finding the noise in 8 images of 160 to 512 pixels either way."""
    channels, batch, shortest, longest = (
        ((8, 16), 2, 17, 64) if small else ((64, 128, 256, 512), 8, 160, 512)
    )
    draw = random.Random(14)
    with torch.device(workloads.DEVICE):
        model = UNet(channels)
        images = torch.randn(batch, 3, longest, longest)

    def loss_of(height: int, width: int) -> torch.Tensor:
        clean = images[:, :, :height, :width]
        noise = torch.randn_like(clean)
        return functional.mse_loss(model(clean + noise).float(), noise)

    step = trainer(model, loss_of)
    sizes = never_twice(lambda: (draw.randint(shortest, longest), draw.randint(shortest, longest)))
    return lambda number: step(*next(sizes))
