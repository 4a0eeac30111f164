"""The models that jobs train and serve, with random weights: nothing is downloaded.

docs/benchmarks.md says what the jobs are. Each is a *schedule* of steps that is gone through
several times. What a step computes depends on its number, the steps before it and the seed alone,
so every allocator gets the same sequence of requests, and the outputs of the same pass can be
compared bit for bit.

In moe, resolutions, serving and packed no step has the sizes of another. Everything there is drawn
from generators of a fixed seed that go on from pass to pass. What is drawn never depends on what
was computed. Only the experts' loads do, and those repeat as the losses do.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

#: Where the jobs run; tests of the models themselves choose the CPU.
DEVICE = "cuda"

#: A step by its number in the schedule; its output is a number on the GPU.
Step = Callable[[int], Any]


@dataclass(frozen=True)
class Job:
    """make(small) builds the model and returns the step. `steps` are in a schedule, and going
    through all of them is a pass. `strict`: PyTorch may refuse what is not deterministic, as
    attention's backward needs to be told; otherwise it warns."""

    make: Callable[[bool], Step]
    steps: int
    small_steps: int
    strict: bool = False


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 32000
    width: int = 1024
    layers: int = 12
    heads: int = 16
    hidden: int = 2816
    longest: int = 2048


SMALL = Shape(vocabulary=256, width=64, layers=2, heads=4, hidden=128, longest=128)


# --- the jobs of fixed sizes ---
def trainer(
    model: nn.Module, loss_of: Callable[..., torch.Tensor], lr: float = 3e-4, **adam: Any
) -> Callable[..., torch.Tensor]:
    """step(...): one step of AdamW under bf16 autocast on loss_of(...), which it gives."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=lr, **adam)

    def step(*inputs: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def gpt2(small: bool) -> Callable[..., Any]:
    """One step of a Hugging Face GPT-2 (124 M parameters) on 8 sequences of 1,024 tokens, bf16
    autocast, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config, batch, length = GPT2Config(), 8, 1024
    if small:
        config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=2, n_positions=64)
        batch, length = 2, 64
    config.use_cache = False
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config).train()
    step = trainer(model, lambda ids: model(input_ids=ids, labels=ids).loss, weight_decay=0.1)
    tokens = [torch.randint(config.vocab_size, (batch, length), device="cuda") for _ in range(4)]
    turns = itertools.cycle(tokens)
    return lambda number=0: step(next(turns))


def resnet50(small: bool) -> Step:
    """One step of torchvision's ResNet-50 on 224 x 224 images, bf16 autocast, AdamW."""
    from torchvision.models import resnet50 as make

    batch, side = (2, 64) if small else (128, 224)
    with torch.device("cuda"):
        model = make(weights=None).train()
    images = [torch.randn(batch, 3, side, side, device="cuda") for _ in range(2)]
    targets = [torch.randint(1000, (batch,), device="cuda") for _ in range(2)]
    turns = itertools.cycle(zip(images, targets))
    step = trainer(model, lambda x, wanted: functional.cross_entropy(model(x), wanted), lr=1e-3)
    return lambda number: step(*next(turns))


def ppo(small: bool) -> Step:
    """One iteration of PPO a step: 64 environments on the GPU, 128 steps of each,
    4 epochs of 4 minibatches, MLPs of 256; many small tensors."""
    environments, horizon, observed, actions = (4, 8, 8, 4) if small else (64, 128, 64, 8)
    width, epochs, minibatches, discount, trace = 16 if small else 256, 4, 4, 0.99, 0.95

    def network(outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(observed, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, outputs),
        )  # fmt: skip

    with torch.device(DEVICE):
        policy, value = network(actions), network(1)
        dynamics = torch.randn(observed, observed) / observed**0.5
        pushes = torch.randn(actions, observed)
        wanted = torch.randn(observed)
        state = torch.randn(environments, observed)
    weights = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(weights, lr=3e-4)

    def roll_out() -> tuple[list[torch.Tensor], ...]:
        nonlocal state
        states, chosen, logs, rewards, values = [], [], [], [], []
        for _ in range(horizon):
            logits = torch.log_softmax(policy(state), dim=-1)
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
            action = (logits + noise).argmax(dim=-1)
            states.append(state)
            chosen.append(action)
            logs.append(logits.gather(1, action[:, None])[:, 0])
            values.append(value(state)[:, 0])
            state = torch.tanh(state @ dynamics + pushes[action])
            rewards.append(-(state - wanted).square().mean(dim=-1))
        return states, chosen, logs, rewards, values

    def step(number: int) -> torch.Tensor:
        with torch.no_grad():
            states, chosen, logs, rewards, values = roll_out()
            following, gain = value(state)[:, 0], torch.zeros(environments, device=DEVICE)
            gains: list[torch.Tensor] = []
            for reward, guess in zip(reversed(rewards), reversed(values)):
                gain = reward + discount * following - guess + discount * trace * gain
                following = guess
                gains.insert(0, gain)
            all_of = (states, chosen, logs, values, gains)
            seen, taken, before, guessed, gained = map(torch.cat, all_of)
            returns = gained + guessed
            gained = (gained - gained.mean()) / (gained.std() + 1e-8)
        total = torch.zeros((), device=DEVICE)
        for _ in range(epochs):
            for some in torch.randperm(len(seen), device=DEVICE).chunk(minibatches):
                logits = torch.log_softmax(policy(seen[some]), dim=-1)
                ratio = (logits.gather(1, taken[some][:, None])[:, 0] - before[some]).exp()
                surrogate = torch.min(ratio * gained[some], ratio.clamp(0.8, 1.2) * gained[some])
                entropy = -(logits.exp() * logits).sum(dim=-1).mean()
                error = (value(seen[some])[:, 0] - returns[some]).square().mean()
                loss = 0.5 * error - surrogate.mean() - 0.01 * entropy
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
                total += loss.detach()
        return total

    return step


# --- a Llama, in plain PyTorch ---
#: mix(layer, q, k, v): attention of that layer, all [tokens, heads, head] with positions in
#: q and k.
Mix = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: Keys and values of each layer.
Caches = dict[int, tuple[torch.Tensor, torch.Tensor]]

MIXED = Shape(vocabulary=16000, layers=6, hidden=1408)
PACKED = Shape(vocabulary=16000, layers=8)
SERVED = Shape(width=2048, hidden=5632, longest=4096)


def never_twice(draw: Callable[[], Any]) -> Iterator[Any]:
    """What `draw` gives, without what it gave before."""
    seen = set()
    while True:
        one = draw()
        if one not in seen:
            seen.add(one)
            yield one


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
        counts = (best[:, None] == torch.arange(likes.shape[1], device=x.device)).sum(dim=0)
        self.imbalance = len(counts) * (counts / len(best) * likes.mean(dim=0)).sum()
        answers = self.ask(x.index_select(0, token), counts)
        weighted = answers * likes[token, expert][:, None]
        return weighted.new_zeros(x.shape).index_add(0, token, weighted)

    def ask(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The answers of the experts, to each of which go as many rows."""
        self.loads = counts.tolist()  # the host waits: sizes depend on it
        parts = rows.split(self.loads)
        return torch.cat([one(part) for one, part in zip(self.experts, parts, strict=True)])


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

    def __init__(self, shape: Shape, feed: Callable[[], nn.Module]) -> None:
        super().__init__()
        head = shape.width // shape.heads
        rates = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
        angles = (torch.arange(shape.longest).float()[:, None] * rates).repeat(1, 2)[:, None]
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
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
    with torch.device(DEVICE):
        return Decoder(shape, feed or (lambda: SwiGLU(shape.width, shape.hidden)))


def together(batch: int, length: int) -> Mix:
    """Attention of sequences of one length that lie one behind the other."""

    def mix(_: int, *qkv: torch.Tensor) -> torch.Tensor:
        return attend(*(one.unflatten(0, (batch, length)) for one in qkv)).flatten(0, 1)

    return mix


def each_apart(lengths: Sequence[int]) -> Mix:
    """Attention of sequences that lie one behind the other, none of which sees another."""

    def mix(_: int, *qkv: torch.Tensor) -> torch.Tensor:
        parts = (one[None].split(list(lengths), dim=1) for one in qkv)
        return torch.cat([attend(*one) for one in zip(*parts, strict=True)], dim=1)[0]

    return mix


def positions_of(lengths: Sequence[int]) -> torch.Tensor:
    """int64 [sum of lengths]: each sequence begins at 0."""
    return torch.tensor([*itertools.chain(*map(range, lengths))], device=DEVICE)


class Llama(Decoder):
    """model(ids, caches): of int64 [batch, length] the logits [batch, length, vocabulary].
    `caches`, where given, has (keys, values) of each layer, [batch, seen, heads, head], which the
    call replaces by longer ones: the new positions are concatenated."""

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, caches: Caches | None = None
    ) -> torch.Tensor:
        batch, length = ids.shape
        seen = caches[0][0].shape[1] if caches else 0

        def mix(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            q, k, v = (one.unflatten(0, ids.shape) for one in qkv)
            if caches is not None:
                if layer in caches:
                    keys, values = caches[layer]
                    k, v = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
                caches[layer] = k, v
            return attend(q, k, v).flatten(0, 1)

        positions = torch.arange(seen, seen + length, device=ids.device).repeat(batch)
        x = super().forward(ids.flatten(), positions, mix)
        return self.logits(x).unflatten(0, ids.shape)


def llama(shape: Shape) -> Llama:
    """One on the GPU."""
    with torch.device(DEVICE):
        return Llama(shape, lambda: SwiGLU(shape.width, shape.hidden))


def loss_of_next(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the token that follows each."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Texts:
    """Random tokens, of which each sequence has its own stretch."""

    def __init__(self, shape: Shape, draw: random.Random) -> None:
        self.tokens = torch.randint(shape.vocabulary, (1 << 18,), device=DEVICE)
        self.draw = draw

    def take(self, length: int) -> torch.Tensor:
        """int64 [length], a view."""
        begin = self.draw.randrange(len(self.tokens) - length)
        return self.tokens[begin : begin + length]

    def pack(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences of these lengths in one row, and the token that follows each of theirs."""
        taken = [self.take(length + 1) for length in lengths]
        return torch.cat([one[:-1] for one in taken]), torch.cat([one[1:] for one in taken])


# --- the jobs of many sizes ---
def llama_varlen(small: bool) -> Step:
    """Training on batches of 1 to 6 sequences of 64 to 2048 tokens; one step has the most."""
    shape, most = (SMALL, 2) if small else (Shape(), 6)
    job, draw = JOBS["llama_varlen"], random.Random(7)
    steps = job.small_steps if small else job.steps
    sizes = [(draw.randint(1, most), draw.randint(64, shape.longest)) for _ in range(steps)]
    sizes[steps * 2 // 3] = (most, shape.longest)
    model = llama(shape)
    tokens = torch.randint(shape.vocabulary, (most, shape.longest), device=DEVICE)

    def loss_of(batch: int, length: int) -> torch.Tensor:
        ids = tokens[:batch, :length]
        return loss_of_next(model(ids), ids)

    step = trainer(model, loss_of)
    return lambda number: step(*sizes[number])


def llama_decode(small: bool) -> Step:
    """Decoding, one token for each of 32 sequences a step, bf16; the cache of each
    layer grows by concatenation. Step 0 takes the prompts of 128 tokens anew."""
    shape, batch, prompt = (SMALL, 2, 8) if small else (Shape(), 32, 128)
    model = llama(shape).to(torch.bfloat16).eval()
    prompts = torch.randint(shape.vocabulary, (batch, prompt), device=DEVICE)
    caches: Caches = {}
    latest = prompts

    def step(number: int) -> torch.Tensor:
        nonlocal latest
        with torch.inference_mode():
            if number == 0:
                caches.clear()
                latest = prompts
            latest = model(latest, caches)[:, -1:].argmax(dim=-1)
            return latest.sum().float()

    return step


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
        logits = model.logits(model(ids, positions_of(lengths), together(batch, length)))
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
    caches: [seen, heads, head]."""

    latest: torch.Tensor
    left: int
    seen: int = 0
    caches: Caches = field(default_factory=dict)


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
    positions = torch.tensor([*itertools.chain(*places)], device=DEVICE)
    x = model(torch.cat([one.latest for one in requests]), positions, mix)
    ends = torch.tensor(list(itertools.accumulate(counts)), device=DEVICE) - 1
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
    channels, batch = ((8, 16), 2) if small else ((64, 128, 256, 512), 8)
    shortest, longest = (17, 64) if small else (160, 512)
    draw = random.Random(14)
    with torch.device(DEVICE):
        model = UNet(channels)
        images = torch.randn(batch, 3, longest, longest)

    def loss_of(height: int, width: int) -> torch.Tensor:
        clean = images[:, :, :height, :width]
        noise = torch.randn_like(clean)
        return functional.mse_loss(model(clean + noise).float(), noise)

    step = trainer(model, loss_of)
    sizes = never_twice(lambda: (draw.randint(shortest, longest), draw.randint(shortest, longest)))
    return lambda number: step(*next(sizes))


# --- all of them ---
JOBS: dict[str, Job] = {
    "gpt2": Job(gpt2, 10, 4, strict=True),
    "llama_varlen": Job(llama_varlen, 40, 6, strict=True),
    "llama_decode": Job(llama_decode, 300, 12),
    "resnet50": Job(resnet50, 10, 4),
    "ppo": Job(ppo, 5, 3),
    "moe": Job(moe, 12, 3, strict=True),
    "resolutions": Job(resolutions, 16, 3),
    "serving": Job(serving, 40, 12),
    "packed": Job(packed, 20, 3, strict=True),
}


def import_job(name: str) -> None:
    """Imports what a job needs, which takes seconds, and touches no device. Optimizers import
    torch._dynamo as they are made."""
    import torch._dynamo  # noqa: F401

    models = {"gpt2": "transformers.models.gpt2.modeling_gpt2", "resnet50": "torchvision.models"}
    if name in models:
        importlib.import_module(models[name])
