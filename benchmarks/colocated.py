"""A trainer and vLLM on one GPU, as examples/colocated_step.py has them."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import MIB, NATIVE
from measuring import choose_allocator, device_used_mib, example, machine, seconds_of

SMALL = ["--size", "tiny", "--prompts", "4", "--prompt", "16", "--answer", "8", "--steps", "2"]
TURNS = ("engine sleeps", "trainer wakes", "engine wakes, weights", "trainer sleeps",
         "engine wakes, cache")  # fmt: skip
PHASES = ("rollout", "training", "new weights", *TURNS)


def step(
    allocator: str, flags: tuple[str, ...] = (), model: str = "3b", small: bool = False
) -> dict[str, Any]:
    """Means over steps but the first, s: of a step, of its phases, and of all sleeping and waking
    in it."""
    module = example("colocated_step")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        native = ["--native"] if allocator == NATIVE else []
        how = SMALL if small else ["--size", model, "--steps", "4"]
        sys.argv = ["colocated_step.py", *how, *native, *flags, "--json", str(path)]
        module.main()
        found = json.loads(path.read_text())
    seconds = found["seconds"]
    first = found["first"]
    return {
        "machine": machine(),
        "step_s": sum(seconds.values()),
        "turns_s": sum(seconds.get(one, 0.0) for one in TURNS),
        "first_turns_s": sum(first.get(one, 0.0) for one in TURNS),
        **seconds,
    }


def host_mib() -> float:
    """What is resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError("/proc/self/status has no VmRSS")


def cycles(
    allocator: str, count: int = 100, model: str = "1.5b", small: bool = False
) -> dict[str, Any]:
    """An engine alone sleeps (level 1) and wakes. s of a sleep and of a wake; how many tokens of a
    greedy answer differ afterwards; MiB by which device and host memory grew after ten cycles;
    device memory in use while it sleeps."""
    module = example("colocated_step")
    count = 12 if small else count
    native = ["--native"] if allocator == NATIVE else []
    options = module.parsed(["--size", "tiny" if small else model, *native])
    choose_allocator(allocator)
    with tempfile.TemporaryDirectory() as folder:
        module.config_of(options.size).save_pretrained(folder)
        engine = module.Engine(options, folder, temperature=0.0)
        prompts = [[3 + (7 * i + j) % 1000 for j in range(options.prompt)] for i in range(8)]
        before = engine.answer(prompts)
        slept, woke, asleep, used, host = [], [], [], [], []
        for number in range(count):
            slept.append(seconds_of(lambda: engine.sleep(level=1)))
            asleep.append(device_used_mib())
            woke.append(seconds_of(engine.wake_all))
            if number in (min(10, count - 1), count - 1):
                gc.collect()
                used.append(device_used_mib())
                host.append(host_mib())
        after = engine.answer(prompts)
    return {
        "machine": machine(),
        "sleep_s": statistics.median(slept[1:]),
        "wake_s": statistics.median(woke[1:]),
        "tokens_that_differ": sum(x != y for a, b in zip(before, after) for x, y in zip(a, b)),
        "grown_mib": used[-1] - used[0],
        "host_grown_mib": host[-1] - host[0],
        "asleep_mib": asleep[-1],
    }
