"""PPO whose trainer and engine take turns on one GPU: one sleeps while the other works.

    python examples/ppo_sleep.py [--plot turns.svg]

The engine decodes answers with one captured CUDA graph, from a copy of the policy. The trainer has
the policy, a value head, gradients and AdamW's moments. Each has a tag, so the device memory of
the one is free while the other works, and the graph is replayed after every wake as it was. The
task: answer a digit with its multiples, one after the other. Prints for each round how much device
memory is held in either half, and the mean reward. --plot draws the memory of both over time
(needs matplotlib), --samples writes it down.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical

import esper_alloc

DIGITS, LENGTH, BATCH, WIDTH = 10, 6, 512, 1024
MIB = 2**20


class Policy(nn.Module):
    """The next digit, from the question, the place and the digit before."""

    def __init__(self) -> None:
        super().__init__()
        self.question = nn.Embedding(DIGITS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.before = nn.Embedding(DIGITS + 1, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(
        self, question: torch.Tensor, place: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        x = self.question(question) + self.place(place) + self.before(before)
        return self.body(x)


class Engine:
    """Decodes with a graph. All of it, the graph's private pool included, has one tag."""

    def __init__(self) -> None:
        with esper_alloc.tag("engine"), torch.no_grad():
            self.policy = Policy().cuda()
            self.question = torch.zeros(BATCH, dtype=torch.long, device="cuda")
            self.places = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH).contiguous()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.decode()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.answer = self.decode()

    def decode(self) -> torch.Tensor:
        before = torch.full_like(self.question, DIGITS)
        answer = []
        for place in range(LENGTH):
            hidden = self.policy(self.question, self.places[:, place], before)
            logits = self.policy.head(hidden)
            noise = -torch.empty_like(logits).exponential_().log()
            before = (logits + noise).argmax(-1)  # a sample, by Gumbel noise
            answer.append(before)
        return torch.stack(answer, 1)

    def generate(self, question: torch.Tensor) -> torch.Tensor:
        self.question.copy_(question)
        self.graph.replay()
        return self.answer.clone()


class Trainer:
    def __init__(self) -> None:
        with esper_alloc.tag("trainer"):
            self.policy = Policy().cuda()
            self.value = nn.Linear(WIDTH, 1).cuda()
            parameters = [*self.policy.parameters(), *self.value.parameters()]
            self.optimizer = torch.optim.AdamW(parameters, lr=3e-4)
            # What backward allocates has no tag, so gradients are allocated here and kept.
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)

    def evaluate(
        self, question: torch.Tensor, answer: torch.Tensor
    ) -> tuple[Categorical, torch.Tensor]:
        place = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)
        start = torch.full((BATCH, 1), DIGITS, device="cuda")
        before = torch.cat([start, answer[:, :-1]], 1)
        hidden = self.policy(question[:, None].expand(BATCH, LENGTH), place, before)
        return Categorical(logits=self.policy.head(hidden)), self.value(hidden)[..., 0]

    def train(self, question: torch.Tensor, answer: torch.Tensor, reward: torch.Tensor) -> None:
        with torch.no_grad():
            chosen, value = self.evaluate(question, answer)
            old = chosen.log_prob(answer)
            advantage = reward - value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        for _ in range(4):
            chosen, value = self.evaluate(question, answer)
            ratio = (chosen.log_prob(answer) - old).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantage
            loss = -torch.minimum(ratio * advantage, clipped).mean()
            loss = loss + 0.5 * (reward - value).square().mean() - 0.01 * chosen.entropy().mean()
            self.optimizer.zero_grad(set_to_none=False)
            loss.backward()
            self.optimizer.step()


def rewards(question: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    wanted = question[:, None] * torch.arange(1, LENGTH + 1, device="cuda") % DIGITS
    return (answer == wanted).float()


class Samples:
    """Device memory every few milliseconds, in MiB: of each half, of what has no tag, what the
    driver says is in use by everybody, and what sleeps."""

    def __init__(self, every: float = 0.002) -> None:
        self.rows: list[dict[str, float]] = []
        self._every, self._begin = every, time.perf_counter()
        self._over = threading.Event()

    def take(self) -> None:
        tags = esper_alloc.tag_stats()
        free, total = torch.cuda.mem_get_info()
        held = {tag: one["reserved_bytes"] for tag, one in tags.items()}
        of = {
            "engine": held.pop("engine", 0),
            "trainer": held.pop("trainer", 0),
            "other": sum(held.values()),
            "device": total - free,
            "asleep": sum(one["sleeping_bytes"] for one in tags.values()),
        }
        seconds = time.perf_counter() - self._begin
        self.rows.append({"seconds": seconds, **{name: size / MIB for name, size in of.items()}})

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A thread takes them inside. Figures can be read while memory goes to sleep or wakes."""

        def run() -> None:
            while not self._over.wait(self._every):
                self.take()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


def draw(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "turns"  # the same bytes for the same samples
    sheet = Figure(figsize=(8, 3.6), layout="constrained")
    axis = sheet.subplots()
    seconds = [row["seconds"] for row in rows]
    shares = {"other": "#bbbbbb", "engine": "#2f6fb0", "trainer": "#c4612b"}
    axis.stackplot(
        seconds, *([row[name] for row in rows] for name in shares),
        colors=list(shares.values()), labels=["without a tag", "engine", "trainer"], step="post",
    )  # fmt: skip
    both = [sum(row[name] for name in shares) + row["asleep"] for row in rows]
    axis.step(seconds, both, "k--", where="post", linewidth=1, label="what sleeps on top")
    axis.set_title("A trainer and an engine take turns: device memory", loc="left")
    axis.set_xlabel("seconds")
    axis.set_ylabel("MiB")
    axis.set_xlim(seconds[0], seconds[-1])
    axis.set_ylim(0)
    axis.legend(loc="lower right", ncols=4, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    sheet.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def take_turns(trainer: Trainer, engine: Engine, rounds: int) -> None:
    mean = torch.zeros(())
    for number in range(rounds):
        # The engine has the GPU.
        question = torch.randint(DIGITS, (BATCH,), device="cuda")
        answer = engine.generate(question)
        reward = rewards(question, answer)
        decoding = torch.cuda.memory_reserved() // MIB
        # The trainer has it. Only while the weights are copied are both awake.
        esper_alloc.sleep("engine")
        esper_alloc.wake("trainer")
        with esper_alloc.tag("trainer"):
            trainer.train(question, answer, reward)
        torch.cuda.empty_cache()
        training = torch.cuda.memory_reserved() // MIB
        esper_alloc.wake("engine")
        with torch.no_grad():
            for mine, theirs in zip(
                engine.policy.parameters(), trainer.policy.parameters(), strict=True
            ):
                mine.copy_(theirs)
        result = esper_alloc.sleep("trainer")
        mean = reward.mean()
        if number % 20 == 0 or number + 1 == rounds:
            print(
                f"round {number}: reward {float(mean):.2f}; {decoding} MiB while the engine "
                f"decodes, {training} MiB while the trainer trains, "
                f"{result.kept // MIB} MiB of the trainer on the host"
            )
    print(f"mean reward {round(100 * float(mean))} percent")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of memory over time")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this example needs a CUDA GPU")
    esper_alloc.enable()
    torch.manual_seed(0)
    trainer, engine = Trainer(), Engine()
    esper_alloc.sleep("trainer")
    samples = Samples()
    with samples.taken() if options.plot or options.samples else nullcontext():
        take_turns(trainer, engine, options.rounds)
    if options.samples:
        options.samples.write_text(json.dumps(samples.rows))
    if options.plot:
        draw(samples.rows, options.plot)


if __name__ == "__main__":
    main()
