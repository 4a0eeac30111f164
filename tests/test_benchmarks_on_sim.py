"""The measuring loops of benchmarks/calls.py, and the pipeline's memory by layer, under PyTorch's
own allocator and esper_alloc, both on the simulated device."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from on_sim import build
from processes import python

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent / "benchmarks"


#: A worker, as the benchmark's conductor starts it, but that it forks no children: the
#: simulated device is there once it is imported.
WORKER = """
import simulated, sys
sys.path.insert(0, sys.argv.pop(1))
import turns
turns.in_a_child = lambda measure: measure()
import run
run.main()
"""


def run(library: Path, code: str, *arguments: str, input: str = "", **env: str) -> list[str]:
    """The lines that a program prints on the simulated device."""
    env = {**os.environ, **build.environment(library), "SIM_CAPACITY_MB": "4096", **env}
    done = python("-c", code, BENCHMARKS, *arguments, env=env, input=input)
    if done.returncode and ("No such file or directory: 'g++'" in done.stderr):
        pytest.skip("no C++ compiler")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def measured(library: Path, topic: str, allocator: str, **settings: Any) -> dict[str, Any]:
    """What the worker of a topic of one part reports."""
    sys.path.insert(0, str(BENCHMARKS))
    from common import Options
    from run import Command
    from topics import TOPICS

    settings = {**TOPICS[topic].settings, **settings}
    [part] = TOPICS[topic].parts
    [case] = [one for one in part.cases if one.allocator == allocator]
    command = Command(topic, Options(settings=settings), None, None)
    [*_, flag, asked], _ = command.command_of(part, case)
    lines = run(library, WORKER, flag, asked, input="\n\n", ESPER_SIMULATED_ALLOCATOR=allocator)
    _, line = [one for one in lines if one.startswith("benchmark-result: ")]
    found: dict[str, Any] = json.loads(line.removeprefix("benchmark-result: "))
    return found


#: What each topic measures, and the settings that make it short. Of churn's, 10,000 blocks are more
#: than the simulated device has.
SIZES, MANY = ("1 MiB", "512 B", "64 MiB"), "{} live blocks up to 8 MiB"
FIGURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "pair": ([*(f"raw_alloc + raw_delete, {size}" for size in SIZES),
     "torch.empty and drop, 4 KiB"], {}),
    "threads": ([f"{kind}, {size}, {threads} threads" for size in ("4 KiB", "1 MiB") for kind,
     counts in (("pairs", (1, 4)), ("pairs, handed on", (4,))) for threads in counts], {"most": 4,
     "milliseconds": 500}),
    "churn": ([f"{MANY.format(count)}: ns" for count in ("100", "1,000")], {"most": 1000,
     "operations": 2000}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("topic", FIGURES)
@pytest.mark.parametrize("allocator", ["esper_alloc", "native"])
def test_topics_are_measured(library: Path, topic: str, allocator: str) -> None:
    names, settings = FIGURES[topic]
    found = measured(library, topic, allocator, **settings)
    assert found.pop("machine")["gpu"] == "simulated device 0"
    assert sorted(found) == sorted(names) and all(figure > 0 for figure in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["esper_alloc", "native"])
def test_a_recorded_jobs_mallocs_and_frees_are_timed(library: Path, allocator: str) -> None:
    trace = HERE / "traces" / "expandable.pickle.gz"
    found = measured(library, "malloc_times", allocator, files=[str(trace)])
    for when in ("whole", "warm"):
        median, slow, mallocs = (
            found[f"expandable: {when}_{what}_us"] for what in ("median", "slow", "sum")
        )
        assert 0 < median <= slow <= mallocs


#: The same allocation on a side stream, again and again: MiB reserved after each run.
WARM = """
import simulated, struct, sys
sys.path.insert(0, sys.argv.pop(1))
import loops, torch
packed = b"".join(struct.pack("<IIIIQ", code, 0, 1, 0, 32 << 20) for code in (0, 1))
for _ in range(3):
    loops.times_ns(packed, 1, 2)
    print(torch.cuda.memory_reserved() >> 20)
"""


@pytest.mark.slow
def test_a_recorded_jobs_streams_are_the_same_when_it_is_warm(library: Path) -> None:
    assert run(library, WARM, ESPER_SIMULATED_ALLOCATOR="native") == ["32"] * 3


#: The pipeline of streams.py, in which nothing is computed, and no work ends before the steps are
#: over, as if the host were infinitely far ahead: MiB active after each layer.
PIPELINE = """
import simulated, sys, json
sys.path.insert(0, sys.argv.pop(1))
import torch
from streams import SHAPES, TIMED_STEPS, Pipeline

class Simulated(Pipeline):
    def normal(self, scale, *shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def whole(self, layer):
        halves = self.shards[layer]
        w = halves[0].new_empty((2 * halves[0].shape[0], *halves[0].shape[1:]))
        simulated.work(self.comm)
        return w

    def layer(self, x, w):
        x = x.new_empty((x.shape[0], w.shape[1]))
        simulated.work(self.compute)
        return x

with torch.no_grad():
    print(json.dumps(Simulated(sys.argv[1], *SHAPES["small"][False]).by_layer(TIMED_STEPS)))
"""


@pytest.mark.slow
def test_the_pipelines_memory_stays_level(library: Path) -> None:
    def by_layer(marks: str, allocator: str) -> list[float]:
        env = {"SIM_CAPACITY_MB": "32768", "SIM_MAPS_PAGES": "1"}
        lines = run(library, PIPELINE, marks, ESPER_SIMULATED_ALLOCATOR=allocator, **env)
        found: list[float] = json.loads(lines[-1])
        return found

    ours, peer = by_layer("record_use", "esper_alloc"), by_layer("record_stream", "native")
    assert ours == [192.0, 224.0, 256.0, *[288.0] * 285]
    assert max(peer) > 10 * max(ours) and peer[-1] > peer[0]


#: Steps that take 32 MiB on each of two streams, beside 64 MiB that stay, with so many MiB at the most.
WITHIN = """
import simulated, sys, json
sys.path.insert(0, sys.argv.pop(1))
import torch
from streams import run_within

def make():
    base, side = torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    def step(stays=base):
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    return step

print(json.dumps(run_within(make, (1, 2), int(sys.argv[1]) << 20)))
"""


@pytest.mark.parametrize(("mib", "failed"), [(160, 0), (80, 1)])
def test_a_pipeline_has_no_more_than_its_limit(library: Path, mib: int, failed: int) -> None:
    lines = run(library, WITHIN, str(mib), SIM_CAPACITY_MB="1024")
    found = json.loads(lines[-1])
    assert found["failed"] == failed and (found["step_ms"] is None) == bool(failed)
    assert (found["ooms"] > 0) == bool(failed) and (found["why"] is not None) == bool(failed)
    assert found["reserved"] <= mib << 20
