"""Ten jobs that run out of memory, each for its own cause, and whether `explain` finds it.

    python benchmarks/planted.py leak                   # runs out of memory
    python benchmarks/planted.py leak --advice '{}'     # the same with the advice followed

A job takes memory in shares of what is free when it begins, so it fails on any device, the
simulated one of the tests included. It enqueues next to no work. `--advice` takes a change as
`explain --json` names it. A job that ends prints the most bytes that were reserved, as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Set where the tests run them: tests/shim/simulated.py.
SIMULATED = "ESPER_SIMULATED"
if __name__ == "__main__" and SIMULATED in os.environ:
    import simulated  # type: ignore[import-not-found]
import torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402

HERE = Path(__file__).resolve()
MIB = 1 << 20
BYTES: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda"}


# --- what the jobs share -----------------------------------------------------
class Device:
    """Bytes by their share of the memory that was free at first, and the advice that is followed;
    None: the job runs out of memory."""

    def __init__(self, advice: dict[str, Any] | None) -> None:
        self.advice = advice
        self.bytes, self.total = torch.cuda.mem_get_info()
        self.held: list[Any] = []

    def share(self, of_all: float) -> int:
        return int(self.bytes * of_all)

    def batch(self, of_all: float) -> int:
        """Of what goes with the batch."""
        percent = self.advice["percent"] if self.advice else 100
        return int(self.bytes * of_all * percent / 100)

    def hold_weights(self, of_all: float) -> None:
        """Those of a module, as of one that was loaded."""
        edge = math.isqrt(self.share(of_all) // 16)
        layers = [
            torch.nn.utils.skip_init(torch.nn.Linear, edge, edge, bias=False, device="cuda")
            for _ in range(4)
        ]
        self.held.append(torch.nn.ModuleList(layers).requires_grad_(False))

    def make_activations(self, of_all: float, count: int) -> None:
        """So many that are there together."""
        _ = [torch.empty(self.share(of_all), **BYTES) for _ in range(count)]


def take_a_step(device: Device, share: float = 0.03) -> None:
    """Memory that comes and goes."""
    for _ in range(8):
        torch.empty(device.share(share / 8), **BYTES)


def start_slow_work(stream: torch.cuda.Stream) -> None:
    if SIMULATED in os.environ:
        simulated.work(stream)
    else:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]


@contextmanager
def neighbour(size: int) -> Iterator[None]:
    """Another process takes so many bytes. The simulated device is one process's own: there a
    library in it takes them."""
    if SIMULATED in os.environ:
        runtime, address = ctypes.CDLL(os.environ[SIMULATED]), ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        yield
        return
    code = f"import sys, torch; x = torch.empty({size}, dtype=torch.uint8, device='cuda')"
    command = [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline(), "there is no room for another process"
        yield  # it ends when its stdin does


# --- the jobs ----------------------------------------------------------------
def fragmentation(device: Device) -> None:
    """Classic segments, of each of which a piece stays."""
    pieces = [torch.empty(5 * MIB, **BYTES) for _ in range(int(device.bytes * 0.6) // (5 * MIB))]
    kept = pieces[::4]
    del pieces
    for _ in range(20):
        take_a_step(device)
    torch.empty(device.share(0.55), **BYTES)
    del kept


def leak(device: Device) -> None:
    """A list of what each step logs."""
    device.hold_weights(0.2)
    logged: list[torch.Tensor] = []
    for _ in range(40):
        activations = [torch.empty(device.share(0.07), **BYTES) for _ in range(4)]
        if device.advice is not None:
            logged.clear()
        logged.append(torch.empty(device.share(0.02), **BYTES))
        del activations


def cache(device: Device) -> None:
    """A dict by length that is never emptied, though half of the lengths come again."""
    device.hold_weights(0.2)
    masks: dict[int, torch.Tensor] = {}
    for step in range(80):
        length = step // 2
        if length not in masks:
            if device.advice is not None:
                masks.clear()
            size = device.share(0.012 + 0.0004 * (length * 7 % 40))
            masks[length] = torch.empty(size, **BYTES)
        take_a_step(device, 0.2)


def pending(device: Device) -> None:
    """Each layer is loaded through a buffer that a slow stream reads; the next layer cannot have
    its memory yet."""
    stream, weights = torch.cuda.Stream(), []
    layers = int(device.bytes * 0.6) // (10 * MIB)
    together = max(layers // 200, 1)  # the device has room for 1,024 kernels
    for layer in range(layers):
        buffer = torch.empty(9 * MIB, **BYTES)
        if layer % together == 0:
            start_slow_work(stream)
        buffer.record_stream(stream)
        del buffer
        weights.append(torch.empty(3 * MIB // 2, **BYTES))
    stream.synchronize()
    for _ in range(20):
        take_a_step(device)
    torch.empty(device.share(0.6), **BYTES)


def activation(device: Device) -> None:
    """Logits for every word and position."""

    class Model(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            hidden = [torch.empty(device.batch(0.04), **BYTES) for _ in range(5)]
            logits = torch.empty(device.batch(0.7), **BYTES)
            del hidden
            return logits

    device.hold_weights(0.2)
    Model()()


def two_processes(device: Device) -> None:
    """Another process takes half of the device."""
    with neighbour(device.share(0.52)) if device.advice is None else nullcontext():
        device.hold_weights(0.1)
        for _ in range(3):
            device.make_activations(0.05, 8)


def pool(device: Device) -> None:
    """A pool for work that is over, whose memory serves nobody else."""
    device.hold_weights(0.1)
    own = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(own):
        device.make_activations(0.1, 5)
    if device.advice is not None:
        del own
    for _ in range(3):
        device.make_activations(0.06, 7)


def lengths(device: Device) -> None:
    """Each sequence is longer than the one before."""
    device.hold_weights(0.2)
    for step in range(1, 13):
        hidden = [torch.empty(device.batch(0.005 * step), **BYTES) for _ in range(4)]
        scores = torch.empty(device.batch(0.0043 * step * step), **BYTES)
        del hidden, scores


def checkpointing(device: Device) -> None:
    """Every layer keeps much more for backward than it gives to the next."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.empty(device.share(0.08), **BYTES))
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            _ = ctx.saved_tensors  # recomputes them, if so
            return torch.empty_like(gradients[0])

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Inner.apply(x)
            return out

    device.hold_weights(0.1)
    x = torch.empty(device.share(0.00005) // 4, device="cuda", requires_grad=True)
    for layer in [Layer() for _ in range(12)]:
        if device.advice is not None:
            x = torch.utils.checkpoint.checkpoint(
                layer, x, use_reentrant=False, preserve_rng_state=False
            )
        else:
            x = layer(x)
    x.backward(torch.empty_like(x))


def fraction(device: Device) -> None:
    """The process may have 48% of the device."""
    advised = device.advice["percent"] / 100 if device.advice else None
    torch.cuda.set_per_process_memory_fraction(advised or 0.48 * device.bytes / device.total)
    device.hold_weights(0.1)
    for _ in range(3):
        device.make_activations(0.05, 8)


@dataclass(frozen=True)
class Planted:
    """A job with its cause, and the kind of change that is followed. environment: of the failing
    run; where the advice follows by a variable, it is `sets`, to what the change calls `by`."""

    run: Callable[[Device], None]
    cause: str
    change: str
    environment: dict[str, str] = field(default_factory=dict)
    sets: str = ""
    by: str = ""


SEGMENTS, ALLOWANCE = "ESPER_ALLOC_SEGMENTS", "ESPER_ALLOC_ALLOWANCE"
CLASSIC = {SEGMENTS: "classic"}
OFF = {**CLASSIC, ALLOWANCE: "off"}
JOBS = {
    "fragmentation": Planted(
        fragmentation, "fragmentation", "segments", CLASSIC, SEGMENTS, "segments"
    ),
    "leak": Planted(leak, "leak", "free_each"),
    "cache": Planted(cache, "leak", "free_each"),
    "pending": Planted(pending, "pending", "allowance", OFF, ALLOWANCE, "bytes"),
    "activation": Planted(activation, "large", "batch"),
    "two_processes": Planted(two_processes, "others", "others"),
    "pool": Planted(pool, "pool", "release_pool"),
    "lengths": Planted(lengths, "lengths", "batch"),
    "checkpointing": Planted(checkpointing, "activations", "checkpoint"),
    "fraction": Planted(fraction, "fraction", "fraction"),
}


# --- running and explaining them ---------------------------------------------
def _run(name: str, options: list[str], environment: dict[str, str]) -> Any:
    return subprocess.run(
        [sys.executable, str(HERE), name, *options],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def explained(allocator: str, job: str) -> dict[str, Any]:
    """Runs a job, explains its failure by the file that the error names, and follows the advice."""
    from measuring import machine

    return {"machine": machine(), **explain_and_follow(job)}


def explain_and_follow(name: str) -> dict[str, Any]:
    """missed: 1 if another cause is named first; failed: 1 if the job does not run with the advice,
    or none is given. predicted_mib, peak_mib; off_percent: how far the one is from the other.
    explain_s: how long it took. Raises RuntimeError where the job does not run out of memory."""
    planted = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        failed = _run(name, [], {**planted.environment, "TMPDIR": folder})
        command = re.search(r"-m esper_alloc (explain) ([^`]+)`", failed.stderr)
        if not command:
            raise RuntimeError(f"{name} did not run out of memory: {failed.stderr[-2000:]}")
        begin = time.monotonic()
        said = subprocess.run(
            [sys.executable, "-m", "esper_alloc", *command.groups(), "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        seconds = time.monotonic() - begin
    [found] = json.loads(said.stdout)
    cause = found["causes"][0]["kind"] if found["causes"] else "none"
    figures = {"cause": cause, "missed": int(cause != planted.cause), "explain_s": seconds}
    advice = [one for one in found["changes"] if one["kind"] == planted.change and one["helps"]]
    if not advice:
        return {**figures, "failed": 1}
    followed = {planted.sets: str(advice[0][planted.by])} if planted.sets else {}
    options = ["--advice", json.dumps(advice[0])]
    ran = _run(name, options, {**planted.environment, **followed})
    if ran.returncode:
        return {**figures, "failed": 1, "error": ran.stderr[-2000:]}
    peak, predicted = json.loads(ran.stdout)["peak_reserved"], advice[0]["peak_reserved"]
    return {
        **figures, "failed": 0, "predicted_mib": predicted / MIB, "peak_mib": peak / MIB,
        "off_percent": abs(predicted / peak - 1) * 100,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--advice", type=json.loads, help="that is followed, as JSON")
    options = parser.parse_args()
    if SIMULATED not in os.environ:
        sys.path.append(str(HERE.parent.parent))
        import esper_alloc

        esper_alloc.enable()
    JOBS[options.job].run(Device(options.advice))
    print(json.dumps({"peak_reserved": torch.cuda.max_memory_reserved()}))


if __name__ == "__main__":
    main()
