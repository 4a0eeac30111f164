"""A trainer and vLLM on one GPU, as examples/colocated_step.py has them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import MIB, NATIVE, workers
from measuring import device_used_mib, example, machine, seconds_of, use_allocator

GIB = 1 << 30

SMALL = ["--size", "tiny", "--prompts", "4", "--prompt", "16", "--answer", "8", "--steps", "2"]
TURNS = ("engine sleeps, trainer wakes", "engine wakes, weights", "trainer sleeps, engine wakes")
PHASES = ("rollout", "training", "new weights", *TURNS)


def step(
    allocator: str, flags: tuple[str, ...] = (), saver: str = "", model: str = "3b",
    small: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Means over steps but the first, s: of a step, of its phases, and of all sleeping and waking
    in it; and the speed of that, beside a plain copy of as many bytes. `saver`: how the trainer
    sleeps by torch_memory_saver, which leaves host memory pinned or, by default, does not."""
    module = example("colocated_step")
    if saver:
        module.Trainer = trainer_of_saver(module.Trainer, saver == "keeps host memory")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        native = ["--native"] if allocator == NATIVE else []
        how = SMALL if small else ["--size", model, "--steps", "4"]
        sys.argv = ["colocated_step.py", *how, *native, *flags, "--json", str(path)]
        module.main()
        found = json.loads(path.read_text())
    if "--engine-process" in flags:
        gc.collect()  # which ends here
    seconds = found["seconds"]
    turns = sum(seconds.get(one, 0.0) for one in TURNS)
    figures = {
        "machine": machine(),
        "step_s": sum(seconds.values()),
        "turns_s": turns,
        "first_turns_s": sum(found["first"].get(one, 0.0) for one in TURNS),
        **seconds,
    }
    if saver:  # see sleep.measure_saver()
        workers.report(figures)
        sys.stderr.flush()
        os._exit(0)
    if turns and found["host"]:
        from sleep import PlainCopy

        copy = PlainCopy(int(found["host"] * GIB), 2 * GIB)
        both = statistics.median(seconds_of(copy.out) + seconds_of(copy.back) for _ in range(5))
        figures["turns_gib_s"] = 2 * found["host"] / turns
        figures["copy_gib_s"] = 2 * copy.bytes / GIB / both
    return figures


def trainer_of_saver(trainer: Any, keeps: bool) -> Any:
    """The example's trainer, with weights and moments in a region of torch_memory_saver's. Its
    sleep does not empty PyTorch's cache, which saves time and keeps gradients' memory."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    class Trainer(trainer):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            saver.hook_mode = "torch"
            saver.retain_cpu_backup = keeps
            super().__init__(*arguments)
            for one in self.model.parameters():
                one.grad = torch.zeros_like(one)
            with self.tag():
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.tag = contextlib.nullcontext  # what a step allocates is not kept

        def tag(self) -> Any:
            return saver.region(tag="trainer", enable_cpu_backup=True)

        def sleep(self) -> None:
            saver.pause("trainer")

        def wake(self) -> None:
            saver.resume("trainer")

    return Trainer


def resident_mib() -> float:
    """Host memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError("/proc/self/status has no VmRSS")


def kept_mib(allocator: str) -> dict[str, float]:
    """Of an engine that sleeps at level 1: its weights, and the host memory that keeps them."""
    if allocator == NATIVE:
        from vllm.device_allocator.cumem import CuMemAllocator

        all_data = CuMemAllocator.get_instance().pointer_to_data.values()
        copies = [one.cpu_backup_tensor for one in all_data]
        return {"host_mib": sum(one.nbytes for one in copies if one is not None) / MIB}
    import esper_alloc

    weights = esper_alloc.tag_stats()["vLLM's weights"]
    return {
        "live_mib": weights["allocated_bytes"] / MIB, "host_mib": weights["host_bytes"] / MIB
    }  # fmt: skip


def cycles(
    allocator: str, count: int = 100, model: str = "1.5b", small: bool = False
) -> dict[str, Any]:
    """An engine alone sleeps and wakes: by turns all at once at level 1, which keeps its weights,
    and tag by tag at level 2, after which they are loaded again. s of each; how many tokens of
    greedy answers, after two of ten cycles, differ from the first; MiB by which device and host
    memory grew after ten cycles, and that are in use of the device asleep."""
    import torch
    from transformers import AutoModelForCausalLM

    module = example("colocated_step")
    count = 12 if small else count
    native = ["--native"] if allocator == NATIVE else []
    options = module.parsed(["--size", "tiny" if small else model, *native])
    use_allocator(allocator)
    config = module.config_of(options.size)
    with torch.device("cuda"):
        full = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: one.cpu().pin_memory() for name, one in full.state_dict().items()}
    del full
    gc.collect()
    torch.cuda.empty_cache()
    beside_mib = device_used_mib()
    prompts = [[3 + (7 * i + j) % 1000 for j in range(options.prompt)] for i in range(8)]
    taken: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    used, host, differ = [], [], 0

    def time(name: str, work: Callable[[], object]) -> None:
        taken.setdefault(name, []).append(seconds_of(work))

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine = module.Engine(options, folder, temperature=0.0)
        engine.load(weights)
        before = engine.answer(prompts)
        for number in range(count):
            level = 1 + number % 2
            time(f"sleep_{level}_s", partial(engine.sleep, level=level))
            if level == 1:
                figures = {
                    "asleep_mib": device_used_mib() - beside_mib,
                    "reserved_mib": torch.cuda.memory_reserved() / MIB,
                    **kept_mib(allocator),
                }
                time("wake_1_s", engine.wake_all)
            else:
                time("wake_weights_s", partial(engine.wake, "weights"))
                time("load_s", partial(engine.load, weights))
                time("wake_cache_s", partial(engine.wake, "kv_cache"))
            if number % 10 in (8, 9):  # after either level
                after = engine.answer(prompts)
                differ += sum(x != y for a, b in zip(before, after) for x, y in zip(a, b))
            if number % 10 == 9:
                gc.collect()
                used.append(device_used_mib())
                host.append(resident_mib())
    medians = {name: statistics.median(one[1:]) for name, one in taken.items()}
    return {
        "machine": machine(),
        **medians,
        **figures,
        "level_1_s": medians["sleep_1_s"] + medians["wake_1_s"],
        "level_2_s": sum(medians[f"{one}_s"] for one in ("sleep_2", "wake_weights", "wake_cache")),
        "tokens_that_differ": differ,
        "grown_mib": used[-1] - used[0],
        "host_grown_mib": host[-1] - host[0],
    }
