"""Whole jobs: how much memory they take from the device, and how long a step takes.

    jobs.py --job llama_varlen                   # one job, every allocator
    jobs.py --job ppo --segments mapped          # the same on one kind of segments
    jobs.py --segments classic --segments mapped # ours on both, beside the same peers
    jobs.py --job ppo --compare-replay           # is the replay right about this job?
    jobs.py --job ppo --inside                   # how long is a job inside the allocator?
    jobs.py --job ppo --twice                    # native beside native, too
    jobs.py --probe                              # what could be measured here

The jobs stand in workloads.py with their batch sizes and schedules: GPT-2 training,
variable-length Llama training, decoding with a growing cache, ResNet-50 training,
PPO; and four whose sizes never repeat, from random_sizes.py: a mixture of experts,
images of random sizes, serving, packed sequences. Every worker is a fresh process on
one allocator that goes through the schedule once, and then several times more for the
step time; the host waits at the end of a pass only. The workers are there at the same
time and take turns, a pass each, so the GPU must have room for all of them. PyTorch is
set to be deterministic, cudnn.benchmark is off.

Per job, ours beside PyTorch's own allocator, the same with expandable_segments,
cudaMallocAsync, and RMM's pool where the package rmm is installed:

  peak reserved     over the whole process, against the least peak *allocated* of
                    any peer: no allocator can do with less than what is live. Goal:
                    1.04 of it, or 256 MiB more if that is more. Aim: 1.02, from 1 GiB on
  step time         against the fastest peer, in all passes but the first. Goal: the mean of
                    the passes' ratios at most 1.00, its interval's upper end at most 1.02
  whole job         the mean step time of all passes, the first among them, in which memory
                    grows, against that of the peer which is fastest in the later ones.
                    Goal: at most 1.00
  device memory     in use beyond what is reserved, by cuMemGetInfo and by
                    nvidia-smi, against native: shows memory that is taken but not counted
  changes           how often what is reserved changes in a later pass: never, if passes
                    are alike
  outputs           losses, or tokens, that differ from native's: none. Decoding and
                    serving may depend on where tensors lie: where the other peers differ
                    from native too, nothing is asked of ours

--twice lets a second worker of native's take turns with the others: where the host
sets the pace, the two differ. Goal: ours is no slower than the slower of them.

--compare-replay records the history of a job on the GPU under native and under
ours, replays both on the simulated device, and compares the peak reserved there
with the peak of ours on the GPU.

--inside records two passes of a job under native, and lets malloc_times.py run their
allocations and frees through each allocator, from an emptied cache on, each call timed.
Goal: all together at most native's time. Nothing runs on the GPU meanwhile, so only
what the host does is timed, and that in the same way for all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    MIB,
    NATIVE,
    OURS,
    RMM,
    Case,
    Results,
    Rounds,
    device_used_mib,
    driver_version,
    gpu_missing,
    machine,
    memory_figures,
    nothing_measurable,
    nvidia_smi_used_mib,
    parser,
    peers_here,
    peers_of,
    report,
    rmm_missing,
    run_worker,
    use_allocator,
)
from turns import CORES, measured_beside, take_turns, turns
from workloads import JOBS, import_job

SEGMENTS = ("classic", "mapped")
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
AGAIN = f"{NATIVE}, run again"
LEAST, FASTEST = "least peak allocated of any peer", "fastest peer"
GOAL, OR_MIB = 1.04, 256.0  # of peak reserved, whichever allows more
AIM, AIM_FROM_MIB = 1.02, 1024
#: Passes that --inside records: memory grows in the first, and is there in the second.
RECORDED = 2
#: How many jobs are recorded side by side: a GPU of 80 GB has room for these.
RECORDERS = 3
#: What the replay needs to be right about, in percent of the peak.
REPLAY_GOAL = 2.0
#: Figures of the whole process, and such as the first pass alone has.
PEAKS = ("peak_allocated_mib", "peak_reserved_mib")
ONCE = ("machine", "beyond_reserved_mib", "smi_beyond_reserved_mib")


# --- the measuring side ------------------------------------------------------


def prepare(allocator: str, strict: bool = False) -> None:
    """The allocator, and settings under which a job repeats bit for bit; `strict` as
    in workloads.py."""
    import torch

    use_allocator(allocator)
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # cuDNN's attention makes a plan for each new length, tens of ms of the host, and lengths
    # hardly repeat where a cache grows.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Fresh memory is not filled: that would be work which no job has.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)


def measure(allocator: str, name: str, small: bool) -> Iterator[dict[str, Any]]:
    """One process, of which each turn but the first is a pass through the schedule.

    The pass's step_ms and outputs, and the memory_figures() until then. Of the first
    pass also beyond_reserved_mib and smi_beyond_reserved_mib: what this process has
    of the device's memory at its end, less what is reserved then.
    """
    import torch

    import_job(name)
    driver_version()
    yield {}
    others = nvidia_smi_used_mib()
    job = JOBS[name]
    prepare(allocator, job.strict)
    steps = job.small_steps if small else job.steps
    step = job.make(small)
    first = True
    while True:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outputs = [step(number) for number in range(steps)]
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - begin) * 1e3 / steps
        figures: dict[str, Any] = {
            "step_ms": step_ms,
            "outputs": [output.item().hex() for output in outputs],
            **memory_figures(),
        }
        if figures["retries"]:
            raise RuntimeError(
                "memory ran out beside the other workers: this GPU is too small for so many"
            )
        if first:
            check_segments(allocator)
            figures["machine"] = machine()
            smi = nvidia_smi_used_mib()
            if smi is not None and others is not None:
                taken = others + figures["reserved_mib"]
                figures["beyond_reserved_mib"] = device_used_mib() - taken
                figures["smi_beyond_reserved_mib"] = smi - taken
        first = False
        yield figures


def segment_kinds() -> set[str]:
    """The kinds of segments that PyTorch's allocator holds now."""
    import torch

    return {
        "mapped" if one.get("is_expandable") else "classic" for one in torch.cuda.memory_snapshot()
    }


def check_segments(allocator: str) -> None:
    """Raises where ours has taken segments, and none of the kind that the environment
    asks for."""
    wanted = os.environ.get("ESPER_ALLOC_SEGMENTS")
    if allocator != OURS or wanted is None:
        return
    kinds = segment_kinds()
    if kinds and wanted not in kinds:
        raise RuntimeError(
            f"ESPER_ALLOC_SEGMENTS={wanted}, but no segment is {wanted}: this esper_alloc "
            "or this driver has no such segments"
        )


def record(allocator: str, name: str, small: bool, path: str, passes: int = 1) -> dict[str, Any]:
    """So many passes with their history, which goes to `path`.

    segments: the kind that was taken, mapped where there were both.
    """
    import torch

    job = JOBS[name]
    prepare(allocator, job.strict)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    step = job.make(small)
    for _ in range(passes):
        for number in range(job.small_steps if small else job.steps):
            step(number)
    torch.cuda.synchronize()
    check_segments(allocator)
    torch.cuda.memory._dump_snapshot(path)
    return {"machine": machine(), "segments": max(segment_kinds()), **memory_figures()}


# --- the conducting side -----------------------------------------------------


def environment(segments: str | None) -> dict[str, str]:
    return {**DETERMINISTIC, **({"ESPER_ALLOC_SEGMENTS": segments} if segments else {})}


def ours_on(segments: str | None) -> str:
    """The name of the case that is ours on a kind of segments."""
    return f"{OURS}, {segments}" if segments else OURS


def cases_of(
    name: str, small: bool, kinds: Sequence[str | None], twice: bool = False
) -> tuple[list[Case], dict[str, str]]:
    """Ours on each kind of segments, and the peers that can be measured here, native
    perhaps `twice`; and those that cannot, and why."""
    arguments = ("--job", name, *(("--small",) if small else ()))
    peers, left_out = peers_here()
    cases = [Case(ours_on(kind), OURS, arguments, environment(kind)) for kind in kinds]
    cases += [Case(peer, peer, arguments, environment(None)) for peer in peers]
    if twice:
        cases.append(Case(AGAIN, NATIVE, arguments, environment(None)))
    return cases, left_out


def of_kind(
    rounds: Sequence[dict[str, dict[str, Any]]], segments: str | None
) -> list[dict[str, dict[str, Any]]]:
    """The rounds with ours on one kind of segments only."""
    mine = ours_on(segments)
    return [
        {OURS if case == mine else case: figures for case, figures in one.items()
         if case == mine or not case.startswith(OURS)}
        for one in rounds
    ]  # fmt: skip


def passes(measured: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    """Rounds of figures from what the workers reported in turns: each has the peaks of
    the whole process, the device_calls of its own pass, and the first pass's step time as
    first_step_ms beside its own."""
    warm_up, *later = measured[1:]
    last = measured[-1]
    rounds = []
    calls = {case: figures.get("device_calls", 0) for case, figures in warm_up.items()}
    for number, one in enumerate(later):
        rounds.append({})
        for case, figures in one.items():
            rounds[-1][case] = {**figures, **{key: last.get(case, figures)[key] for key in PEAKS}}
            if "device_calls" in figures:
                rounds[-1][case]["device_calls"] -= calls[case]
                calls[case] = figures["device_calls"]
            if number == 0:
                more = {key: warm_up[case].get(key) for key in ONCE}
                rounds[-1][case] |= {**more, "first_step_ms": warm_up[case]["step_ms"]}
    return rounds


def medians(rounds: Sequence[Mapping[str, Mapping[str, Any]]], key: str) -> dict[str, float]:
    """The median of a figure over the rounds, for each case that has it."""
    found: dict[str, list[float]] = {}
    for one in rounds:
        for case, figures in one.items():
            if figures.get(key) is not None:
                found.setdefault(case, []).append(figures[key])
    return {case: statistics.median(values) for case, values in found.items()}


def least(rounds: Sequence[Mapping[str, Mapping[str, Any]]], key: str) -> str | None:
    """The peer whose median of a figure is the least; None: there is none."""
    peers = {
        case: value for case, value in medians(rounds, key).items() if case not in (OURS, AGAIN)
    }
    return min(peers, key=lambda case: peers[case], default=None)


def with_best_peers(rounds: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    """The rounds, with the best peers under names of their own."""
    smallest, fastest = least(rounds, "peak_allocated_mib"), least(rounds, "step_ms")
    added = []
    for one in rounds:
        more = dict(one)
        if smallest in one:
            allocated = one[smallest]["peak_allocated_mib"]
            more[LEAST] = {"peak_reserved_mib": allocated, "peak_allocated_mib": allocated}
        if fastest in one:
            more[FASTEST] = one[fastest]
        added.append(more)
    return added


def whole_job(rounds: Sequence[Mapping[str, Mapping[str, Any]]], case: str) -> float:
    """The mean step time over the first pass and all later ones; 0: a pass is missing."""
    found = [one.get(case, {}).get("step_ms", 0.0) for one in rounds]
    found.append(rounds[0].get(case, {}).get("first_step_ms", 0.0))
    return statistics.fmean(found) if all(found) else 0.0


def differing(a: Sequence[str], b: Sequence[str]) -> int:
    """At how many places two lists of outputs differ."""
    return sum(one != other for one, other in zip(a, b)) + abs(len(a) - len(b))


def output_differences(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]],
) -> tuple[list[int], list[int]] | None:
    """Outputs that differ from those of native's same pass: of ours, and of each of the
    other peers. None: native did not run."""
    ours: list[int] = []
    peers: list[int] = []
    for one in rounds:
        if NATIVE not in one:
            continue
        for case, figures in one.items():
            if case not in (NATIVE, AGAIN):
                count = differing(figures["outputs"], one[NATIVE]["outputs"])
                (ours if case == OURS else peers).append(count)
    return (ours, peers) if ours else None


def add_rows(
    results: Results,
    title: str,
    rounds: Sequence[dict[str, dict[str, Any]]],
    by_place: bool = False,
) -> None:
    """Every row of one job; `title` begins their names. `by_place`: what it computes may
    depend on where tensors lie, so where peers do not agree, nothing is asked of ours."""
    best = with_best_peers(rounds)
    peak = f"{title}: peak reserved"
    live = medians(best, "peak_reserved_mib").get(LEAST)
    goal = max(GOAL, 1 + OR_MIB / live) if live else GOAL
    results.compare(peak, "MiB", best, "peak_reserved_mib", OURS, LEAST, goal)
    if results.rows and results.rows[-1]["name"] == peak:
        row = results.rows[-1]
        row["peer_is"] = least(rounds, "peak_allocated_mib")
        if row["peer"] > AIM_FROM_MIB:
            row["aim"] = AIM
    step = f"{title}: step time"
    results.compare(step, "ms", best, "step_ms", OURS, FASTEST, 1.0, "no_more")
    if results.rows and results.rows[-1]["name"] == step:
        results.rows[-1]["peer_is"] = least(rounds, "step_ms")
    whole = {case: whole_job(best, case) for case in (OURS, FASTEST)}
    if all(whole.values()):
        over = f"{title}: step time over the whole job"
        results.row(over, "ms", [whole[OURS]], [whole[FASTEST]], FASTEST, 1.0)
    if AGAIN in rounds[0]:
        name = f"{title}: step time of native, run again"
        results.compare(name, "ms", rounds, "step_ms", AGAIN, NATIVE)
        means = {case: whole_job(rounds, case) for case in (OURS, NATIVE, AGAIN)}
        if all(means.values()):
            slower = max(means[NATIVE], means[AGAIN])
            row = f"{title}: step time over the whole job, within native's own spread"
            results.row(row, "ms", [means[OURS]], [slower], "native's slower run", 1.0)
    results.compare(f"{title}: peak allocated", "MiB", best, "peak_allocated_mib", OURS, LEAST)
    results.compare(
        f"{title}: changes of reserved memory in a later pass", "changes", rounds, "device_calls",
        OURS, NATIVE,
    )  # fmt: skip
    for name, key in (
        ("device memory in use beyond reserved", "beyond_reserved_mib"),
        ("nvidia-smi's memory in use beyond reserved", "smi_beyond_reserved_mib"),
    ):
        if OURS in medians(rounds, key):
            results.compare(f"{title}: {name}", "MiB", rounds, key, OURS, NATIVE, 2.0, "difference")
    differences = output_differences(rounds)
    if differences is not None:
        ours, peers = differences
        agreed = bool(peers) and not any(peers)
        results.row(
            f"{title}: outputs that differ from native's",
            "outputs", ours, peers or [0], "the other peers",
            None if by_place and not agreed else 0.0, "ours",
        )  # fmt: skip
    for peer in peers_of(rounds, ()):
        for name, unit, key in (
            ("peak reserved", "MiB", "peak_reserved_mib"),
            ("step time", "ms", "step_ms"),
            ("step time of the first pass", "ms", "first_step_ms"),
        ):
            results.compare(f"{title}: {name}", unit, rounds, key, OURS, peer)


def measure_passes(
    cases: Sequence[Case], rounds: int, *, each: Callable[[Rounds], object], seconds: float
) -> Rounds:
    """The passes of all cases, of which `each` is told, too."""
    told = lambda measured: each(passes(measured))  # noqa: E731
    return passes(turns(__file__, cases, rounds, seconds=seconds, each=told))


def add_kinds(
    results: Results, name: str, kinds: Sequence[str | None], cases: Sequence[str], rounds: Rounds
) -> None:
    """The rows of a job on each kind of segments. Says what did not go through."""
    for case in cases:
        if case not in rounds[-1]:
            print(f"{name}: {case} did not go through: the others are no comparison")
            results.complete = False
    for kind in kinds:
        mine = of_kind(rounds, kind)
        if any(OURS in one for one in mine):
            add_rows(results, title_of(name, kind), mine, JOBS[name].by_place)


def compare_replay(results: Results, name: str, small: bool, segments: str | None) -> None:
    """Adds how far the replayed peaks are from that of ours on the GPU."""
    from esper_alloc.replay import replay

    arguments = ["--job", name, *(("--small",) if small else ())]

    def recorded(allocator: str) -> tuple[dict[str, Any], replay.Recording]:
        path = Path(folder) / f"{allocator}.pickle"
        figures = run_worker(
            __file__, allocator, [*arguments, "--record", str(path)],
            more=environment(segments if allocator == OURS else None),
        )  # fmt: skip
        [one] = [one for one in replay.load_recordings(path) if one.history.device == 0]
        return figures, one

    # Side by side: nothing is timed.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        found = dict(zip((OURS, NATIVE), pool.map(recorded, (OURS, NATIVE))))
    figures = found[OURS][0]
    recordings = {allocator: recording for allocator, (_, recording) in found.items()}
    if results.run is None:
        results.describe(figures["machine"])
    ran = figures["peak_reserved_mib"]
    title = title_of(name, segments)
    for allocator, recording in recordings.items():
        peak = replay.replay(recording, figures["segments"]).peak_reserved / MIB
        peer = f"the run on the GPU, history of {allocator}"
        results.row(f"{title}: replayed peak reserved", "MiB", [peak], [ran], peer)
        results.row(
            f"{title}: replayed peak reserved, off by", "%",
            [abs(peak / ran - 1) * 100], [0.0], peer, REPLAY_GOAL, "ours",
        )  # fmt: skip


def compare_inside(
    results: Results, names: Sequence[str], options: argparse.Namespace, segments: str | None
) -> bool:
    """Adds how long the mallocs and frees of two passes of each job take under each
    allocator. Returns whether ours was measured."""
    import malloc_times

    def add(rounds: Rounds) -> None:
        for name in names:
            of_job = malloc_times.rounds_of(name, rounds)
            row = f"{title_of(name, segments)}: time inside the allocator"
            for peer in peers_of(of_job):
                goal = 1.0 if peer == NATIVE else None
                results.compare(row, "us", of_job, "whole_inside_us", OURS, peer, goal)

    def recorded(name: str) -> str:
        path = str(Path(folder) / f"{name}.pickle")
        arguments = ["--job", name, *(("--small",) if options.small else ())]
        arguments += ["--record", path, "--passes", str(RECORDED)]
        run_worker(__file__, NATIVE, arguments, more=environment(None))
        return path

    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(RECORDERS) as pool:  # nothing is timed yet
            files = list(pool.map(recorded, names))
        peers, left_out = peers_here()
        timed = ("--cold", *files)
        cases = [Case(OURS, OURS, timed, environment(segments))]
        cases += [Case(peer, peer, timed) for peer in peers]
        script = malloc_times.__file__
        return measured_beside(script, cases, options, "malloc_times", add, results, left_out)


def title_of(name: str, segments: str | None) -> str:
    return f"{name}, {segments} segments" if segments else name


def probe() -> int:
    """Prints what could be measured here; 1: nothing."""
    why = gpu_missing()
    print(f"GPU: {why or 'there is one'}")
    for package, needed_for in (
        ("torch", "everything"),
        ("transformers", "the job gpt2"),
        ("torchvision", "the job resnet50"),
    ):
        found = importlib.util.find_spec(package) is not None
        print(f"{package}: {'found' if found else f'missing, needed for {needed_for}'}")
    print(f"{RMM}: {rmm_missing() or 'found'}")
    return 1 if why else 0


def main() -> int:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=60)
    arguments.add_argument("--job", choices=JOBS, action="append", help="default: all")
    arguments.add_argument(
        "--segments", choices=SEGMENTS, action="append", help="of ours; default: its own choice"
    )
    arguments.add_argument("--small", action="store_true", help="tiny models: to try the script")
    arguments.add_argument("--compare-replay", action="store_true", help="see above")
    arguments.add_argument("--inside", action="store_true", help="see above")
    arguments.add_argument("--twice", action="store_true", help="see above")
    arguments.add_argument("--probe", action="store_true", help="only say what can be measured")
    arguments.add_argument("--record", metavar="FILE", help="record (of --worker)")
    arguments.add_argument("--passes", type=int, default=1, help="to record (default: 1)")
    options = arguments.parse_args()
    if options.probe:
        return probe()
    names = options.job or list(JOBS)
    if options.worker:
        if options.record:
            recorded = (names[0], options.small, options.record, options.passes)
            report(record(options.worker, *recorded))
        else:
            take_turns(measure(options.worker, names[0], options.small), CORES)
        return 0
    if nothing_measurable():
        return 1

    results = Results("jobs", options.out)
    complete = True
    begin = time.monotonic()
    kinds: list[str | None] = options.segments or [None]
    if options.inside:
        complete = all([compare_inside(results, names, options, kind) for kind in kinds])
        return 0 if results.run is not None and results.save() and complete else 1
    for index, name in enumerate(names):
        if options.compare_replay:
            for kind in kinds:
                compare_replay(results, name, options.small, kind)
            continue
        left = options.seconds - (time.monotonic() - begin)
        if left <= 0:
            print(f"{name}: not begun, {options.seconds:.0f} s are over")
            complete = False
            continue
        cases, left_out = cases_of(name, options.small, kinds, options.twice)
        how = {"seconds": left / (len(names) - index)}
        if not results.of_rounds(
            partial(measure_passes, cases, 1 + options.rounds, **how),
            partial(add_kinds, results, name, kinds, [case.name for case in cases]),
            left_out,
            ours=None,
        ):
            print(f"{name}: nothing was measured")
            complete = False
        elif not results.save():  # what is measured stays, whatever ends the rest
            complete = False
    if results.run is None:
        print("nothing was measured")
        return 1
    return 0 if (results.save() if options.compare_replay else complete) else 1


if __name__ == "__main__":
    raise SystemExit(main())
