"""The benchmarks: what each asks, its cases, and its rows with their goals. run.py runs them.

What is measured stands where it is measured: streams.pipeline is pipeline() in streams.py. Which
rows the documents show stands in shown.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from colocated import PHASES
from common import (
    CAPTURE_REUSE,
    EXPANDABLE,
    FRESH,
    NATIVE,
    OURS,
    PEERS,
    STAYS,
    Case,
    Options,
    Part,
    Rounds,
    Row,
    Topic,
    column,
)
from jobs_rows import AGAIN, job_rows, passes, with_best
from stacks import STACKS

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
#: How the cases of most comparisons mark what they use.
RECORD_STREAM, BY_HAND, RECIPE = "native, record_stream", "native, by hand", "native, recipe"
RECORD_USE, OURS_STREAM = "esper_alloc, record_use", "esper_alloc, record_stream"
UNMARKED, TIGHT = "esper_alloc, automatic uses", "esper_alloc, record_use, allowance 64MiB"
ALLOWANCE = 128  # MiB, the default
#: Of parts that time calls in C++.
LOOPS: dict[str, Any] = {"same_cores": True, "loops": True}
#: A row's name, unit and figure, and perhaps its goal and what that bounds.
Figure = tuple[Any, ...]


def beside(ours: str, peer: Any, *figures: Figure, title: str = "", **more: Any) -> list[Row]:
    """Rows of a case beside another one; `title` begins their names."""
    return [
        Row(title + name, unit, key, ours, peer, *goal, **more)
        for name, unit, key, *goal in figures
    ]


def own(case: str, name: str, unit: str, key: str, *goal: Any, **peer: Any) -> Row:
    """A figure of a case beside another one of the same process, `peer_key`."""
    return Row(name, unit, key, case, case, *goal, **peer)


def beside_peers(*figures: Figure, judged_by: Sequence[str] = (NATIVE,)) -> list[Row]:
    """Rows of ours beside each peer. By some of these ours is judged."""
    return [
        Row(name, unit, key, OURS, peer, *(goal if peer in judged_by else ()))
        for peer in PEERS for name, unit, key, *goal in figures
    ]  # fmt: skip


def told(cases: Iterable[Case], **how: Any) -> list[Case]:
    """The cases, told this as well."""
    return [replace(case, how={**case.how, **how}) for case in cases]


def marked(name: str, marks: str, **environment: str) -> Case:
    allocator = NATIVE if name.startswith(NATIVE) else OURS
    return Case(name, allocator, {"marks": marks}, environment)


def of(*allocators: str, **environment: str) -> list[Case]:
    """A case for each allocator, named after it."""
    return [Case(one, one, environment=environment) for one in allocators]


def everybody(**environment: str) -> list[Case]:
    """Ours and every peer."""
    return of(OURS, *PEERS, **environment)


MARKED = {
    RECORD_STREAM: marked(RECORD_STREAM, "record_stream"),
    BY_HAND: marked(BY_HAND, "by_hand"),
    RECIPE: marked(RECIPE, "recipe"),
    RECORD_USE: marked(RECORD_USE, "record_use"),
    TIGHT: marked(TIGHT, "record_use", ESPER_ALLOC_ALLOWANCE="64MiB"),
    OURS_STREAM: marked(OURS_STREAM, "record_stream"),
    UNMARKED: marked(UNMARKED, "none", ESPER_ALLOC_USES="automatic"),
}

# --- several streams ---------------------------------------------------------
STEP, BATCH = ("step time", "ms", "step_ms"), ("time a batch", "ms", "batch_ms")
ACTIVE = ("peak active over base", "MiB", "peak_over_base_mib")
RESERVED = ("reserved over base", "MiB", "reserved_mib")
NONE_WRONG = (
    "elements of x that differ from those of a step that waited", "elements", "wrong", 0, "ours",
)  # fmt: skip
VIEWS = "esper_alloc, record_use of views"
PIPELINE_CASES = [
    MARKED[RECORD_STREAM], MARKED[RECIPE], MARKED[RECORD_USE], MARKED[TIGHT],
    marked(VIEWS, "views"), MARKED[OURS_STREAM], MARKED[UNMARKED],
]  # fmt: skip
#: Active: the recipe's 384 MiB and half of the allowance.
BY_RECIPE = (
    (*STEP, 1.01, "mean_ratio"),
    (*ACTIVE, 448, "ours"),
    (*RESERVED, ALLOWANCE, "difference"),
    NONE_WRONG,
)
LARGE_BY_RECIPE = ((*STEP, 1.01, "mean_ratio"), (*ACTIVE, 512, "difference"), RESERVED, NONE_WRONG)
LARGE = "layers of 512 MiB"


def pipeline_rows(rounds: Rounds, options: Options) -> list[Row]:
    """The peak beside record_stream's has both by layer, as the first round had them."""
    both = [one for one in rounds if RECORD_USE in one and RECORD_STREAM in one][:1]
    sides = (("ours_by_layer", RECORD_USE), ("peer_by_layer", RECORD_STREAM))
    by_layer = {key: one[case]["by_layer"] for one in both for key, case in sides}
    return [
        *beside(RECORD_USE, RECIPE, *BY_RECIPE),
        *beside(RECORD_USE, RECORD_STREAM, STEP, RESERVED, NONE_WRONG),
        *beside(VIEWS, RECIPE, *BY_RECIPE, title="views, grad mode: "),
        *beside(OURS_STREAM, RECIPE, *BY_RECIPE, title="record_stream: "),
        *beside(UNMARKED, RECIPE, *BY_RECIPE, title="automatic uses: "),
        *beside(TIGHT, RECIPE, BY_RECIPE[0], (*ACTIVE, 384, "ours"), title="allowance 64MiB: "),
        *beside(RECORD_USE, RECORD_STREAM, ACTIVE, more=by_layer),
    ]


LARGE_ROWS = [
    *beside(RECORD_USE, RECIPE, *LARGE_BY_RECIPE, title=f"{LARGE}: "),
    *beside(VIEWS, RECIPE, *LARGE_BY_RECIPE, title=f"{LARGE}, views: "),
    *beside(OURS_STREAM, RECIPE, *LARGE_BY_RECIPE, title=f"{LARGE}, record_stream: "),
    *beside(UNMARKED, RECIPE, *LARGE_BY_RECIPE, title=f"{LARGE}, automatic uses: "),
    *beside(TIGHT, RECIPE, STEP, ACTIVE, RESERVED, NONE_WRONG, title=f"{LARGE}, allowance 64MiB: "),
    *beside(RECORD_USE, RECORD_STREAM, STEP, ACTIVE, title=f"{LARGE}: "),
]


PIPELINE = Topic(
    "What do weights take that are gathered on one stream, and used on another, as FSDP does?",
    Part("small", "streams.pipeline", told(PIPELINE_CASES, layers="small"), pipeline_rows,
        ours=RECORD_USE),
    Part("large", "streams.pipeline", told(PIPELINE_CASES, layers="large"), LARGE_ROWS,
        ours=RECORD_USE),
    rounds=6,
)  # fmt: skip


def prefetch_part(name: str, layers: int) -> Part:
    cases = told((MARKED[one] for one in MARKED if one != RECIPE), layers=layers)
    quick, level = (*BATCH, 1.02, "mean_ratio"), (*ACTIVE, ALLOWANCE, "difference")
    right = ("figures that differ from a run that waited", "figures", "wrong", 0.0, "ours")
    like_by_hand = ((*BATCH, 1.01, "mean_ratio"), level, RESERVED, right)
    return Part(name, "streams.prefetch", cases, ours=None, rows=[
        *beside(RECORD_USE, RECORD_STREAM, quick, (*ACTIVE, 1.0), RESERVED, right,
            title=f"{name}: "),
        *beside(RECORD_USE, BY_HAND, BATCH, level, RESERVED, title=f"{name}: "),
        *beside(TIGHT, BY_HAND, quick, (*ACTIVE, 1.05), RESERVED,
            title=f"{name}, allowance 64MiB: "),
        *beside(OURS_STREAM, BY_HAND, *like_by_hand, title=f"{name}, record_stream: "),
        *beside(UNMARKED, BY_HAND, *like_by_hand, title=f"{name}, nothing marked: "),
    ])  # fmt: skip


PREFETCH = Topic(
    "What do batches take that are copied from pinned memory on a stream of their own?",
    prefetch_part("compute-bound", 4),
    prefetch_part("copy-bound", 0),
)
OVERLAP_CASES = [
    MARKED[RECORD_STREAM], marked(OURS, "record_use"), MARKED[OURS_STREAM], MARKED[UNMARKED],
]  # fmt: skip


def overlap_part(name: str) -> Part:
    goals = ((*STEP, 1.01, "mean_ratio"), ("peak reserved", "MiB", "reserved_mib", 0.55))
    return Part(name, "streams.overlap", told(OVERLAP_CASES, sizes=name), [
        *beside(OURS, RECORD_STREAM, *goals, title=f"{name}: "),
        *beside(OURS_STREAM, RECORD_STREAM, *goals, title=f"{name}, record_stream: "),
        *beside(UNMARKED, RECORD_STREAM, *goals, title=f"{name}, automatic uses: "),
    ])  # fmt: skip


OVERLAP = Topic(
    "Do copies and computation on three or four streams keep their overlap?",
    *map(overlap_part, ("small", "four", "large", "four-large")),
)


OF_LEAST = 1.05


def within_least(
    command: Any, part: Part, cases: Sequence[Case], rounds: int, seconds: float, each: Any
) -> Rounds:
    """Measures first what the recipe reserves at its peak without a limit, and then all cases
    within 1.05 times as much, by set_per_process_memory_fraction."""
    end = time.monotonic() + seconds
    found = command.measure(part, [case for case in cases if case.name == RECIPE], 1)
    least = found[0].get(RECIPE) if found else None
    if least is None or least["failed"]:
        print("the recipe did not go through without a limit: there is nothing to compare")
        return []
    limit = int(OF_LEAST * least["reserved"])
    return command.measure(part, told(cases, limit=limit), rounds, end - time.monotonic(), each)


WITHIN = (
    ("runs that fail", "runs", "failed", 0.0, "ours"), (*STEP, 1.1, "mean_ratio"),
    ("retries", "retries", "retries"), ("out-of-memory errors", "errors", "ooms"),
)  # fmt: skip
LEAST = Topic(
    "Does a pipeline go through within 1.05 of the memory that it takes with tensors kept by hand?",
    Part("least", "streams.least", conduct=within_least, ours=RECORD_USE, cases=[
        MARKED[RECORD_USE], MARKED[RECIPE], MARKED[RECORD_STREAM],
    ], rows=[
        *beside(RECORD_USE, RECIPE, *WITHIN), *beside(RECORD_USE, RECORD_STREAM, *WITHIN),
        Row("peak reserved", "MiB", "reserved_mib", RECORD_USE, RECORD_USE, peer_key="limit_mib",
            peer_name="the limit"),
    ]),
)  # fmt: skip

# --- whole jobs --------------------------------------------------------------
JOBS = (
    "gpt2", "llama_varlen", "llama_decode", "resnet50", "ppo", "moe", "resolutions", "serving",
    "packed",
)  # fmt: skip
#: Of these, the host sets the pace: they differ from run to run, under one allocator too. So native
#: takes its turn twice, and ours may be as slow as the slower.
HOST_BOUND = ("llama_decode", "ppo", "serving")


def job_part(job: str) -> Part:
    cases = everybody(**DETERMINISTIC)
    cases += [Case(AGAIN, NATIVE, environment=DETERMINISTIC)] if job in HOST_BOUND else []
    rows = partial(job_rows, job, job in ("llama_decode", "serving"))
    return Part(
        job, "jobs.measure", told(cases, job=job), rows, STAYS, ours=None, same_cores=True,
        warm_up=1, derive=lambda rounds: with_best(passes(rounds)),
    )  # fmt: skip


JOBS_TOPIC = Topic(
    "How much memory do whole jobs take from the device, how long is a step, are outputs the same?",
    *map(job_part, JOBS),
    rounds=60,
)

# --- calls -------------------------------------------------------------------
RAW, EMPTY = "raw_alloc + raw_delete, ", "torch.empty and drop, 4 KiB"
PAIR = Topic(
    "What do an allocation and its free cost? Those of `raw_alloc` are C++.",
    Part("pair", "calls.pairs", everybody(), **LOOPS, rows=beside_peers(
        *((RAW + one, "ns", RAW + one, 0.4) for one in ("512 B", "1 MiB", "64 MiB")),
        (EMPTY, "ns", EMPTY, 1.0),
        judged_by=(NATIVE, EXPANDABLE),
    )),
)  # fmt: skip


def threads_figures(kind: str, goal: float, *counts: int) -> Iterator[Figure]:
    for size in ("4 KiB", "1 MiB"):
        for count in counts:
            name = f"{kind}, {size}, {count} threads"
            yield name, "million/s", name, goal if count == 16 else None, "at_least"


THREADS = Topic(
    "How many pairs of malloc and free do threads make in a second, each on a core of its own?",
    Part("threads", "calls.threads", everybody(), loops=True, rows=beside_peers(
        *threads_figures("pairs", 30.0, 1, 4, 16),
        *threads_figures("pairs, handed on", 20.0, 4, 16),
    )),
    settings={"most": 16, "milliseconds": 100},
)  # fmt: skip
LIVE = (
    *(f"{live} live blocks up to 8 MiB" for live in ("100", "1,000", "10,000", "100,000")),
    "1,000,000 live blocks up to 64 KiB",
)


def churn_rows(rounds: Rounds, options: Options) -> Iterator[Row]:
    """Of what was measured. The cost grows no faster than the logarithm."""
    there = [one for one in LIVE if column(rounds, OURS, f"{one}: ns")]
    for one in there:
        yield from beside_peers((f"free and malloc among {one}", "ns", f"{one}: ns", 0.3))
    few, many = LIVE[0], LIVE[3]
    if few in there and many in there:
        name, goal = f"free and malloc among {many}, growth", math.log(100_000) / math.log(100)
        few_ns = {"peer_key": f"{few}: ns", "peer_name": "among 100"}
        yield own(OURS, name, "ns", f"{many}: ns", goal, **few_ns)


CHURN = Topic(
    "What does it cost to replace a block among many live ones?",
    Part("churn", "calls.churn", everybody(), churn_rows, **LOOPS),
    settings={"most": 1_000_000, "operations": 200_000},
)


def malloc_times_rows(rounds: Rounds, options: Options) -> Iterator[Row]:
    keys = {key for one in rounds for case in one.values() for key in case}
    slow = ": whole_slow_us"
    for job in sorted(key.removesuffix(slow) for key in keys if key.endswith(slow)):
        for title, key, *goal in (
            ("malloc, the whole job, 99.9th percentile", "whole_slow_us", 1.5),
            ("malloc, the whole job, median", "whole_median_us"),
            ("malloc, the whole job, all together", "whole_sum_us", 1.0),
            ("malloc, once warm, 99.9th percentile", "warm_slow_us"),
            ("malloc, once warm, median", "warm_median_us"),
        ):
            if f"{job}: {key}" in keys:
                yield from beside_peers((f"{job}: {title}", "us", f"{job}: {key}", *goal))


MALLOC_TIMES = Topic(
    "How long do a recorded job's slowest mallocs take, and all mallocs and frees together?",
    Part("malloc_times", "calls.malloc_times", everybody(), malloc_times_rows, **LOOPS),
    settings={"files": ("",)},
)
STARTUP = Topic(
    "What does it cost to be there: an idle process, the first allocation?",
    # Whoever is first in the first round has the driver's libraries read from the disk.
    Part("first", "calls.first", everybody(), same_cores=True, warm_up=1,
         derive=lambda rounds: rounds[1:], rows=beside_peers(
        ("idle device memory", "MiB", "idle_mib", 1.0),
        ("first allocation to the end of the first kernel", "ms", "first_ms", 1.0, "no_worse"),
        ("first allocation", "us", "first_allocation_us"),
    )),
    rounds=30,
)  # fmt: skip

# --- marks, automatic uses, audits -------------------------------------------
CAPTURED = (
    ("capture time", "ms", "capture_ms"), ("replay time", "ms", "replay_ms"),
    ("elements that replays got wrong", "elements", "wrong", 0.0),
)  # fmt: skip
POOL = ("a graph's private pool", "MiB", "pool_mib")
CAPTURES = Topic(
    "How much memory does a CUDA graph hold whose temporaries are read on a side stream?",
    Part("captures", "marks.captures", ours=RECORD_USE, same_cores=True, cases=[
        MARKED[RECORD_USE], MARKED[RECORD_STREAM],
        Case(CAPTURE_REUSE, CAPTURE_REUSE, {"marks": "record_stream"}), MARKED[OURS_STREAM],
    ], rows=[
        *beside(RECORD_USE, RECORD_STREAM, (*POOL, 0.5), *CAPTURED),
        *beside(RECORD_USE, CAPTURE_REUSE, (*POOL, 1.0), *CAPTURED),
        *beside(RECORD_USE, OURS_STREAM, POOL, *CAPTURED),
    ]),
)  # fmt: skip


def mark_rows() -> Iterator[Row]:
    for form in ("call", "cycle"):
        mark, old = f"record_use, {form}", f"record_stream, {form}"
        goal = (1.0,) if form == "call" else (300.0, "difference")
        yield Row(mark, "ns", mark, OURS, NATIVE, *goal, peer_key=old, peer_name=RECORD_STREAM)
        yield own(OURS, mark, "ns", mark, peer_key=old, peer_name=OURS_STREAM)
    yield Row("using, cycle", "ns", "using, cycle", OURS, NATIVE, peer_key="record_stream, cycle",
              peer_name=RECORD_STREAM)  # fmt: skip
    bare = {"peer_key": "C, cuEventRecord", "peer_name": "cuEventRecord"}
    for name in ("C, esper_alloc_record_use", "C, esper_record_use"):
        yield own(OURS, name, "ns", name, 1.5, **bare)


RECORD_USE_COST = Topic(
    "What does a mark cost, from Python beside record_stream, from C beside cuEventRecord?",
    Part("record_use_cost", "marks.mark_costs", of(OURS, NATIVE), [*mark_rows()], **LOOPS),
)


def automatic_row(name: str, unit: str, *goal: Any) -> Row:
    keys = {"peer_key": f"{name}, marked", "peer_name": "marked uses"}
    return own(OURS, name, unit, f"{name}, automatic", *goal, **keys)


AUTOMATIC_USES = Topic(
    "What do automatic uses cost an operator, beside marked uses in the same process?",
    Part("automatic_uses", "marks.automatic", of(OURS), same_cores=True, imports="gpt2", rows=[
        automatic_row("torch.empty and drop, one stream", "ns", 1.01),
        automatic_row("add, one stream", "ns", 1.01),
        *(
            automatic_row(f"{name}, {where}", "ns", 150.0, "difference")
            for where in ("at home", "elsewhere")
            for name in ("add", "view")
        ),
        automatic_row("GPT-2 step, one stream", "ms", 1.01),
        automatic_row("prefetching GPT-2 step", "ms", 1.01),
    ]),
)  # fmt: skip
SANITIZER = "torch.cuda._sanitizer"


def corpus_rows(rounds: Rounds, options: Options) -> Iterator[Row]:
    """The sanitizer knows no kinds, so any report at a bug's line counts for it."""
    corpus = rounds[0]["corpus"]
    bugs, correct = [], []
    for name, (said, reported) in corpus["audit"].items():
        _, raced = corpus["sanitizer"][name]
        if said:
            found = {line for _, line in said} <= {line for _, line in raced}
            bugs.append((reported != said, not found))
        else:
            correct.append((bool(reported), bool(raced)))
    for name, programs in (("bugs missed", bugs), ("correct programs reported", correct)):
        ours, peer = (float(sum(side)) for side in zip(*programs))
        name = f"{name}, of {len(programs)}"
        yield Row(name, "programs", "", ours, peer, 0, "ours", peer_name=SANITIZER)


AUDITED = {"peer_key": "alone", "peer_name": "no audit"}
AUDITING: dict[str, Any] = {"ours": None, "timeout": 400.0}
AUDITOR = Topic(
    "What does the auditor cost, and what does it find beside torch.cuda._sanitizer?",
    Part("step", "audits.steps", [
        Case("step, ours", OURS), Case("step, native", NATIVE), Case("step, fence", OURS, {"fence": True}),
    ], [
        own("step, ours", "GPT-2 step, audited", "ms", "audited", 3.0, **AUDITED),
        own("step, native", "GPT-2 step under native, audited", "ms", "audited", 3.0, **AUDITED),
        own("step, fence", "step, fence", "ms", "audited", **AUDITED),
        own("step, fence", "peak reserved, fence", "MiB", "audited_mib", peer_key="alone_mib",
            peer_name="no audit"),
    ], imports="gpt2", **AUDITING),
    Part("corpus", "audits.programs", [Case("corpus", NATIVE)], corpus_rows, rounds=1, **AUDITING),
)  # fmt: skip
# --- sleep and wake ----------------------------------------------------------
SAVER, A_GIB = "torch_memory_saver", "a GiB of a later sleep"
SAVER_BY_DEFAULT = f"{SAVER}, by default"


def at_best(
    name: str, key: str, at_most: float, unit: str = "", best: float = 0.0, called: str = "nothing"
) -> Row:
    """A figure of ours beside the best that there is."""
    return Row(name, unit, key, OURS, best, at_most, "ours", peer_name=called)


BANDWIDTH_ROWS = [
    own(OURS, "sleep", "GiB/s", "sleep_gib_s", 0.9, "at_least", peer_key="out_gib_s",
        peer_name="plain pinned copy"),
    own(OURS, "wake", "GiB/s", "wake_gib_s", 0.9, "at_least", peer_key="back_gib_s",
        peer_name="plain pinned copy"),
    own(OURS, "sleep with keep='nothing'", "s", "nothing_sleep_s", 1.1, peer_key="unmap_s",
        peer_name="giving free memory back"),
    at_best("device memory left asleep", "left_mib", 64.0, "MiB"),
    at_best("host memory over live bytes", "host_share", 1.02, best=1.0, called="live bytes"),
    own(OURS, "wake after keep='nothing'", "s", "nothing_wake_s", peer_key="a_gib_s",
        peer_name=A_GIB),
    own(OURS, "first sleep, which pins host memory", "s", "first_sleep_s", peer_key="a_gib_s",
        peer_name=A_GIB),
    *(row for saver in (SAVER, SAVER_BY_DEFAULT) for row in beside(
        OURS, saver, ("sleep", "GiB/s", "sleep_gib_s"), ("wake", "GiB/s", "wake_gib_s"),
        ("first sleep", "s", "first_sleep_s"))),
]  # fmt: skip


SLEEP = Topic(
    "How fast does memory sleep and wake?",
    Part("bandwidth", "sleep.bandwidth",
         [*of(OURS), Case(SAVER, NATIVE, {"saver": "keeps host memory"}, needs=(SAVER,)),
          Case(SAVER_BY_DEFAULT, NATIVE, {"saver": "by default"}, needs=(SAVER,))],
         BANDWIDTH_ROWS, FRESH),
    settings={"gib": 20.0, "plain_gib": 5.0, "cycles": 6},
)  # fmt: skip

# --- PyTorch's engines -------------------------------------------------------
BARE = "esper_alloc, automatic uses, nothing kept"
REGISTERED, NATIVE_REGISTERED = "esper_alloc, registered", "native, registered"
#: Nothing here is multicast, whatever the machine offers; and a rank that hangs ends soon.
RANKS_ENVIRONMENT = {
    **DETERMINISTIC, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}  # fmt: skip
#: NCCL registers each segment of PyTorch's allocator as it comes.
REGISTER = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
AUTOMATIC = {"ESPER_ALLOC_USES": "automatic"}
FIRST_ENGINES = ("ddp", "fsdp2", "tensor_parallel")
ENGINE_NAMES = (
    *FIRST_ENGINES,
    *("ddp_bf16", "fsdp2_marked", "hsdp", "fsdp2_checkpoint", "fsdp2_offload"),
    *("fsdp2_saved", "fsdp2_saved_async", "sequence_parallel", "fsdp2_tp"),
    *("pipeline", "pipeline_interleaved", "expert_parallel", "context_parallel"),
)


def deviations(rounds: Rounds, case: str, engine: str) -> list[float]:
    """The largest relative difference of a case's losses from native's, for each round; infinite
    where one is no number."""

    def differs(x: float, y: float) -> float:
        found = abs(x - y) / max(abs(y), 1e-12)
        return found if math.isfinite(found) else math.inf  # max() passes over NaN

    key = f"{engine} losses"
    there = [one for one in rounds if all(key in one.get(side, {}) for side in (case, NATIVE))]
    both = [(one[case][key], one[NATIVE][key]) for one in there]
    return [max(differs(x, y) for x, y in zip(*one, strict=True)) for one in both]


def peak_goal(rounds: Rounds, engine: str, ranks: int) -> float:
    """Of ours over native's: 1; of the first engines on two GPUs 0.95, or 1.02 of what is live
    where native has less slack."""
    if ranks != 2 or engine not in FIRST_ENGINES:
        return 1.0
    reserved, live = f"{engine} peak_reserved_mib", f"{engine} peak_allocated_mib"
    native = [one[NATIVE] for one in rounds if reserved in one.get(NATIVE, {})]
    return max([0.95, *(1.02 * one[live] / one[reserved] for one in native)])


def before_and_after(rounds: Rounds) -> Rounds:
    """The rounds; what is compared with native's tokens is compared with the mean of its two runs:
    where the host sets the pace, they differ by as much as a fifth."""

    def beside(one: dict[str, dict[str, Any]], case: str) -> dict[str, float]:
        names = [key for key in one[case] if key.endswith(" tokens_s")]
        both = (case, AGAIN) if case == NATIVE else (case,)
        there = {
            key: [one[side][key] for side in both if key in one.get(side, {})] for key in names
        }
        return {key.replace("tokens_s", "beside"): sum(x) / len(x) for key, x in there.items()}

    return [{case: {**figures, **beside(one, case)} for case, figures in one.items()}
            for one in rounds]  # fmt: skip


def title_of_engine(engine: str, options: Options) -> str:
    ranks, activations = options.settings["ranks"], options.settings["activations"]
    of_ranks = "" if ranks == 2 else f" on {ranks} GPUs" if ranks > 1 else " on one GPU"
    return engine + of_ranks + f", {activations}" * (activations != "none")


def engine_rows(
    engine: str, variants: dict[str, str], rounds: Rounds, options: Options
) -> Iterator[Row]:
    """Beside native; automatic uses, where nothing else differs, beside ours without them."""
    again, ranks = deviations(rounds, AGAIN, engine), options.settings["ranks"]
    reserved = f"{engine} peak_reserved_mib"
    for case, of_case in variants.items():
        title = title_of_engine(engine, options) + of_case
        peer = {REGISTERED: NATIVE_REGISTERED, UNMARKED: OURS}.get(case, NATIVE)
        name = f"{title}: losses, largest relative difference from native's"
        most = max(again, default=0.0)
        deviation = deviations(rounds, case, engine)
        yield Row(name, "", "", deviation, again, most, "difference", "", AGAIN)
        yield Row(f"{title}: tokens", "tokens/s", f"{engine} tokens_s", case, peer,
                  0.99, "at_least", f"{engine} beside")  # fmt: skip
        if column(rounds, case, reserved):
            goal = {UNMARKED: 1.01, BARE: 1.0}.get(case) or peak_goal(rounds, engine, ranks)
            yield Row(f"{title}: peak reserved", "MiB", reserved, case, peer, goal)
            allocated = f"{engine} peak_allocated_mib"
            yield Row(f"{title}: peak allocated", "MiB", allocated, case, peer)
            by_rank = column(rounds, case, f"{engine} by_rank")
            yield own(case, f"{title}: held back", "s", f"{engine} held_back_s",
                      peer_key=f"{engine} held_back_least_s", peer_name="the rank held back least",
                      more={"by_rank": by_rank})  # fmt: skip


def engine_cases(*names: str, **how: Any) -> list[Case]:
    """Native first, so that losses can be compared as they come."""
    more = {
        BARE: AUTOMATIC, UNMARKED: AUTOMATIC, NATIVE_REGISTERED: REGISTER, REGISTERED: REGISTER,
    }  # fmt: skip
    return [
        Case(name, NATIVE if name.startswith(NATIVE) else OURS, {**how, "bare": name == BARE},
             {**RANKS_ENVIRONMENT, **more.get(name, {})})
        for name in names
    ]  # fmt: skip


def engine_part(engine: str, *more: str) -> Part:
    """One engine; `more` cases stand beside ours."""
    variants = {one: one.removeprefix(OURS) for one in (OURS, *more) if not one.startswith(NATIVE)}
    cases = engine_cases(NATIVE, *variants, AGAIN, *(one for one in more if one not in variants),
                         engines=(engine,), soak=0.0)  # fmt: skip
    return Part(
        engine, "engines.measure", cases, partial(engine_rows, engine, variants), FRESH, tight=True,
        timeout=300.0, gpus=2, by_default=engine in FIRST_ENGINES, derive=before_and_after,
    )  # fmt: skip


def rows_of_all(rounds: Rounds, options: Options) -> Iterator[Row]:
    variants = {OURS: ", together", UNMARKED: ", together" + UNMARKED.removeprefix(OURS)}
    for engine in options.settings["engines"]:
        yield from engine_rows(engine, variants, rounds, options)


def soak_rows(rounds: Rounds, options: Options) -> Iterator[Row]:
    for engine in options.settings["engines"]:
        title = f"{title_of_engine(engine, options)}: soak, "
        for case in (OURS, BARE):
            name = title + "losses that are not finite" + case.removeprefix(OURS)
            yield Row(name, "", f"{engine} not_finite", case, 0.0, 0.0, "ours", "", "none")
        yield Row(title + "steps of random lengths", "steps", f"{engine} steps", OURS, BARE)
        yield Row(title + "held back", "s", f"{engine} held_back_s", OURS, BARE)


ENGINES = Topic(
    """PyTorch's engines on several GPUs: are losses equal, how fast are they, in how much memory?

Under torchrun, on two GPUs or as many as ranks says: 1, 2 or 4. Native runs before and after ours.
Together, the engines of a case run one after the other in the same processes. Soak has random
lengths, for so many seconds a case. --set device=cpu tries it without a GPU.""",
    engine_part("ddp"), engine_part("fsdp2", BARE),
    engine_part("tensor_parallel", NATIVE_REGISTERED, REGISTERED),
    *(engine_part(engine, UNMARKED) for engine in ENGINE_NAMES if engine not in FIRST_ENGINES),
    Part("together", "engines.measure", engine_cases(NATIVE, OURS, UNMARKED, AGAIN, soak=0.0),
         rows_of_all, FRESH, tight=True, timeout=300.0, gpus=2, by_default=False,
         derive=before_and_after),
    Part("soak", "engines.measure", engine_cases(OURS, BARE), soak_rows, FRESH, timeout=590.0,
         gpus=2, by_default=False),
    rounds=1,
    settings={"engines": ENGINE_NAMES, "ranks": 2, "steps": 200, "shortest": 1024, "device": "cuda",
              "activations": "none", "soak": 180.0},
)  # fmt: skip

# --- helpers -----------------------------------------------------------------
PLAIN = "native, plain PyTorch"
FORMS = {"1 x 512": 3, "16 x 32": 20, "64 x 32": 25}  # times as fast as plain
GATHER = Topic(
    "How fast are gathered batches, on data in CIFAR's shapes?",
    Part("gather", "helpers.gather", of(OURS, NATIVE), workers=FRESH, rows=[
        *(
            Row(f"a batch, {form}", "us", f"ours, {form}", OURS, NATIVE, 1 / times,
                peer_key=f"plain, {form}", peer_name=PLAIN)
            for form, times in FORMS.items()
        ),
        own(OURS, "a batch, 64 x 32, reuse=2", "us", "ours, 64 x 32, reuse",
            peer_key="ours, 64 x 32", peer_name="fresh memory"),
    ]),
)  # fmt: skip
NORMALIZE = Topic(
    "What does normalising observations cost, beside the plain PyTorch way of doing it?",
    Part("normalize", "helpers.normalize", of(NATIVE), workers=FRESH, ours=NATIVE, rows=[
        own(NATIVE, f"update_and_normalize, {size}", "us", f"update_and_normalize {size}", goal,
            peer_key=f"plain {size}", peer_name="plain PyTorch")
        for size, goal in (("64x64", 1 / 8), ("65536x64", 1 / 5))
    ]),
)  # fmt: skip
CIFAR_ENVS = Topic(
    "A training loop with 16 environments on streams, end to end: plain PyTorch against ours.",
    Part("cifar_envs", "helpers.cifar_envs", [
        *of(OURS, NATIVE), Case(UNMARKED, OURS, environment={"ESPER_ALLOC_USES": "automatic"}),
    ], workers=FRESH, rows=[
        *beside(
            OURS, NATIVE, ("a step", "ms", "step_ms"), ("peak reserved", "MiB", "peak_reserved_mib"),
            title="16 environments on one GPU: ", peer_name=PLAIN,
        ),
        Row("16 environments on one GPU: a step, automatic uses", "ms", "step_ms", UNMARKED, OURS,
            1.03),
    ]),
)  # fmt: skip
SIMULATED = "simulator fp32, 1024 x 1024: "
CUDAGRAPH_OUTPUTS = Topic(
    "The simulator of examples/simulator.py: eager, compiled, and with CUDA graphs.",
    Part("simulator", "helpers.simulator", of(NATIVE), workers=FRESH, ours=NATIVE, timeout=400.0, rows=[
        own(NATIVE, SIMULATED + name, "ms", ours, peer_key=peer, peer_name=peer)
        for name, ours, peer in (
            ("graphs with the wrapper", "graphs", "eager"),
            ("graphs with the wrapper", "graphs", "compiled without graphs"),
            ("compiled without graphs", "compiled without graphs", "eager"),
        )
    ]),
    rounds=1,
)  # fmt: skip

NO_BOX, WATCHED = "esper_alloc, no black box", "esper_alloc, watched by top"
WITH_AND_WITHOUT = [
    Case(OURS, OURS), Case(NO_BOX, OURS, environment={"ESPER_ALLOC_BLACK_BOX": "off"}),
]  # fmt: skip
TEN_MILLION = "esper_alloc, ten million events"


def box_job_part(job: str, goal: float) -> Part:
    watched = Case(WATCHED, OURS, {"watched": True}, {"ESPER_ALLOC_MONITOR": "1"})
    cases = [
        replace(one, how={**one.how, "job": job}, environment={**one.environment, **DETERMINISTIC})
        for one in (*WITH_AND_WITHOUT, watched)
    ]
    rows = [
        *beside(OURS, NO_BOX, (*STEP, goal, "mean_ratio"), title=f"{job}: "),
        *beside(WATCHED, OURS, (*STEP, 1.001, "mean_ratio"), title=f"{job}, watched by top: "),
    ]
    return Part(job, "jobs.measure", cases, rows, STAYS, same_cores=True, warm_up=1, rounds=40,
                derive=passes)  # fmt: skip


BLACK_BOX = Topic(
    "What does the black box cost, and what does it take to write and to show what it has?",
    Part("calls", "calls.pairs", WITH_AND_WITHOUT, **LOOPS, rows=[
        Row(EMPTY, "ns", EMPTY, OURS, NO_BOX, 30.0, "difference"),
        *beside(OURS, NO_BOX, *((name, "ns", name) for name in (RAW + "512 B", RAW + "64 MiB"))),
    ]),
    Part("threads", "calls.threads", told(WITH_AND_WITHOUT, most=16, milliseconds=100),
        loops=True, rows=beside(OURS, NO_BOX,
        *((name, "million/s", name) for name in (f"pairs, 4 KiB, {n} threads" for n in (1, 16))),
    )),
    box_job_part("gpt2", 1.005),
    box_job_part("ppo", 1.01),
    Part("written", "calls.written", [
        *told(of(OURS, NATIVE), events=1_000_000),
        Case(TEN_MILLION, OURS, {"events": 10_000_000}, {"ESPER_ALLOC_BLACK_BOX": "256MiB"}),
    ], rounds=1, loops=True, rows=[
        *beside(OURS, NATIVE, ("a million events, written", "s", "write_s"),
                ("a million events, bytes of each", "B", "bytes_an_event")),
        own(TEN_MILLION, "ten million events, written", "s", "write_s", 2.0, "ours",
            peer_key="page_s", peer_name="reading them, and making a page"),
        own(TEN_MILLION, "ten million events, bytes of each", "B", "bytes_an_event", 16.0, "ours"),
        own(TEN_MILLION, "ten million events, read and made a page", "s", "page_s",
            peer_key="write_s", peer_name="writing them"),
    ]),
    rounds=7,
)  # fmt: skip
PLANTED = (
    "fragmentation", "leak", "cache", "pending", "activation", "two_processes", "pool", "lengths",
    "checkpointing", "fraction",
)  # fmt: skip


def explain_rows(rounds: Rounds, options: Options) -> list[Row]:
    """In the last round."""
    found = rounds[-1] if rounds else {}
    missed, failed = (
        float(sum(one[key] for one in found.values())) for key in ("missed", "failed")
    )
    jobs = {"peer": float(len(found)), "peer_name": "jobs", "judged": "ours"}
    return [
        Row("jobs of which another cause is named first", "jobs", "", missed, goal=1.0, **jobs),
        Row("jobs that do not run with the advice", "jobs", "", failed, goal=0.0, **jobs),
        *(own(job, f"{job}: peak reserved with the advice", "MiB", "peak_mib",
              peer_key="predicted_mib", peer_name="predicted by explain") for job in PLANTED),
        *(Row(f"{job}: {name}", unit, key, job, most, most, "ours", peer_name="goal")
          for job in PLANTED for name, unit, key, most in (
              ("distance of the peak from the prediction", "%", "off_percent", 1.0),
              ("time to explain it", "s", "explain_s", 10.0))),
    ]  # fmt: skip


EXPLAIN = Topic(
    "Ten jobs run out of memory. Does `explain` find the cause, and does its advice help?",
    Part("planted", "planted.explained", [Case(one, OURS, {"job": one}) for one in PLANTED],
         explain_rows, FRESH, ours=None, timeout=900.0),
    rounds=1,
)  # fmt: skip

VLLM_SLEEPS, BESIDE = "native, vLLM's sleep mode", ", engine in a process"
AWAKE, VLLM = f"{OURS}, nobody sleeps", ("vllm",)


def colocated_part(name: str, which: str, how: dict[str, Any], *more: Case) -> Part:
    """`which`: the end of the cases' names."""
    ours, peer = OURS + which, VLLM_SLEEPS + which
    title = f"{which[2:]}: " if which else ""
    figures: list[Figure] = [
        ("a step", "s", "step_s"), ("sleep and wake of both", "s", "turns_s"),
        ("the first sleep and wake of both", "s", "first_turns_s"),
    ]  # fmt: skip
    savers = {one.name: f"{title}trainer by {one.name.removeprefix(f'{VLLM_SLEEPS}, ')}: "
              for one in more if SAVER in one.needs}  # fmt: skip
    return Part(name, "colocated.step", [
        Case(ours, OURS, how, {"ESPER_ALLOC": "1"} if which else {}, needs=VLLM),
        Case(peer, NATIVE, how, needs=VLLM), *more,
    ], [
        *(row for case, of_case in savers.items()
          for row in beside(ours, case, *figures[:2], title=of_case)),
        *(Row("a step", "s", "step_s", ours, one.name, 1.35)
          for one in more if one.name not in savers),
        *beside(ours, peer, *figures, *((f"of a step, {one}", "s", one) for one in PHASES),
                title=title),
        own(ours, f"{title}sleep and wake of both, seconds", "s", "turns_s", 1.0, "ours",
            peer_key="first_turns_s", peer_name="the first step, which pins the most"),
        own(ours, f"{title}sleep and wake of both, speed", "GiB/s", "turns_gib_s", 0.9, "at_least",
            peer_key="copy_gib_s", peer_name="plain pinned copy"),
    ], FRESH, ours=ours, timeout=400.0)  # fmt: skip


BY_PROCESS: dict[str, Any] = {"flags": ("--engine-process",)}
COLOCATED = Topic(
    "A trainer and vLLM take turns on one GPU: what do sleeping and waking cost a step?",
    colocated_part("step", "", {},
                   Case(AWAKE, OURS, {"flags": ("--awake", "--share", "0.3")}, needs=VLLM)),
    # torch_memory_saver has the trainer alone: vLLM sleeps by its own mode only.
    colocated_part("process", BESIDE, BY_PROCESS, *(
        Case(f"{VLLM_SLEEPS}, {saver}", NATIVE, {**BY_PROCESS, "saver": how}, needs=(*VLLM, SAVER))
        for saver, how in ((SAVER, "keeps host memory"), (SAVER_BY_DEFAULT, "by default")))),
    Part("cycles", "colocated.cycles",
         [Case(OURS, OURS, needs=VLLM), Case(VLLM_SLEEPS, NATIVE, needs=VLLM)], [
        *beside(OURS, VLLM_SLEEPS,
                ("level 1, sleep and wake", "s", "level_1_s", 0.5),
                ("level 1, sleep", "s", "sleep_1_s"), ("level 1, wake", "s", "wake_1_s"),
                ("level 2, sleep and wake", "s", "level_2_s"),
                ("level 2, sleep", "s", "sleep_2_s"),
                ("level 2, wake the weights", "s", "wake_weights_s"),
                ("level 2, load them", "s", "load_s"),
                ("level 2, wake the cache", "s", "wake_cache_s"),
                ("level 1, device memory in use asleep", "MiB", "asleep_mib"),
                ("level 1, host memory", "MiB", "host_mib")),
        at_best("level 1, reserved asleep", "reserved_mib", 60.0, "MiB"),
        own(OURS, "level 1, host memory over live bytes", "MiB", "host_mib", 1.02,
            peer_key="live_mib", peer_name="live bytes"),
        at_best("tokens that differ after 100 cycles", "tokens_that_differ", 0.0),
        at_best("device memory grown over 90 cycles", "grown_mib", 0.0, "MiB"),
        at_best("host memory grown over 90 cycles", "host_grown_mib", 16.0, "MiB"),
    ], FRESH, timeout=400.0),
    rounds=1,  # of several steps, and starting takes a minute
)  # fmt: skip

TOPICS: dict[str, Topic] = {
    "pipeline": PIPELINE, "prefetch": PREFETCH, "overlap": OVERLAP, "least": LEAST,
    "jobs": JOBS_TOPIC, "black_box": BLACK_BOX, "pair": PAIR, "threads": THREADS, "churn": CHURN,
    "malloc_times": MALLOC_TIMES, "startup": STARTUP, "captures": CAPTURES,
    "record_use_cost": RECORD_USE_COST, "automatic_uses": AUTOMATIC_USES, "auditor": AUDITOR,
    "sleep": SLEEP, "engines": ENGINES, "gather": GATHER,
    "normalize": NORMALIZE, "cifar_envs": CIFAR_ENVS, "cudagraph_outputs": CUDAGRAPH_OUTPUTS,
    "stacks": STACKS, "explain": EXPLAIN, "colocated": COLOCATED,
}  # fmt: skip
