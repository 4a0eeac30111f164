"""Random programs over several streams, without a mark: how they are made, and what they compute.

A program is a list of steps. Every tensor is full of one whole number, so a step's result is
known without a device: `values_of` is the oracle. `Run` executes the steps on any machine
(random_streams.py has the GPU) in the order that data needs: whoever reads waits for the last
writer, and whoever writes waits for all readers. How long memory lives is nobody's business:
variables are dropped at random, mostly while their readers have still to run, and often a tensor
that fits into their memory is made at once. Some tensors are written first by another stream than
the one that their memory comes from: it waits for that stream before the memory is allocated, and
nothing is ordered afterwards (`behind`).
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

STREAMS = 4
SIZES = (1 << 16, 1 << 18, 1 << 20)  # elements, few, so that memory serves again and again
LIVE = 12  # variables

#: What a step may do, and how often.
WEIGHTS = {
    "new": 4, "behind": 2, "add": 5, "in_place": 3, "view": 2, "check": 5, "drop": 5, "delay": 1,
    "backward": 1, "checkpoint": 1, "compiled": 1, "graph": 0.1,
}  # fmt: skip
NEEDS_OTHERS = {"compiled", "graph"}  # what not every machine can do
READS = {"add", "check", "backward", "checkpoint", "compiled", "graph"}


@dataclass(frozen=True)
class Step:
    kind: str
    stream: int
    result: int = -1  # the variable that it sets
    inputs: tuple[int, ...] = ()  # variables
    number: int = 0  # new, behind: its value; in_place, graph: what is added; delay: milliseconds
    size: int = 0
    other: int = 0  # behind: who writes; backward: its caller's stream; graph: its replay's
    in_thread: bool = False


def make_program(seed: int, steps: int = 80, without: frozenset[str] = frozenset()) -> list[Step]:
    """The program of that seed, which drops all its variables at the end."""
    return _Maker(seed, without).make(steps)


class _Maker:
    def __init__(self, seed: int, without: frozenset[str]) -> None:
        self.random = random.Random(seed)
        self.weights = {kind: w for kind, w in WEIGHTS.items() if kind not in without}
        self.live: dict[int, int] = {}  # variable -> elements
        self.home: dict[int, int] = {}  # variable -> the stream that its memory comes from
        self.next = 0
        self.steps: list[Step] = []

    def make(self, count: int) -> list[Step]:
        while len(self.steps) < count:
            kinds = list(self.weights)
            kind = self.random.choices(kinds, [self.weights[one] for one in kinds])[0]
            if len(self.live) >= LIVE:
                kind = "drop"
            elif not self.live and kind != "delay":
                kind = "new"
            self.add(kind)
        for variable in list(self.live):
            self.step("drop", inputs=(variable,))
        return self.steps

    def step(self, kind: str, size: int = 0, stream: int | None = None, **more: Any) -> None:
        result = -1
        if stream is None:
            stream = self.random.randrange(STREAMS)
        if size:
            result, self.next = self.next, self.next + 1
            self.live[result] = size
            of = more["inputs"][0] if kind == "view" else None
            self.home[result] = stream if of is None else self.home[of]
        if kind == "drop":
            del self.live[more["inputs"][0]]
        thread = kind not in ("graph", "compiled") and self.random.random() < 0.2
        self.steps.append(Step(kind, stream, result, size=size, in_thread=thread, **more))

    def add(self, kind: str) -> None:
        pick = self.random.choice
        if kind in ("new", "behind"):
            self.new(pick(SIZES), behind=kind == "behind")
            return
        if kind == "delay":
            self.step(kind, number=self.random.randrange(1, 4))
            return
        first = pick(list(self.live))
        size = self.live[first]
        stream = self.random.randrange(STREAMS)
        if kind in READS and self.random.random() < 0.5:
            self.step("delay", stream=stream, number=self.random.randrange(1, 3))
        if kind in ("add", "compiled"):
            second = pick([one for one, other in self.live.items() if other == size])
            self.step(kind, size, stream, inputs=(first, second))
        elif kind == "view":
            self.step(kind, size, stream, inputs=(first,))
        elif kind in ("check", "drop"):
            self.step(kind, 0, stream, inputs=(first,))
        elif kind == "in_place":
            number = self.random.randrange(1, 10)
            self.step(kind, 0, stream, inputs=(first,), number=number)
        else:
            other = self.random.randrange(STREAMS)
            number = self.random.randrange(1, 10)
            self.step(kind, size, stream, inputs=(first,), number=number, other=other)
        if kind in READS and self.random.random() < 0.5:
            self.step("drop", inputs=(first,))  # while the step has still to run
            if self.random.random() < 0.5:
                behind = self.random.random() < 0.4
                self.new(size, self.home[first], behind)  # and its memory serves again

    def new(self, size: int, stream: int | None = None, behind: bool = False) -> None:
        number = self.random.randrange(1, 1000)
        if behind:
            self.step("behind", size, stream, number=number, other=self.random.randrange(STREAMS))
        else:
            self.step("new", size, stream, number=number)


MODULUS = 1 << 20  # values stay exact in float32


def values_of(program: list[Step]) -> dict[int, int]:
    """The oracle: what each checked step, by its place in the program, must find."""
    storage_of: dict[int, int] = {}
    values: dict[int, int] = {}
    found = {}
    for place, step in enumerate(program):
        inputs = [values[storage_of[one]] for one in step.inputs]
        if step.kind == "view":
            storage_of[step.result] = storage_of[step.inputs[0]]
        elif step.result >= 0:
            storage_of[step.result] = step.result
        if step.kind in ("new", "behind"):
            values[step.result] = step.number
        elif step.kind in ("add", "compiled"):
            values[step.result] = sum(inputs) % MODULUS
        elif step.kind == "in_place":
            values[storage_of[step.inputs[0]]] = (inputs[0] + step.number) % MODULUS
        elif step.kind in ("backward", "checkpoint"):
            values[step.result] = inputs[0]
        elif step.kind == "graph":
            values[step.result] = (inputs[0] + step.number) % MODULUS
        elif step.kind == "check":
            found[place] = inputs[0]
    return found


# Running


class Machine(Protocol):
    """Streams by number, and what runs on them."""

    device: str

    def on(self, stream: int) -> AbstractContextManager[Any]: ...
    def record(self, stream: int) -> Any: ...
    def wait(self, stream: int, event: Any) -> None: ...
    def delay(self, stream: int, milliseconds: int) -> None: ...
    def expect(self, stream: int, tensor: torch.Tensor, value: int) -> None: ...
    def compiled(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...
    def replayed(
        self, capture: int, replay: int, work: Callable[[], None], order: Callable[[], None]
    ) -> None: ...


class CudaStreams:
    """The part of a Machine that orders CUDA streams."""

    device = "cuda"
    streams: list[torch.cuda.Stream]

    def on(self, stream: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self.streams[stream])
        return context

    def record(self, stream: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.streams[stream])
        return event

    def wait(self, stream: int, event: torch.cuda.Event) -> None:
        self.streams[stream].wait_event(event)


@dataclass(eq=False)
class Storage:
    """What data order needs to know of a tensor's memory."""

    written: Any = None
    read: dict[int, Any] = field(default_factory=dict)  # stream -> the event of its last read


class Run:
    def __init__(self, machine: Machine, program: list[Step], thread: ThreadPoolExecutor) -> None:
        self.machine = machine
        self.program = program
        self.thread = thread
        self.expected = values_of(program)
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, Storage] = {}

    def run(self) -> None:
        for place, step in enumerate(self.program):
            if step.in_thread:
                self.thread.submit(self.do, place, step).result()
            else:
                self.do(place, step)

    def do(self, place: int, step: Step) -> None:
        if step.kind == "drop":
            del self.tensors[step.inputs[0]], self.storages[step.inputs[0]]
            return
        if step.kind == "delay":
            self.machine.delay(step.stream, step.number)
            return
        if step.kind == "view":
            (of,) = step.inputs
            self.tensors[step.result] = self.tensors[of].view(2, -1).view(-1)
            self.storages[step.result] = self.storages[of]
            return
        if step.result >= 0:
            self.storages[step.result] = Storage()
        getattr(self, f"do_{step.kind}")(place, step)

    def reads(self, stream: int, *variables: int) -> list[torch.Tensor]:
        """The stream's next work reads them."""
        for one in variables:
            self.machine.wait(stream, self.storages[one].written)
        return [self.tensors[one] for one in variables]

    def has_read(self, stream: int, *variables: int) -> None:
        event = self.machine.record(stream)
        for one in variables:
            self.storages[one].read[stream] = event

    def has_written(self, stream: int, variable: int) -> None:
        storage = self.storages[variable]
        storage.written = self.machine.record(stream)
        storage.read.clear()

    def do_new(self, place: int, step: Step) -> None:
        with self.machine.on(step.stream):
            self.tensors[step.result] = torch.full(
                (step.size,), float(step.number), device=self.machine.device
            )
        self.has_written(step.stream, step.result)

    def do_behind(self, place: int, step: Step) -> None:
        self.machine.wait(step.other, self.machine.record(step.stream))  # first this,
        with self.machine.on(step.stream):
            x = torch.empty(step.size, device=self.machine.device)  # then the memory
        with self.machine.on(step.other):
            self.tensors[step.result] = x.fill_(step.number)
        self.has_written(step.other, step.result)

    def do_add(self, place: int, step: Step) -> None:
        a, b = self.reads(step.stream, *step.inputs)
        with self.machine.on(step.stream):
            add = self.machine.compiled if step.kind == "compiled" else _add
            self.tensors[step.result] = add(a, b)
        self.has_read(step.stream, *step.inputs)
        self.has_written(step.stream, step.result)

    do_compiled = do_add

    def do_in_place(self, place: int, step: Step) -> None:
        (variable,) = step.inputs
        (x,) = self.reads(step.stream, variable)
        for event in self.storages[variable].read.values():
            self.machine.wait(step.stream, event)
        with self.machine.on(step.stream):
            self.write(x, step)
        self.has_written(step.stream, variable)

    def write(self, x: torch.Tensor, step: Step) -> None:
        x.add_(step.number).remainder_(MODULUS)

    def do_check(self, place: int, step: Step) -> None:
        (x,) = self.reads(step.stream, *step.inputs)
        self.machine.expect(step.stream, x, self.expected[place])
        self.has_read(step.stream, *step.inputs)

    def do_backward(self, place: int, step: Step) -> None:
        """x * w, whose gradient of w is x: saved for backward, or computed again there."""
        (x,) = self.reads(step.stream, *step.inputs)
        with self.machine.on(step.stream):
            w = torch.ones_like(x, requires_grad=True)
            if step.kind == "checkpoint":
                y = checkpoint(_product, x, w, use_reentrant=False)
            else:
                y = _product(x, w)
            grad = torch.ones_like(y)
        done = self.machine.record(step.stream)
        self.machine.delay(step.stream, 1)
        self.machine.wait(step.other, done)
        with self.machine.on(step.other):
            y.backward(grad)  # makes this stream wait for the gradient
        assert w.grad is not None
        self.tensors[step.result] = w.grad
        self.has_written(step.other, step.result)
        self.has_read(step.stream, *step.inputs)

    do_checkpoint = do_backward

    def do_graph(self, place: int, step: Step) -> None:
        (x,) = self.reads(step.stream, *step.inputs)
        with self.machine.on(step.stream):
            result = torch.empty_like(x)
        made = self.machine.record(step.stream)

        def work() -> None:
            result.copy_(torch.add(x, step.number).remainder_(MODULUS))

        def order() -> None:
            self.machine.wait(step.other, made)
            self.reads(step.other, *step.inputs)

        self.machine.replayed(step.stream, step.other, work, order)
        self.tensors[step.result] = result
        self.has_read(step.other, *step.inputs)
        self.has_written(step.other, step.result)


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a + b).remainder_(MODULUS)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w
