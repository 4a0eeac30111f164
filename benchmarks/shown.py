"""Which rows of benchmarks/results the documents show, and what they call them: see readme.py."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column of a table of the results: what ours is compared with."""

    heading: str
    peers: tuple[str, ...]  # a row has one of them, or the cell is empty


class Row(NamedTuple):
    """A measurement."""

    topic: str  # the result file
    name: str
    label: str
    peer: str = ""  # in tables without columns
    also: tuple[str, ...] = ()  # further figures, in the same cells


class Table(NamedTuple):
    page: str  # docs/results-PAGE.md
    heading: str
    about: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...] = ()  # none: each row names its peer


# fmt: off

RECORD_STREAM = "native, record_stream"
REUSE = "native, graph_capture_record_stream_reuse"
NO_BOX, VLLM_SLEEPS = "esper_alloc, no black box", "native, vLLM's sleep mode"
NATIVE = Column("`native`", ("native",))
EXPANDABLE = Column("`expandable`", ("native, expandable",))
ALLOCATED, FASTEST = ("least peak allocated of any peer",), ("fastest peer",)
ACTIVE = "peak active over base"
SLOWEST = "gpt_train: malloc, the whole job, 99.9th percentile"
LOSSES = "losses, largest relative difference from native's"
LARGE = "layers of 512 MiB"

JOBS = {
    "gpt2": "GPT-2 124M, training",
    "llama_varlen": "Llama, training, variable lengths",
    "llama_decode": "Llama, decoding",
    "resnet50": "ResNet-50, training",
    "ppo": "PPO, small networks",
    "moe": "mixture of experts, training",
    "resolutions": "U-Net, training, random sizes",
    "serving": "serving, continuous batching",
    "packed": "Llama, training, packed",
}


def timed(topic: str, title: str, first: str, second: str, label: str) -> Row:
    return Row(topic, title + first, label, also=(title + second,))


#: The tables of the results, page by page in this order.
TABLES = (
    Table("jobs", "Memory of whole jobs", """\
Peak reserved. The goal: at most 1.04 times the least that any peer had *allocated* at its
peak, or 256 MiB more than that.""",
        tuple(Row("jobs", f"{job}: peak reserved", label) for job, label in JOBS.items()),
        (NATIVE, EXPANDABLE, Column("least allocated", ALLOCATED))),
    Table("jobs", "Time of whole jobs", """\
The step time once memory has stopped growing, with the mean of the rounds' ratios and its 95%
interval. The goal: at most 1, and 1.02 at the interval's upper end. Then the mean step time of
the whole job.""",
        tuple(timed("jobs", f"{job}: ", "step time", "step time over the whole job", label)
              for job, label in JOBS.items()),
        (Column("fastest peer", FASTEST),)),
    Table("jobs", "Little memory", """\
The pipeline of 48 layers within 1.05 of the memory that it takes with tensors kept by hand, by a
memory fraction.""",
        tuple(Row("least", name, label, peer)
              for name, label in (("runs that fail", "runs that fail"), ("step time", "a step"))
              for peer in ("native, recipe", RECORD_STREAM))),
    Table("streams", "Several streams", """\
Marks beside `record_stream`, and beside tensors that the program keeps by hand: peak memory (of
overlap what is reserved), and the time of a step or batch.""", (
        timed("pipeline", "", ACTIVE, "step time", "FSDP-like pipeline of 48 layers"),
        timed("pipeline", f"{LARGE}: ", ACTIVE, "step time", "8 layers of 512 MiB"),
        timed("pipeline", "views, grad mode: ", ACTIVE, "step time",
              "48 layers in grad mode, weights that are views"),
        timed("overlap", "small: ", "peak reserved", "step time",
              "copies and computation, three streams, 4 to 64 MiB"),
        timed("overlap", "large: ", "peak reserved", "step time", "the same, 256 MiB to 1 GiB"),
        timed("overlap", "four-large: ", "peak reserved", "step time", "the same on four streams"),
        timed("prefetch", "compute-bound: ", ACTIVE, "time a batch", "prefetching batches")),
        (Column("`record_stream`", (RECORD_STREAM,)),
         Column("by hand", ("native, recipe", "native, by hand")))),
    Table("streams", "Calls", "On the host, from C++ unless the row says otherwise.", (
        Row("pair", "raw_alloc + raw_delete, 512 B", "malloc and free: 512 B; 64 MiB",
            also=("raw_alloc + raw_delete, 64 MiB",)),
        Row("churn", "free and malloc among 10,000 live blocks up to 8 MiB",
            "among 10,000 live blocks; a million",
            also=("free and malloc among 1,000,000 live blocks up to 64 KiB",)),
        Row("threads", "pairs, 4 KiB, 16 threads",
            "16 threads, pairs a second (more is better); freed by the next thread",
            also=("pairs, handed on, 4 KiB, 16 threads",)),
        Row("pair", "torch.empty and drop, 4 KiB", "`torch.empty` and drop, from Python"),
        Row("malloc_times", SLOWEST, "mallocs of a recorded GPT-2, 99.9th percentile"),
        Row("malloc_times", "gpt_train: malloc, the whole job, all together", "all of them"),
        Row("startup", "first allocation", "a process's first allocation"),
        Row("startup", "first allocation to the end of the first kernel",
            "from there to the end of the first kernel")),
        (NATIVE, EXPANDABLE)),
    Table("streams", "Marks, automatic uses, the auditor", "From Python, unless the row says C.", (
        Row("captures", "a graph's private pool", "a captured graph's pool", RECORD_STREAM),
        Row("captures", "a graph's private pool", "a captured graph's pool", REUSE),
        Row("record_use_cost", "record_use, call", "a mark", RECORD_STREAM),
        Row("record_use_cost", "record_use, cycle", "allocate, mark, drop", RECORD_STREAM),
        Row("record_use_cost", "using, cycle", "allocate, `using`, drop", RECORD_STREAM),
        Row("record_use_cost", "C, esper_alloc_record_use", "a mark in C", "cuEventRecord"),
        Row("automatic_uses", "add, at home", "automatic uses, several streams: `torch.add`; a view",
            "marked uses", ("view, at home",)),
        Row("automatic_uses", "torch.empty and drop, one stream",
            "automatic uses: allocate and drop, one stream", "marked uses"),
        Row("automatic_uses", "prefetching GPT-2 step", "automatic uses: a prefetching GPT-2 step",
            "marked uses"),
        Row("cifar_envs", "16 environments on one GPU: a step, automatic uses",
            "automatic uses: a step of 16 networks", "esper_alloc"),
        Row("auditor", "bugs missed, of 30",
            "auditor: bugs missed, of 30; correct programs reported, of 36",
            "torch.cuda._sanitizer", ("correct programs reported, of 36",)),
        Row("auditor", "GPT-2 step, audited", "a step of GPT-2, audited", "no audit"),
        Row("auditor", "step, fence", "with a fence; reserved", "no audit", ("peak reserved, fence",)))),
    Table("streams", "The black box", "Beside esper_alloc without it, unless the row says otherwise.", (
        Row("black_box", "raw_alloc + raw_delete, 512 B", "malloc and free in C++", NO_BOX),
        Row("black_box", "torch.empty and drop, 4 KiB", "`torch.empty` and drop", NO_BOX),
        Row("black_box", "gpt2: step time", "a step of GPT-2; of PPO", NO_BOX, ("ppo: step time",)),
        Row("black_box", "a million events, written", "a million events, written; bytes of each",
            "native", ("a million events, bytes of each",)),
        Row("explain", "jobs of which another cause is named first",
            "planted jobs that run out of memory: explained wrongly; failing with the advice",
            "jobs", ("jobs that do not run with the advice",)))),
    Table("helpers", "Sleep and wake",
        "20 GiB sleep, unless the row says otherwise. Of GiB/s more is better. With vLLM's own sleep "
        "mode the trainer is moved by `.to()`.", (
        Row("sleep", "sleep", "sleep; wake", "plain pinned copy", ("wake",)),
        Row("sleep", "sleep", "sleep; wake", "torch_memory_saver", ("wake",)),
        Row("sleep", "sleep", "sleep; wake", "torch_memory_saver, by default", ("wake",)),
        Row("sleep", "sleep with keep='nothing'", "sleep, keep nothing", "giving free memory back"),
        Row("sleep", "first sleep, which pins host memory",
            "the first sleep, which pins host memory", "a GiB of a later sleep"),
        Row("sleep", "device memory left asleep", "device memory left", "nothing"),
        Row("colocated", "a step", "a trainer of 3 B and vLLM take turns: a step",
            "esper_alloc, nobody sleeps"),
        Row("colocated", "a step", "the same; sleeping and waking of both in it", VLLM_SLEEPS,
            ("sleep and wake of both",)),
        Row("colocated", "engine in a process: sleep and wake of both, seconds",
            "sleeping and waking of both, vLLM in a process of its own",
            "the first step, which pins the most"),
        Row("colocated", "level 1, sleep", "vLLM of 1.5 B sleeps; wakes", VLLM_SLEEPS,
            ("level 1, wake",)))),
    Table("jobs", "Two GPUs", "Trainings of 200 steps: tokens (more is better), and peak reserved.", (
        *(Row("engines", f"{engine}: tokens", label, peer, (f"{engine}: peak reserved",))
          for engine, peer, label in (
              ("ddp", "native", "DDP, a Llama of 1.2 B parameters"),
              ("fsdp2", "native", "FSDP2, the same"),
              ("fsdp2, automatic uses, nothing kept", "native", "with automatic uses"),
              ("tensor_parallel", "native", "tensor parallelism, 1.1 B"),
              ("tensor_parallel, registered", "native, registered", "registered with NCCL"))),
        Row("engines", f"ddp: {LOSSES}", "losses, largest difference: DDP; FSDP2; tensor parallelism",
            "native, run again", (f"fsdp2: {LOSSES}", f"tensor_parallel: {LOSSES}")))),
    Table("jobs", "From one GPU to four", """\
Engines one after the other in the same processes, on one GPU; two; four: the rank that
reserves most, and the rank that is held back longest beside the one held back least.""",
        tuple(Row("engines", f"{engine} on one GPU, together: {name}", f"{label}: {figure}", peer,
                  tuple(f"{engine}{on}, together: {name}" for on in ("", " on 4 GPUs")))
              for engine, label in (("ddp", "DDP"), ("fsdp2", "FSDP2"), ("hsdp", "HSDP"),
                                    ("fsdp2_tp", "FSDP2 with tensor parallelism"),
                                    ("pipeline", "pipeline"), ("expert_parallel", "experts"))
              for figure, name, peer in (
                  ("reserved", "peak reserved", "native"),
                  ("held back", "held back", "the rank held back least")))),
    Table("helpers", "Helpers", "Those of gather and cifar_envs run on esper_alloc.", (
        Row("gather", "a batch, 1 x 512",
            "CIFAR batches: 512 for one environment; 32 for each of 16; of 64",
            "native, plain PyTorch", ("a batch, 16 x 32", "a batch, 64 x 32")),
        Row("gather", "a batch, 64 x 32, reuse=2", "the last with `reuse=2`", "fresh memory"),
        Row("normalize", "update_and_normalize, 64x64",
            "`update_and_normalize`: 64 x 64; 65,536 x 64", "plain PyTorch",
            ("update_and_normalize, 65536x64",)),
        Row("cifar_envs", "16 environments on one GPU: a step",
            "16 networks on CIFAR: a step; reserved", "native, plain PyTorch",
            ("16 environments on one GPU: peak reserved",)),
        *(Row("cudagraph_outputs", "simulator fp32, 1024 x 1024: graphs with the wrapper",
              "a simulator, CUDA graphs with `cudagraph_outputs`", peer)
          for peer in ("eager", "compiled without graphs")))),
)

#: The README's rows: topic, name, peer, what was measured, and what it is compared with.
FEW: list[tuple[str, str, str, str, str]] = [
    ("pipeline", ACTIVE, RECORD_STREAM, "weights gathered on one stream, used on another: peak",
     "`record_stream`"),
    ("pipeline", ACTIVE, "native, recipe", "the same", "tensors kept by hand"),
    ("stacks", "pyg_prefetch, automatic uses: peak reserved", "native",
     "PyTorch Geometric's `PrefetchLoader`, automatic uses (can fail without): reserved",
     "native"),
    ("stacks", "hf_offloaded_cache: peak reserved", "native, expandable",
     "transformers' offloaded cache: reserved", "expandable segments"),
    ("stacks", "diffusers_group_offload: peak reserved", "native, expandable",
     "diffusers' group offloading: reserved", "expandable segments"),
    ("engines", "fsdp2: peak reserved", "native",
     "FSDP2, a Llama of 1.2 B, two GPUs: reserved", "native"),
    ("jobs", "gpt2: step time", "native", "GPT-2 124M, black box off: step", "native"),
    ("malloc_times", SLOWEST, "native", "the same: 99.9th percentile of malloc while memory grows",
     "native"),
]
