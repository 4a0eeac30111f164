"""A trainer and vLLM take turns on one GPU: where the time of a step goes.

    python examples/colocated_step.py                # both in this process; needs vllm
    python -m esper_alloc run examples/colocated_step.py --engine-process
    python examples/colocated_step.py --awake        # nobody sleeps: needs memory for both
    python examples/colocated_step.py --native       # vLLM's own sleep mode; the trainer moves

A step: vLLM answers prompts, the trainer takes a policy gradient step on the answers, and vLLM gets
the new weights. While one works the other sleeps, so that each has the device's memory. The model
is a Qwen2 with random weights, and token ids stand for text, so nothing is downloaded. Prints the
seconds of each phase and the device memory in use in it; --json writes them to a file.

With --engine-process the engine has a process of its own, as vLLM starts it by default, and gets
the weights by CUDA IPC.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import esper_alloc

GIB = 2**30
#: Bytes of weights at a time. Large tensors have large pages, and the driver takes milliseconds to
#: share one with another process.
BUCKET = 4 * GIB
VOCABULARY = 32_000
#: Of Qwen2: width, width of the MLP, layers, heads, heads of keys and values.
SHAPES = {
    "tiny": (256, 512, 2, 4, 2),
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
}


def config_of(size: str) -> Any:
    from transformers import Qwen2Config

    width, inner, layers, heads, groups = SHAPES[size]
    return Qwen2Config(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=groups, vocab_size=VOCABULARY,
        max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


# --- the engine --------------------------------------------------------------
Weights = dict[str, torch.Tensor]


def buckets(weights: Weights) -> Iterator[Weights]:
    """The weights, about BUCKET bytes at a time."""
    some: Weights = {}
    for name, one in weights.items():
        some[name] = one
        if sum(x.nbytes for x in some.values()) >= BUCKET:
            yield some
            some = {}
    if some:
        yield some


def shared(weights: Weights) -> bytes:
    """A copy of the weights, all of one dtype, in one tensor, for another process: it opens one
    handle instead of hundreds. A copy, because memory that was shared does not sleep before it is
    freed."""
    from torch.multiprocessing.reductions import reduce_tensor

    copy = torch.cat([one.flatten() for one in weights.values()])
    torch.cuda.synchronize()
    return pickle.dumps((reduce_tensor(copy), {name: one.shape for name, one in weights.items()}))


def opened(shared: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights again, in another process."""
    (make, how), shapes = pickle.loads(shared)
    pieces = make(*how).split([shape.numel() for shape in shapes.values()])
    for (name, shape), piece in zip(shapes.items(), pieces):
        yield name, piece.view(shape)


class Loader:
    """What vLLM adds to its workers (`worker_extension_cls`): it loads weights that another
    process shares."""

    def load_shared(self, shared: bytes) -> None:
        model = self.model_runner.model  # type: ignore[attr-defined]
        model.load_weights(opened(shared))
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


class Engine:
    """vLLM, in this process or beside it. Apart from what vLLM puts to sleep itself, what it
    allocates here has the tag "engine": the memory of captured graphs, for one."""

    def __init__(self, options: argparse.Namespace, folder: str, temperature: float = 1.0) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(options.engine_process)))
        # This process has used CUDA by now, and a fork of it could not.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import LLM, SamplingParams

        self.options = options
        self.here = not options.engine_process
        self.tagged = self.here and not options.native
        if not self.here:
            sys.modules.setdefault("colocated_step", sys.modules["__main__"])
            paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
            os.environ["PYTHONPATH"] = os.pathsep.join(one for one in paths if one)
        with esper_alloc.tag("engine") if self.tagged else contextlib.nullcontext():
            self.llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, seed=0,
                enable_sleep_mode=not options.awake, gpu_memory_utilization=options.share,
                max_model_len=options.prompt + options.answer, enable_prefix_caching=True,
                worker_extension_cls="" if self.here else "colocated_step.Loader",
            )  # fmt: skip
        self.sampling = SamplingParams(
            max_tokens=options.answer, temperature=temperature, seed=0, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        asked = [{"prompt_token_ids": one} for one in prompts]
        answered = self.llm.generate(asked, self.sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in answered]

    def sleep(self, level: int = 2) -> None:
        """Level 2 drops the weights, because new ones come; 1 keeps them."""
        self.llm.sleep(level=level)
        if self.tagged:
            esper_alloc.sleep("engine")

    def wake(self, what: str) -> None:
        """`what`: "weights", and after those "kv_cache"."""
        if self.tagged and what == "weights":
            esper_alloc.wake("engine")
        self.llm.wake_up(tags=[what])

    def wake_all(self) -> None:
        if self.tagged:
            esper_alloc.wake("engine")
        self.llm.wake_up()

    def load(self, weights: Weights) -> None:
        if self.here:
            self.llm.apply_model(lambda model: model.load_weights(weights.items()))
        else:
            for some in buckets(weights):
                self.llm.collective_rpc("load_shared", args=(shared(some),))
            torch.cuda.ipc_collect()
        self.llm.reset_prefix_cache()  # it has keys and values of the old weights


# --- the trainer -------------------------------------------------------------
class Trainer:
    """A model, AdamW and a policy gradient, in bf16. Its memory has the tag "trainer"."""

    def __init__(self, options: argparse.Namespace, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.options, self.prompt = options, options.prompt
        with self.tag(), torch.device("cuda"):  # random weights take a minute on the host
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self.model.gradient_checkpointing_enable()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def tag(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.options.native else esper_alloc.tag("trainer")

    def train(self, tokens: torch.Tensor, rewards: torch.Tensor) -> float:
        """tokens: (batch, length), prompts and answers. rewards: (batch,). The mean loss."""
        losses = []
        with self.tag():
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            pieces = zip(tokens.split(self.options.micro), advantages.split(self.options.micro))
            for some, advantage in pieces:
                logits = self.model(some).logits[:, self.prompt - 1 : -1].float()
                chosen = logits.log_softmax(-1).gather(-1, some[:, self.prompt :, None])[..., 0]
                loss = -(chosen.mean(1) * advantage).sum() / len(tokens)
                loss.backward()
                losses.append(loss.detach())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    def fits(self) -> bool:
        """Whether the device has room for what sleeps, and a GiB to spare."""
        kept = [*self.model.parameters()]
        kept += [one for state in self.optimizer.state.values() for one in state.values()]
        return sum(one.nbytes for one in kept) + GIB < torch.cuda.mem_get_info()[0]

    def sleep(self) -> None:
        if self.options.native:
            self.move("cpu")
        else:
            torch.cuda.empty_cache()  # gradients, which backward's threads allocate, have no tag
            esper_alloc.sleep("trainer")

    def wake(self) -> None:
        if self.options.native:
            self.move("cuda")
        else:
            esper_alloc.wake("trainer")

    def move(self, device: str) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# --- a step ------------------------------------------------------------------
class Phases:
    """Seconds of each phase, and device memory in use at its end, by all processes: GiB."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.gib: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        free, total = torch.cuda.mem_get_info()
        self.gib[name] = (total - free) / GIB


def step(engine: Any, trainer: Any, prompts: list[list[int]], phase: Any, awake: bool) -> float:
    """One step; whoever does not work sleeps, unless `awake`. The loss."""
    with phase("rollout"):
        answers = engine.answer(prompts)
    if not awake:
        with phase("engine sleeps, trainer wakes"):
            # While the driver clears memory that was given back, copies are slower. So the trainer
            # wakes first where both have room.
            turns = [engine.sleep, trainer.wake]
            for turn in reversed(turns) if trainer.fits() else turns:
                turn()
    with phase("training"):
        tokens = torch.tensor([p + a for p, a in zip(prompts, answers)]).cuda()
        rewards = torch.tensor([sum(t % 2 for t in one) / len(one) for one in answers]).cuda()
        loss = trainer.train(tokens, rewards)
        del tokens, rewards
    if not awake:
        with phase("engine wakes, weights"):
            engine.wake("weights")
    with phase("new weights"):
        engine.load(dict(trainer.model.state_dict()))
    if not awake:
        with phase("trainer sleeps, engine wakes"):
            trainer.sleep()
            engine.wake("kv_cache")
    return loss


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="1.5b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each")
    parser.add_argument("--micro", type=int, default=8, help="sequences at a time in training")
    parser.add_argument("--share", type=float, default=0.6, help="of the device's memory for vLLM")
    parser.add_argument("--engine-process", action="store_true")
    parser.add_argument("--awake", action="store_true")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if min(options.steps, options.prompts, options.prompt, options.answer, options.micro) < 1:
        parser.error("--steps, --prompts, --prompt, --answer and --micro must be at least 1")
    return options


def main() -> None:
    options = parsed()
    if not torch.cuda.is_available():
        raise SystemExit("this example needs a GPU")
    if not options.native:
        esper_alloc.enable()
    torch.manual_seed(0)
    config, phase = config_of(options.size), Phases()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = Engine(options, folder)
        if not options.awake:
            engine.sleep()
        trainer = Trainer(options, config)
        if not options.awake:
            engine.wake("weights")
        engine.load(dict(trainer.model.state_dict()))
        if not options.awake:
            trainer.sleep()
            engine.wake("kv_cache")
        prompts = torch.randint(3, VOCABULARY, (options.prompts, options.prompt)).tolist()
        losses = []
        for number in range(options.steps):
            losses.append(step(engine, trainer, prompts, phase, options.awake))
            took = sum(one[-1] for one in phase.seconds.values())
            print(f"step {number}: {took:.2f} s, loss {losses[-1]:+.4f}", flush=True)
    later = {name: one[1:] or one for name, one in phase.seconds.items()}  # the first one pins
    means = {name: sum(one) / len(one) for name, one in later.items()}
    for name, seconds in means.items():
        print(f"{name:24} {seconds:8.3f} s {phase.gib[name]:8.2f} GiB in use")
    print(f"{'a step':24} {sum(means.values()):8.3f} s")
    host = sum(one["host_bytes"] for one in esper_alloc.tag_stats().values()) / GIB
    if not options.awake and not options.native:
        print(f"{host:.2f} GiB of this process were kept on the host")
    if options.json:
        first = {name: one[0] for name, one in phase.seconds.items()}
        found = {"seconds": means, "first": first, "gib": phase.gib, "losses": losses, "host": host}
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
