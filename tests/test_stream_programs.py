"""The random programs of tests/gpu/programs/stream_programs.py, without a GPU: the oracle knows
what PyTorch computes, every access to data is ordered, and memory is left to the allocator."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu" / "programs"))

import stream_programs  # noqa: E402
from stream_programs import STREAMS, Run, Step, Storage, make_program  # noqa: E402

Clock = list[int]


class OneByOne:
    """Runs everything at once on the CPU, and keeps a vector clock for each stream."""

    device = "cpu"

    def __init__(self) -> None:
        self.clocks: list[Clock] = [[0] * STREAMS for _ in range(STREAMS)]
        self.wrong: list[tuple[float, int]] = []
        self.checks = 0

    def on(self, stream: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, stream: int) -> Clock:
        self.clocks[stream][stream] += 1
        return list(self.clocks[stream])

    def wait(self, stream: int, event: Clock) -> None:
        self.clocks[stream] = [max(pair) for pair in zip(self.clocks[stream], event)]

    def is_after(self, stream: int, event: Clock) -> bool:
        return all(mine >= its for mine, its in zip(self.clocks[stream], event))

    def delay(self, stream: int, milliseconds: int) -> None:
        pass

    def expect(self, stream: int, tensor: torch.Tensor, value: int) -> None:
        self.checks += 1
        if bool((tensor != value).any()):
            self.wrong.append((float(tensor[0]), value))

    def compiled(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return stream_programs._add(a, b)

    def replayed(
        self, capture: int, replay: int, work: Callable[[], None], order: Callable[[], None]
    ) -> None:
        order()
        work()


def run(program: list[Step], kind: type[Run] = Run) -> OneByOne:
    machine = OneByOne()
    with ThreadPoolExecutor(1) as thread:
        made = kind(machine, program, thread)
        made.run()
    assert not made.tensors and not made.storages
    return machine


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_programs, "SIZES", (2, 4, 8))


class Ordered(Run):
    """Every access comes after those that it depends on."""

    def has_read(self, stream: int, *variables: int) -> None:
        for one in variables:
            assert self.machine.is_after(stream, self.storages[one].written)
        super().has_read(stream, *variables)

    def has_written(self, stream: int, variable: int) -> None:
        storage: Storage = self.storages[variable]
        for event in (storage.written, *storage.read.values()):
            assert event is None or self.machine.is_after(stream, event)
        super().has_written(stream, variable)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_pytorch_computes_what_the_oracle_says_in_order(first: int) -> None:
    for seed in range(first, first + 20):
        machine = run(make_program(seed), Ordered)
        assert machine.checks and machine.wrong == [], seed


def test_the_oracle_notices_another_result() -> None:
    """As it must where one byte is not what was written."""

    class Wrong(Run):
        def has_written(self, stream: int, variable: int) -> None:
            super().has_written(stream, variable)
            self.tensors[variable].data[0] += 1

    assert all(run(make_program(seed), Wrong).wrong for seed in range(10))


def test_programs_have_everything_and_repeat() -> None:
    programs = [make_program(seed) for seed in range(200)]
    kinds = {step.kind for program in programs for step in program}
    assert kinds == set(stream_programs.WEIGHTS)
    assert any(step.in_thread for step in programs[0])
    assert programs[3] == make_program(3) != programs[4]
    plain = make_program(3, without=frozenset(stream_programs.NEEDS_OTHERS))
    assert not {step.kind for step in plain} & stream_programs.NEEDS_OTHERS
