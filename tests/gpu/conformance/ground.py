"""What the scenarios stand on: a registry, and the same few tools on a GPU and on the
simulated device.

A scenario is a function that returns what a program could see, as JSON. It runs under
PyTorch's own allocator and under esper_alloc, in fresh processes, and the two answers
must be equal. Layout that is an allocator's own business (addresses, which block is
split) stays out of the answers.

    python ground.py GROUP ALLOCATOR       # runs a group and prints {scenario: answer}
"""

import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: One process each, for each allocator: the module and the environment that it gets.
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "memory": ("memory", {}),
    "figures": ("figures", {}),
    "snapshot": ("snapshot", {}),
    "history": ("history", {}),
    "shortage": ("shortage", {}),
    "hooks": ("hooks", {}),
    "streams": ("streams", {}),
    "devices": ("devices", {}),
    "pools": ("pools", {}),
    "sharing": ("sharing", {}),
    "settings": ("settings", {}),
    "methods": ("methods", {}),
    "uncached": ("uncached", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "uncached-0": ("uncached", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}),
    "max_split": ("options", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
    "non_split": (
        "options",
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,max_non_split_rounding_mb:40"},
    ),
    "roundup": ("options", {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"}),
    "roundup-list": ("options", {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[2:8,16:4,>:1]"}),
    "fraction": ("options", {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.25"}),
    "segment_size": ("options", {"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40"}),
}

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
SIMULATED = "ESPER_SIMULATED" in os.environ


@dataclass
class Scenario:
    run: Callable[[], Any]
    name: str
    needs: frozenset[str] = field(default_factory=frozenset)


SCENARIOS: dict[str, list[Scenario]] = {}


def scenario(*needs: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a scenario of its module.

    `needs`: "gpu" what the simulated device cannot do (kernels, graphs, processes);
    "two_gpus"; "pools" and "checkpoints" parts of the allocator on their own.
    """

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        module = function.__module__.rpartition(".")[2]
        SCENARIOS.setdefault(module, []).append(
            Scenario(function, function.__name__, frozenset(needs))
        )
        return function

    return register


def load(module: str) -> list[Scenario]:
    importlib.import_module(module)
    return SCENARIOS[module]


def every_scenario() -> list[tuple[str, Scenario]]:
    """(group, scenario), without importing torch here."""
    return [(group, one) for group, (module, _) in GROUPS.items() for one in load(module)]


# ---- tools, which import torch when called -------------------------------------


def bytes_of(count: int, device: Any = "cuda") -> Any:
    import torch

    return torch.empty(count, dtype=torch.uint8, device=device)


def busy(stream: Any) -> None:
    """Gives a stream work that lasts until let_pass(), or 0.3 s on a GPU."""
    import torch

    if SIMULATED:
        import simulated

        simulated.work(stream)
    else:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(600_000_000)


def let_pass() -> None:
    import torch

    if SIMULATED:
        import simulated

        simulated.time_passes()
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def clean() -> None:
    """Nothing live, cached or recorded, figures at zero, and options as they were at the start."""
    import gc

    import torch

    gc.collect()
    torch.cuda.memory._record_memory_history(enabled=None)
    if not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        torch._C._accelerator_setAllocatorSettings("")
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    let_pass()
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def stats(*names: str, device: Any = None) -> list[int]:
    import torch

    every = torch.cuda.memory_stats(device)
    return [every.get(name, 0) for name in names]


def all_stats(device: Any = None) -> dict[str, int]:
    """Every figure, but how often a rest was split off and joined again: an allocator
    may count a rest that shrinks as one rest, or as one that goes and one that comes."""
    import torch

    figures = torch.cuda.memory_stats(device)
    taste = re.compile(r"inactive_split(_bytes)?\.\w+\.(allocated|freed)$")
    return {name: value for name, value in figures.items() if not taste.match(name)}


SIZE = re.compile(r"\d+(?:\.\d+)? (?:bytes|KiB|MiB|GiB)")


def error_of(function: Callable[[], Any], *, sizes: bool = False) -> Any:
    """Type and first line of what it raises; sizes and addresses made equal."""
    try:
        function()
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text)
        return [type(error).__name__, text if sizes else SIZE.sub("SIZE", text)]
    return None


def type_of_error(function: Callable[[], Any]) -> str | None:
    answer = error_of(function)
    return answer and answer[0]


# ---- running -------------------------------------------------------------------


def enable(allocator: str) -> None:
    os.environ["ESPER_ALLOC"] = ""
    if SIMULATED:
        os.environ["ESPER_SIMULATED_ALLOCATOR"] = allocator
        import simulated  # noqa: F401
    elif allocator != "native":
        import esper_alloc

        esper_alloc.enable()
    import torch

    torch.cuda.init()


def skipped(one: Scenario) -> bool:
    import torch

    if SIMULATED and one.needs & {"gpu"}:
        return True
    return "two_gpus" in one.needs and torch.cuda.device_count() < 2


def main() -> int:
    group, allocator = sys.argv[1:3]
    here = str(Path(__file__).resolve().parent)
    sys.path.insert(0, here)
    enable(allocator)
    answers: dict[str, Any] = {}
    for one in importlib.import_module("ground").load(GROUPS[group][0]):
        if skipped(one):
            answers[one.name] = {"skipped": True}
            continue
        begin = time.monotonic()
        try:
            clean()
            answers[one.name] = {"answer": one.run()}
        except BaseException:
            answers[one.name] = {"failed": traceback.format_exc()[-3000:]}
        answers[one.name]["seconds"] = round(time.monotonic() - begin, 2)
    print("\nANSWERS " + json.dumps(answers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
