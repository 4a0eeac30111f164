"""Whole jobs that jobs.py and limits.py run: models with random weights, nothing downloaded.

Each job is a *schedule* of steps that is gone through several times. What a step
computes depends on its number, the steps before it and the seed alone, so every allocator
gets the same sequence of requests, and the outputs of the same pass can be compared bit for
bit. In the jobs of random_sizes.py no step has the sizes of another.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Where the jobs run; tests of the models themselves choose the CPU.
DEVICE = "cuda"

#: A step by its number in the schedule; its output is a number on the GPU.
Step = Callable[[int], Any]


@dataclass(frozen=True)
class Job:
    """make(small) builds the model and returns the step. `steps` are in a schedule, and
    going through all of them is a pass. `strict`:
    PyTorch may refuse what is not deterministic, as attention's backward needs to be
    told; otherwise it warns. `by_place`: what it computes may depend on where tensors lie."""

    make: Callable[[bool], Step]
    steps: int
    small_steps: int
    strict: bool
    schedule: str
    by_place: bool = False


# --- a Llama, in plain PyTorch -----------------------------------------------


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 32000
    width: int = 1024
    layers: int = 12
    heads: int = 16
    hidden: int = 2816
    longest: int = 2048


SMALL = Shape(vocabulary=256, width=64, layers=2, heads=4, hidden=128, longest=128)


def llama(shape: Shape) -> torch.nn.Module:
    """A Llama on the GPU: RMSNorm, rotary positions, SwiGLU, no biases.

    model(ids, caches) takes int64 [batch, length] and gives logits [batch, length,
    vocabulary]. `caches`, where given, is a list of (keys, values) for each layer,
    which the call replaces by longer ones: the new positions are concatenated.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    head = shape.width // shape.heads
    rates = 10000.0 ** (-torch.arange(0, head, 2, device=DEVICE).float() / head)
    angles = torch.arange(shape.longest, device=DEVICE).float()[:, None] * rates
    cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(x: torch.Tensor, start: int) -> torch.Tensor:
        c, s = (one[start : start + x.shape[2]].to(x.dtype) for one in (cosine, sine))
        left, right = x.chunk(2, dim=-1)
        return x * c + torch.cat((-right, left), dim=-1) * s

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.RMSNorm(shape.width)
            self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
            self.out = nn.Linear(shape.width, shape.width, bias=False)
            self.between = nn.RMSNorm(shape.width)
            self.up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
            self.down = nn.Linear(shape.hidden, shape.width, bias=False)

        def forward(self, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
            batch, length, _ = x.shape
            start = cache[0].shape[2] if cache else 0
            q, k, v = (
                one.view(batch, length, shape.heads, head).transpose(1, 2)
                for one in self.qkv(self.before(x)).chunk(3, dim=-1)
            )
            q, k = rotate(q, start), rotate(k, start)
            if cache:
                k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, shape.width))
            gate, up = self.up(self.between(x)).chunk(2, dim=-1)
            return x + self.down(functional.silu(gate) * up), (k, v)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocabulary, shape.width)
            self.layers = nn.ModuleList(Layer() for _ in range(shape.layers))
            self.last = nn.RMSNorm(shape.width)
            self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)

        def forward(self, ids: torch.Tensor, caches: list[Any] | None = None) -> torch.Tensor:
            x = self.embed(ids)
            for number, layer in enumerate(self.layers):
                x, cache = layer(x, caches[number] if caches is not None else None)
                if caches is not None:
                    caches[number] = cache
            return self.logits(self.last(x))

    with torch.device(DEVICE):
        return Llama()


# --- the jobs ----------------------------------------------------------------


def gpt2(small: bool) -> Step:
    """train.py's GPT-2."""
    import train

    step = train.gpt2(small)
    return lambda number: step()


def resnet50(small: bool) -> Step:
    """train.py's ResNet-50."""
    import train

    step = train.resnet50(small)
    return lambda number: step()


#: Of llama_varlen: the most sequences of a batch, the shortest and the longest.
MOST_SEQUENCES, SHORTEST, LONGEST = 6, 64, 2048


def varlen_schedule(steps: int, sequences: int, longest: int) -> list[tuple[int, int]]:
    """(batch, length) of each step; some step has the most of both."""
    draw = random.Random(7)
    drawn = [
        (draw.randint(1, sequences), draw.randint(min(SHORTEST, longest), longest))
        for _ in range(steps)
    ]
    drawn[steps * 2 // 3] = (sequences, longest)
    return drawn


def llama_trainer(shape: Shape) -> Callable[[int, int], Any]:
    """step(batch, length): one training step, bf16 autocast, AdamW; gives the loss."""
    import torch
    from torch.nn import functional

    model = llama(shape).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(shape.vocabulary, (64, shape.longest), device=DEVICE)

    def step(batch: int, length: int) -> torch.Tensor:
        ids = tokens[:batch, :length]
        if batch > len(tokens):
            ids = tokens[:1, :length].expand(batch, length).contiguous()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = model(ids)
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
            )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def llama_varlen(small: bool) -> Step:
    """Training on batches of 1 to 6 sequences of 64 to 2048 tokens."""
    shape = SMALL if small else Shape()
    job = JOBS["llama_varlen"]
    schedule = varlen_schedule(
        job.small_steps if small else job.steps,
        2 if small else MOST_SEQUENCES,
        shape.longest if small else LONGEST,
    )
    step = llama_trainer(shape)
    return lambda number: step(*schedule[number])


def llama_decode(small: bool) -> Step:
    """Decoding, one token for each of 32 sequences a step, bf16; the cache of each
    layer grows by concatenation. Step 0 takes the prompts of 128 tokens anew."""
    import torch

    shape = SMALL if small else Shape()
    batch, prompt = (2, 8) if small else (32, 128)
    model = llama(shape).to(torch.bfloat16).eval()
    prompts = torch.randint(shape.vocabulary, (batch, prompt), device=DEVICE)
    caches: list[Any] = []
    latest = prompts

    def step(number: int) -> torch.Tensor:
        nonlocal latest
        with torch.inference_mode():
            if number == 0:
                caches[:] = [None] * shape.layers
                latest = prompts
            latest = model(latest, caches)[:, -1:].argmax(dim=-1)
            return latest.sum().float()

    return step


def ppo(small: bool) -> Step:
    """One iteration of PPO a step: 64 environments on the GPU, 128 steps of each,
    4 epochs of 4 minibatches, MLPs of 256; many small tensors."""
    import torch
    from torch import nn

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
            seen, taken, before, guessed, gained = map(
                torch.cat, (states, chosen, logs, values, gains)
            )
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


def of_random_sizes(name: str) -> Callable[[bool], Step]:
    """A job of random_sizes.py, which imports torch."""

    def make(small: bool) -> Step:
        return getattr(importlib.import_module("random_sizes"), name)(small)

    return make


JOBS: dict[str, Job] = {
    "gpt2": Job(gpt2, 10, 4, True, "batches of 8 x 1024 tokens, bf16 autocast, AdamW"),
    "llama_varlen": Job(
        llama_varlen, 40, 6, True, "1 to 6 sequences of 64 to 2048 tokens, bf16 autocast, AdamW"
    ),
    "llama_decode": Job(
        llama_decode, 300, 12, False, "32 sequences, prompts of 128 tokens and 299 more, bf16", True
    ),
    "resnet50": Job(
        resnet50, 10, 4, False, "batches of 128 images of 224 x 224, bf16 autocast, AdamW"
    ),
    "ppo": Job(
        ppo, 5, 3, False, "64 environments, 128 steps each, 4 epochs of 4 minibatches, Adam"
    ),
    "moe": Job(
        of_random_sizes("moe"), 12, 3, True,
        "4 sequences of 512 to 2048 tokens, 8 experts, 2 for each token, bf16 autocast, AdamW",
    ),
    "resolutions": Job(
        of_random_sizes("resolutions"), 16, 3, False,
        "8 images of 160 to 512 pixels either way, a U-Net, bf16 autocast, AdamW",
    ),
    "serving": Job(
        of_random_sizes("serving"), 40, 12, False,
        "up to 32 requests, prompts of 128 to 3072 tokens and 8 to 128 more, bf16", True,
    ),
    "packed": Job(
        of_random_sizes("packed"), 20, 3, True,
        "rows of 2048 to 8192 tokens, sequences of up to 2048, bf16 autocast, AdamW",
    ),
}  # fmt: skip


def import_job(name: str) -> None:
    """Imports what a job needs, which takes seconds, and touches no device. Optimizers import
    torch._dynamo as they are made."""
    import torch._dynamo  # noqa: F401

    models = {"gpt2": "transformers.models.gpt2.modeling_gpt2", "resnet50": "torchvision.models"}
    if name in models:
        importlib.import_module(models[name])
