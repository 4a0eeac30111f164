"""A mark at work: weights that one stream gathers and another uses, each protected by one line.

    python tools/mark_at_work.py [PICTURE]

The host is far ahead of the GPU, as in training. With the allowance `off` each layer's weight takes
new memory, as under PyTorch's own allocator. By default the host waits before memory grows by more
than an allowance, so three weights serve in turn, and the memory stays level. tools/demo.py runs
this on the simulated device where there is no GPU. Prints what was reserved, and draws it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

if "ESPER_SIMULATED" in os.environ:
    import simulated  # before torch: it is what CUDA then is

import torch

import esper_alloc

MIB = 1 << 20
LAYERS = 12
WEIGHT = 64 * MIB

ALLOWANCES = {"off": "allowance off", "128MiB": "allowance 128MiB"}


def work(stream: torch.cuda.Stream) -> None:
    """Enqueues something that takes a while."""
    if "ESPER_SIMULATED" in os.environ:
        simulated.work(stream)
    else:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)


def everything_ends() -> None:
    if "ESPER_SIMULATED" in os.environ:
        simulated.time_passes()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def reserved_by_layer() -> list[int]:
    """MiB reserved after each layer of a step that marks its weights."""
    everything_ends()
    gather, compute = torch.cuda.Stream(), torch.cuda.Stream()
    found = []
    for _ in range(LAYERS):
        with torch.cuda.stream(gather):
            weight = torch.empty(WEIGHT, dtype=torch.uint8, device="cuda")
            work(gather)
        compute.wait_stream(gather)
        work(compute)
        esper_alloc.record_use(weight, compute)
        del weight
        found.append(torch.cuda.memory_reserved() // MIB)
    everything_ends()
    return found


def draw(found: dict[str, list[int]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for (name, values), colour in zip(found.items(), ("#f0a35e", "#2f6fb0")):
        axis.plot(range(1, LAYERS + 1), values, marker="o", color=colour, label=name)
    axis.set_title(f"{LAYERS} layers of {WEIGHT // MIB} MiB, used on another stream", loc="left")
    axis.set_xlabel("layer")
    axis.set_ylabel("MiB reserved")
    axis.set_ylim(0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def in_a_process(allowance: str) -> list[int]:
    """reserved_by_layer() with that allowance."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        env={**os.environ, "ESPER_ALLOC_ALLOWANCE": allowance},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: list[int] = json.loads(done.stdout)
    return found


def main() -> None:
    if sys.argv[1:] == ["--measure"]:
        esper_alloc.enable()
        print(json.dumps(reserved_by_layer()))
        return
    found = {name: in_a_process(allowance) for allowance, name in ALLOWANCES.items()}
    where = "the simulated device" if "ESPER_SIMULATED" in os.environ else "the GPU"
    print(f"{LAYERS} layers' weights of {WEIGHT // MIB} MiB, used on another stream, on {where}:")
    for name, values in found.items():
        print(f"  {name:<16} {max(values):5,} MiB reserved")
    print("Held back, the weights serve in turn; with the allowance off each takes new memory.")
    if len(sys.argv) > 1:
        draw(found, sys.argv[1])
        print(f"drawn into {sys.argv[1]}")


if __name__ == "__main__":
    main()
