#!/usr/bin/env python3
"""Programs over popular libraries, as their users write them: memory, time, and the same outputs?

    python benchmarks/stacks.py pyg_prefetch                 # prints each step's output
    python benchmarks/stacks.py pyg_prefetch --control       # without the library's side stream
    python benchmarks/stacks.py pyg_prefetch --device cpu --small

A program is a file of stacks/ with a function program(run). It knows nothing of allocators, so it
also runs under ``esper-alloc run`` and ``esper-alloc audit``. It makes its models, with random
weights, and its data; run.seed() came first. At the end of a step it hands run.step() what the
step gave. It leaves side streams out if run.control, and asks for none on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CHILDREN,
    EXPANDABLE,
    FRESH,
    NATIVE,
    OURS,
    Case,
    Options,
    Part,
    Rounds,
    Row,
    Side,
    Topic,
    column,
    medians,
    workers,
)  # fmt: skip

FOLDER = Path(__file__).resolve().parent / "stacks"
PATIENCE_S = 240.0  # for one program
AUTOMATIC, CONTROL, AUDIT = "esper_alloc, automatic uses", "native, no side stream", "native, audit"
AGAIN = "{}, run again"
#: Findings that a row of the result file tells.
MOST_FINDINGS = 12


@dataclass(frozen=True)
class Program:
    """title: in documents. needs: packages, as they are imported. judge: the case whose outputs are
    right, bit for bit. control: it runs without a side stream as well. ranks: processes, each with
    a GPU. asks: its imports ask for the GPU, and a process that has asked cannot fork."""

    title: str
    needs: tuple[str, ...]
    judge: str = CONTROL
    control: bool = True
    ranks: int = 1
    asks: bool = False


PROGRAMS = {
    "pyg_prefetch": Program("PyTorch Geometric, `PrefetchLoader`", ("torch_geometric",), asks=True),
    "hf_offloaded_cache": Program("transformers, offloaded KV cache", ("transformers",)),
    "hf_continuous_batching": Program("transformers, continuous batching", ("transformers",)),
    "timm_prefetch": Program("timm, `PrefetchLoader`", ("timm",)),
    "diffusers_group_offload": Program("diffusers, group offloading", ("diffusers",)),
    "trl_activation_offload": Program("trl, activation offloading", ("trl", "datasets", "transformers")),
    "deepspeed_zero3": Program("DeepSpeed, ZeRO-3 with offloading", ("deepspeed",)),
    "torchrec_pipeline": Program("torchrec, train pipeline", ("torchrec", "fbgemm_gpu")),
    # Shared experts that overlap come later in the sum of gradients.
    "megatron_moe": Program("Megatron-core, experts", ("megatron.core",), NATIVE),
    "lightning_fit": Program("Lightning, `Trainer.fit`", ("pytorch_lightning",), NATIVE, control=False),
    "accelerate_fsdp2": Program("accelerate, FSDP2", ("accelerate", "transformers"), NATIVE, control=False, ranks=2),
}  # fmt: skip


# --- one program -------------------------------------------------------------
@dataclass
class Run:
    """What a program is told, and what it tells."""

    device: str = "cpu"
    small: bool = True
    control: bool = True
    steps: int = 3
    outputs: list[Any] = field(default_factory=list)
    begin: float = 0.0
    #: Is called before the timed steps.
    ready: Callable[[], object] = lambda: None

    def size(self, usual: int, small: int) -> int:
        return small if self.small else usual

    def seed(self) -> None:
        import numpy
        import torch

        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        # Programs avoid operators that do not repeat, as far as they choose them.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # it does not repeat

    def step(self, output: Any) -> None:
        """A step is over: its output is a tensor, or what JSON can hold."""
        if hasattr(output, "detach"):
            output = output.detach().clone()
        self.outputs.append(output)
        if len(self.outputs) == self.untimed:
            self.now()  # the device is idle while others are timed
            self.ready()
            self.begin = self.now()

    @property
    def untimed(self) -> int:
        """The first steps, in which memory grows."""
        return max(self.steps // 5, 1)

    def now(self) -> float:
        """Milliseconds, when the device has done all that it was given."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    def figures(self) -> dict[str, Any]:
        """step_ms: of the timed steps, the mean; outputs: each as text, bit for bit."""
        took, timed = self.now() - self.begin, len(self.outputs) - self.untimed
        if timed < 1:
            raise RuntimeError(f"the program made {len(self.outputs)} steps")
        return {"step_ms": took / timed, "outputs": [text_of(one) for one in self.outputs]}

    def llama(self, width: int, layers: int, on: str = "cpu", **more: Any) -> Any:
        """Hugging Face's. Its attention is plain, so that backward repeats."""
        import torch

        LlamaConfig, LlamaForCausalLM = llama_classes()
        usual = {"vocab_size": self.size(4096, 64), "attn_implementation": "eager"}
        width, layers = self.size(width, 32), self.size(layers, 2)
        shape = {"hidden_size": width, "intermediate_size": 3 * width,
            "num_hidden_layers": layers, "num_attention_heads": max(width // 64, 2)}  # fmt: skip
        with torch.device(on):
            return LlamaForCausalLM(LlamaConfig(**{**usual, **shape, **more}))

    def process_group(self) -> None:
        """This process alone, where torchrun did not start it."""
        import torch.distributed as dist

        if "RANK" not in os.environ:
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
            os.environ.update(alone, MASTER_ADDR="127.0.0.1")
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo")


def llama_classes() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaConfig, LlamaForCausalLM


def text_of(output: Any) -> str:
    """A number as it is, of a larger tensor a digest."""
    if not hasattr(output, "detach"):
        return json.dumps(output)
    if output.numel() == 1:
        return repr(output.item())
    import torch

    held = output.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(held).hexdigest()[:16]


def load(name: str) -> Callable[[Run], None]:
    """The function of a program. By its path: no library finds programs for modules of its own."""
    found: Callable[[Run], None] = runpy.run_path(str(FOLDER / f"{name}.py"))["program"]
    return found


def versions() -> dict[str, str]:
    """Of the distributions that programs import, as far as they are here."""
    known = importlib.metadata.packages_distributions()
    needed = {name.split(".")[0] for program in PROGRAMS.values() for name in program.needs}
    found = sorted({one for name in needed for one in known.get(name, ())})
    return {one: importlib.metadata.version(one) for one in found}


def told(findings: Sequence[Any]) -> list[str]:
    """A line for each: kind, how often, how sure, what it explains, and where."""
    return [
        f"{one.kind}, {one.count} times, {one.certainty.split(':')[0]}, and {len(one.also)} more: "
        f"{one.place}; {one.earlier}; {one.later}"
        for one in findings[:MOST_FINDINGS]
    ]


def about(device: str, ranks: int) -> dict[str, Any]:
    """The machine, for the result file, with the versions of libraries."""
    import torch
    from measuring import machine, shares_a_gpu

    none = {"gpu": "none", "driver": "none", "torch": torch.__version__}
    found = machine() if device == "cuda" else none
    if ranks > 1:
        found["gpu"] = f"{ranks} {'ranks on one' if shares_a_gpu() else 'x'} {found['gpu']}"
    return {**found, "libraries": versions()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="stacks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: to try a program")
    parser.add_argument("--control", action="store_true", help="without the side stream")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    run = Run(asked.device, asked.small, asked.control or asked.device == "cpu", asked.steps)
    run.seed()
    load(asked.program)(run)
    for number, output in enumerate(run.figures()["outputs"], 1):
        print(f"step {number}: {output}")


# --- all of them, measured ---------------------------------------------------
def before_measure(program: str) -> None:
    """Imports what it needs."""
    load(program)
    if "transformers" in PROGRAMS[program].needs:
        llama_classes()


def all_ready(ready: Callable[[], object]) -> None:
    """The first rank calls `ready`, and the others wait until it is over. They wait on the host: a
    collective that waits keeps a GPU busy on which others are timed."""
    from torch.distributed import TCPStore

    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=10 * PATIENCE_S))
    if os.environ["RANK"] == "0":
        ready()
        store.set("all ready", "")
    else:
        store.wait(["all ready"])


def measure(
    allocator: str,
    program: str,
    steps: int,
    device: str,
    control: bool = False,
    audited: bool = False,
    small: bool = False,
    ready: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The figures of a program: failed, 1 if it raised; why; step_ms; outputs; memory_figures();
    findings and told. Of several ranks the first one reports them, and all end."""
    several = PROGRAMS[program].ranks > 1
    if several and "RANK" not in os.environ:  # again, by torchrun
        launch = "-m torch.distributed.run --standalone --nproc-per-node".split()
        launch.append(str(PROGRAMS[program].ranks))
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    from measuring import memory_figures, use_allocator, use_gpu_of_rank
    from turns import end_with

    if several:
        end_with(os.getppid())  # torchrun ends after its ranks, and is stopped if one hangs
    on_gpu = device == "cuda"
    context: Any = contextlib.nullcontext()
    if on_gpu:
        use_allocator(allocator)
        use_gpu_of_rank()
    if audited and on_gpu:
        import esper_alloc

        context = esper_alloc.audit()
    figures: dict[str, Any] = {"machine": about(device, PROGRAMS[program].ranks), "failed": 0}
    report = None
    try:
        with context as report:
            run = Run(device, small, control or not on_gpu, steps)
            run.ready = partial(all_ready, ready) if several else ready
            run.seed()
            load(program)(run)
            figures |= run.figures()
            figures |= memory_figures() if on_gpu else {}
    except Exception as error:
        traceback.print_exc()
        figures |= {"failed": 1, "why": f"{type(error).__name__}: {error}"[:300]}
    if report is not None:
        figures |= {"findings": len(report.findings), "told": told(report.findings)}
    sys.stderr.flush()
    if not several:
        return figures
    if os.environ["RANK"] == "0":
        print(flush=True)
        workers.report(figures)
    os._exit(0)  # libraries' threads may end the way out by a signal, or never


def differing(rounds: Rounds, case: str, peer: str) -> list[int]:
    """Steps whose output is another one than the peer's in the first round that has it, for
    each round; of a case beside itself, for each later round."""
    wanted = [one[peer]["outputs"] for one in rounds if "outputs" in one.get(peer, {})]
    found = [one[case]["outputs"] for one in rounds if "outputs" in one.get(case, {})]
    return [
        sum(a != b for a, b in zip(outputs, wanted[0])) + abs(len(outputs) - len(wanted[0]))
        for outputs in (found[1:] if case == peer else found)
        if wanted
    ]


def rows(name: str, rounds: Rounds, options: Options) -> Iterator[Row]:
    """Ours fails no more often, and gives no other outputs, than PyTorch's allocator; with
    automatic uses it never fails, and outputs are those of the program without its side stream."""
    figures = ("step", "ms", "step_ms"), ("peak reserved", "MiB", "peak_reserved_mib")
    cases: dict[str, dict[str, Any]] = {}
    names = list(dict.fromkeys(case for one in rounds for case in one if case != AUDIT))
    whole = [one for one in rounds if one.keys() >= set(names)] or rounds  # time may end a round
    for case in names:
        why = [one[case]["why"] for one in rounds if "why" in one.get(case, {})]
        cases[case] = {unit: medians(whole, key).get(case) for _, unit, key in figures}
        if why:
            runs = len(column(rounds, case, "failed"))
            cases[case] |= {"why": why[0], "failed": len(why), "of": runs}
    for case, title, judge in (
        (OURS, name, NATIVE), (AUTOMATIC, f"{name}, automatic uses", PROGRAMS[name].judge),
    ):  # fmt: skip
        if not column(rounds, case, "failed") or not column(rounds, NATIVE, "failed"):
            continue
        judged = "ours" if case == AUTOMATIC else "difference"
        yield Row(f"{title}: runs that fail", "runs", "failed", case, NATIVE, 0.0, judged,
            more={"cases": cases})  # fmt: skip
        for peer in (NATIVE, EXPANDABLE, CONTROL):
            for what, unit, key in figures:
                if column(rounds, case, key) and column(rounds, peer, key):
                    yield Row(f"{title}: {what}", unit, key, case, peer)
            again: Side = differing(rounds, peer, peer)
            other = AGAIN.format(peer)
            goal = max(again, default=0.0)
            if not again and peer == NATIVE:  # it ran once
                again, other = differing(rounds, EXPANDABLE, NATIVE), EXPANDABLE
            differ: Side = differing(rounds, case, peer)
            if again and differ and peer != EXPANDABLE:
                how = (goal, "ours") if peer == judge else ()
                yield Row(f"{title}: outputs that differ", "steps", "", differ, again, *how,
                    peer_name=other)  # fmt: skip
    for one in [turn[AUDIT] for turn in rounds if "findings" in turn.get(AUDIT, {})][:1]:
        more = {key: one[key] for key in ("told", "why") if one.get(key)}
        yield Row(f"{name}: findings", "findings", "", [one["findings"]], 0.0, peer_name="nothing",
            more=more)  # fmt: skip


def part_of(name: str, program: Program) -> Part:
    """Native first, so that outputs can be compared as they come."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Nobody touches the GPU before children are forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Libraries that see more GPUs use them.
        "CUDA_VISIBLE_DEVICES": ",".join(visible[: program.ranks]),
    }  # fmt: skip

    def case(title: str, allocator: str, more: Mapping[str, str] = {}, **how: Any) -> Case:
        told = {"program": name, **how}
        once = title == AUDIT
        return Case(title, allocator, told, {**environment, **more}, program.needs, once)

    cases = [case(NATIVE, NATIVE), case(EXPANDABLE, EXPANDABLE), case(OURS, OURS),
        case(AUTOMATIC, OURS, {"ESPER_ALLOC_USES": "automatic"})]  # fmt: skip
    cases += [case(CONTROL, NATIVE, control=True)] if program.control else []
    cases += [case(AUDIT, NATIVE, audited=True)]
    return Part(
        name, "stacks.measure", cases, partial(rows, name),
        FRESH if program.ranks > 1 or program.asks else CHILDREN, ours=None,
        timeout=PATIENCE_S, tight=True, may_fail=True, together=True, gpus=program.ranks,
        by_default=program.ranks == 1,
    )  # fmt: skip


STACKS = Topic(
    """Programs over popular libraries: memory, step time, the same outputs, findings of an audit.

A library that is not installed is left out: stacks/requirements.txt names them, with versions.""",
    *(part_of(name, program) for name, program in PROGRAMS.items()),
    rounds=5,
    settings={"steps": 20, "device": "cuda"},
)

# --- the table of docs/real-programs.md --------------------------------------
SHOWN = {
    NATIVE: "native", EXPANDABLE: "expandable", OURS: "esper_alloc", AUTOMATIC: "automatic uses",
    CONTROL: "no side stream",
}  # fmt: skip
#: Finds a row of a result file: of this topic, name and peer; None: it was not measured.
Find = Callable[[str, str, str], "dict[str, Any] | None"]


def table(find: Find) -> str:
    """A row for each program that was measured; nothing where none was."""
    lines, machines = [], dict[str, None]()
    for name, program in PROGRAMS.items():
        measured = find("stacks", f"{name}: runs that fail", NATIVE)
        if measured is None:
            continue
        run = measured["run"]
        machines[f"{run['gpu']}, torch {run['torch']}"] = None
        said = [program.title]
        for case in SHOWN:
            one = measured["cases"].get(case, {})
            told = [f"{one['MiB']:,.0f}; {one['ms']:,.0f}"] if one.get("MiB") else []
            if "why" in one:
                told.append(
                    "fails" + (f" in {one['failed']} of {one['of']}" if "of" in one else "")
                )
            said.append(", ".join(told))
        title, peer = f"{name}, automatic uses: outputs that differ", AGAIN.format(program.judge)
        differ = find("stacks", title, peer) or find("stacks", title, EXPANDABLE)
        audit = find("stacks", f"{name}: findings", "nothing")
        said += [f"{differ['ours']:g} ({differ['peer']:g})" if differ else ""]
        said += [f"{audit['ours']:g}" if audit else "", str(measured["rounds"]), run["commit"]]
        lines.append(f"| {' | '.join(said)} |")
    if not lines:
        return ""
    head = ["MiB; ms", *SHOWN.values(), "outputs that differ", "findings", "rounds", "commit"]
    return "\n".join(
        [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, "", f"{'; '.join(machines)}."]
    )


if __name__ == "__main__":
    main()
