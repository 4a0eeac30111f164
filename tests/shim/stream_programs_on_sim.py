"""Random programs over several streams on the simulated device: gpu/programs/stream_programs.py.

Usage: stream_programs_on_sim.py USES SEED COUNT

USES: automatic, or marked, which without marks is the control. There are no kernels: operators
only look, and what a kernel would read or write is told to the oracle, which knows what may still
run when memory is handed out. Prints in how many programs it failed.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import simulated
import torch
from torch.utils.checkpoint import checkpoint

import esper_alloc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu" / "programs"))

import stream_programs
from stream_programs import NEEDS_OTHERS, Run, Step, make_program


def touch(x: torch.Tensor, writes: bool) -> None:
    """What an operator does with all of x."""
    x.detach()
    simulated.reach(torch.cuda.current_stream(), x.data_ptr(), x.nbytes, writes)


class Product(torch.autograd.Function):
    """x * w, whose gradient of w needs x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        touch(x, False)
        ctx.save_for_backward(x)
        return torch.empty_like(w)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        touch(x, False)
        return None, torch.empty_like(x)


class Sim(stream_programs.CudaStreams):
    def __init__(self) -> None:
        first = torch.cuda.current_stream()
        self.streams = [first, *(torch.cuda.Stream() for _ in range(stream_programs.STREAMS - 1))]

    def delay(self, stream: int, milliseconds: int) -> None:
        if milliseconds == 3:
            simulated.time_passes()
        else:
            simulated.work(self.streams[stream])

    def expect(self, stream: int, tensor: torch.Tensor, value: int) -> None:
        with self.on(stream):
            touch(tensor, False)

    def compiled(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def replayed(self, *arguments: Any) -> None:
        raise NotImplementedError


class Looks(Run):
    """Operators look, and the oracle is told of the rest."""

    def do(self, place: int, step: Step) -> None:
        storages = self.storages
        if step.kind == "drop":
            (one,) = step.inputs
            if sum(other is storages[one] for other in storages.values()) == 1:
                simulated.disown(self.tensors[one].data_ptr())
        super().do(place, step)

    def made(self, step: Step, stream: int, x: torch.Tensor) -> None:
        """The step has made x, on the stream."""
        self.tensors[step.result] = x
        with self.machine.on(stream):
            simulated.own(torch.cuda.current_stream(), x.data_ptr(), x.nbytes)
            touch(x, True)
        self.has_written(stream, step.result)

    def do_new(self, place: int, step: Step) -> None:
        with self.machine.on(step.stream):
            x = torch.empty(step.size, device=self.machine.device)
        self.made(step, step.stream, x)

    def do_behind(self, place: int, step: Step) -> None:
        self.machine.wait(step.other, self.machine.record(step.stream))
        with self.machine.on(step.stream):
            x = torch.empty(step.size, device=self.machine.device)
        self.made(step, step.other, x)  # whose future must come after all earlier accesses

    def do_add(self, place: int, step: Step) -> None:
        inputs = self.reads(step.stream, *step.inputs)
        with self.machine.on(step.stream):
            for one in inputs:
                touch(one, False)
        self.has_read(step.stream, *step.inputs)
        self.do_new(place, step)

    def write(self, x: torch.Tensor, step: Step) -> None:
        touch(x, True)

    def do_backward(self, place: int, step: Step) -> None:
        (x,) = self.reads(step.stream, *step.inputs)
        with self.machine.on(step.stream):
            w = torch.empty_like(x).requires_grad_()
            if step.kind == "checkpoint":
                y = checkpoint(Product.apply, x, w, use_reentrant=False)
            else:
                y = Product.apply(x, w)
            grad = torch.empty_like(y)
        done = self.machine.record(step.stream)
        self.machine.wait(step.other, done)
        with self.machine.on(step.other):
            y.backward(grad)
        assert w.grad is not None
        self.has_read(step.stream, *step.inputs)
        self.made(step, step.stream, w.grad)

    do_checkpoint = do_backward


def main(uses: str, seed: int, count: int) -> None:
    esper_alloc.enable(uses=uses)  # type: ignore[arg-type]
    stream_programs.SIZES = (1 << 16, 1 << 18)
    machine = Sim()
    failed = []
    with ThreadPoolExecutor(1) as thread:
        for one in range(seed, seed + count):
            before = simulated.failures()
            Looks(machine, make_program(one, without=frozenset(NEEDS_OTHERS)), thread).run()
            if simulated.failures() > before:
                failed.append(one)
            torch.cuda.synchronize()
    print(json.dumps({"programs": count, "failed": len(failed), "first": failed[:5]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
