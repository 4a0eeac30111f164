"""Which rows of benchmarks/results the documents show, and what they call them: see readme.py."""

from __future__ import annotations

Names = str | tuple[str, ...]

#: Topic, name of the row, peer, and what docs/results.md calls it. Of rows with several names,
#: for what was measured in more than one way, the newest is shown.
ALL: list[tuple[str, Names, str, str]] = [
    *(  # on segments of its own choice, which are mapped where the driver can, or those asked for
        (
            "jobs",
            (f"{job}: {figure}", f"{job}, mapped segments: {figure}"),
            peer,
            f"{label}, {figure}",
        )
        for job, label in (
            ("gpt2", "GPT-2 124M training"),
            ("llama_varlen", "Llama training on sequences of 64 to 2,048 tokens"),
            ("llama_decode", "Llama decoding with a growing cache"),
            ("resnet50", "ResNet-50 training (`cudnn.benchmark` off)"),
            ("ppo", "PPO with small networks"),
            ("moe", "a mixture of experts, training, sizes that never repeat"),
            ("resolutions", "U-Net training on images of random sizes"),
            ("serving", "serving with continuous batching"),
            ("packed", "Llama training on packed sequences"),
        )
        for figure, peer in (
            ("peak reserved", "least peak allocated of any peer"),
            ("step time", "fastest peer"),
            ("step time over the whole job", "fastest peer"),
            ("time inside the allocator", "native"),
        )
    ),
    *(
        (
            "limits",
            f"{job}: largest batch within 20 GiB",
            "best peer",
            f"{label}, largest batch in 20 GiB",
        )
        for job, label in (
            ("gpt2", "GPT-2 124M training on 256 tokens"),
            ("llama_varlen", "Llama training on 64 to 512 tokens"),
        )
    ),
    (
        "malloc_times",
        "gpt_train: malloc, the whole job, 99.9th percentile",
        "native",
        "99.9th percentile of malloc time, allocations of a recorded GPT-2 training",
    ),
    (
        "startup",
        "import torch and esper_alloc",
        "import torch",
        "importing torch, and esper_alloc after it",
    ),
    ("startup", "idle device memory", "native", "idle, device memory in use"),
    (
        "startup",
        "first allocation to the end of the first kernel",
        "native",
        "first allocation to the end of the first kernel",
    ),
    ("pair", "raw_alloc + raw_delete, 512 B", "native", "`raw_alloc` + `raw_delete`, 512 B"),
    ("pair", "raw_alloc + raw_delete, 1 MiB", "native", "`raw_alloc` + `raw_delete`, 1 MiB"),
    ("pair", "raw_alloc + raw_delete, 64 MiB", "native", "`raw_alloc` + `raw_delete`, 64 MiB"),
    *(
        (
            "churn",
            f"free and malloc among {live} live blocks up to {most}",
            "native",
            f"the same among {live} live blocks",
        )
        for live, most in (("10,000", "8 MiB"), ("1,000,000", "64 KiB"))
    ),
    *(
        ("threads", f"{what}, 4 KiB, 16 threads", "native", label)
        for what, label in (
            ("pairs", "16 threads, a stream each, pairs a second"),
            ("pairs, handed on", "the same, freed by the next thread"),
        )
    ),
    (
        "precision",
        "dropped memory serves again after, 50 ms of work queued",
        "native, record_stream",
        "a dropped tensor's memory serves again after, with 50 ms of other work queued on its reader",
    ),
    (
        "pipeline",
        "peak active over base",
        "native, record_stream",
        "FSDP-like pipeline of 48 layers, peak memory of the gathered weights and x",
    ),
    ("pipeline", "peak active over base", "native, recipe", "the same"),
    ("pipeline", "step time", "native, record_stream", "the same, step time"),
    ("pipeline", "step time", "native, recipe", "the same"),
    (
        "pipeline",
        "layers of 512 MiB: peak active over base",
        "native, recipe",
        "the same with 8 layers of 512 MiB, peak memory",
    ),
    *(
        ("pipeline", f"views, grad mode: {figure}", "native, recipe", label)
        for figure, label in (
            (
                "peak active over base",
                "the pipeline of 48 layers in grad mode, weights that are views, peak memory",
            ),
            ("reserved over base", "the same, reserved"),
            ("step time", "the same, step time"),
        )
    ),
    *(
        (
            "least",
            f"{name}, within 1.05 of what an allowance of 0 reserves: failed",
            "native, record_stream",
            f"{label} within 1.05 of the memory that an allowance of 0 takes, runs that fail",
        )
        for name, label in (
            ("fsdp", "the pipeline of 48 layers"),
            ("three", "a pipeline over three streams"),
        )
    ),
    *(
        ("overlap", f"{pipeline}: {figure}", "native, record_stream", f"{label}, {figure}")
        for pipeline, label in (
            ("small", "copies and computation on three streams, tensors of 4 to 64 MiB"),
            ("four", "the same on four streams"),
            ("large", "the same on three, tensors of 256 MiB to 1 GiB"),
            ("four-large", "the same on four"),
        )
        for figure in ("step time", "peak reserved")
    ),
    ("sleep", "sleep", "plain pinned copy", "20 GiB go to sleep (more is better)"),
    ("sleep", "wake", "plain pinned copy", "they wake (more is better)"),
    ("sleep", "sleep", "torch_memory_saver", "they go to sleep (more is better)"),
    ("sleep", "wake", "torch_memory_saver", "they wake (more is better)"),
    (
        "sleep",
        "sleep with keep='nothing'",
        "giving free memory back",
        "they go to sleep, and nothing is kept",
    ),
    ("sleep", "device memory left asleep", "nothing", "device memory that they leave"),
    (
        "sleep",
        "host memory over live bytes",
        "live bytes",
        "host memory that they take, over their size",
    ),
    (
        "sleep",
        "graph replays that differ, of 100 after a sleep",
        "nothing",
        "replays of CUDA graphs that differ after a sleep, of 100",
    ),
    (
        "sleep",
        "GPT-2 asleep after each step: losses that differ, of 12",
        "GPT-2 awake",
        "GPT-2 asleep after each of 12 steps, losses that differ",
    ),
    (
        "sleep",
        "two processes, 8 GiB each, turns without memory, of 50",
        "nothing",
        "two processes on memory for one, turns without memory, of 50",
    ),
    (
        "prefetch",
        "compute-bound: peak active over base",
        "native, record_stream",
        "prefetching on a copy stream, peak memory of the batches and the work on them",
    ),
    ("prefetch", "compute-bound: peak active over base", "native, by hand", "the same"),
    (
        "prefetch",
        "compute-bound: time a batch",
        "native, record_stream",
        "the same, time a batch",
    ),
    *(
        ("recipes", f"{job}: {figure}", peer, f"{label}{what}")
        for job, label, peer in (
            (
                "reduce-scatter",
                "24 gradients of 64 MiB reduced on a second stream",
                "native, record_stream",
            ),
            ("reduce-scatter", "the same", "native, by hand"),
            (
                "offloading",
                "a training step whose saved tensors wait on the host",
                "native, record_stream",
            ),
        )
        for figure, what in (
            ("peak active over base", ", peak memory"),
            ("step time", ", step time"),
        )
    ),
    (
        "record_use_cost",
        "record_use, cycle",
        "native, record_stream",
        "allocate, mark for another stream, drop (Python)",
    ),
    ("record_use_cost", "record_use, call", "native, record_stream", "a mark (Python)"),
    (
        "record_use_cost",
        "using, cycle",
        "native, record_stream",
        "allocate, `using` on another stream, drop (Python)",
    ),
    ("record_use_cost", "C, esper_alloc_record_use", "cuEventRecord", "a mark in C"),
    *(
        ("automatic_uses", name, "marked uses", f"with automatic uses, {label}")
        for name, label in (
            ("torch.empty and drop, one stream", "allocate and drop, one stream"),
            ("add, at home", "`torch.add` on several streams"),
            ("view, at home", "a view on several streams"),
            ("prefetching GPT-2 step", "a step of GPT-2 that prefetches its batches"),
        )
    ),
    *(
        ("auditor", name, "torch.cuda._sanitizer", f"the auditor's corpus: {name}")
        for name in ("bugs missed, of 30", "correct programs reported, of 36")
    ),
    ("auditor", "GPT-2 step, audited", "no audit", "a step of GPT-2, audited"),
    ("auditor", "GPT-2 step, audited with poison", "no audit", "the same with poison"),
    ("fence", "step, fence", "no audit", "the same with a fence"),
    ("fence", "peak reserved, fence", "no audit", "the same, peak reserved"),
    (
        "captures",
        "a graph's private pool",
        "native, record_stream",
        "a captured graph with readers on a side stream, its private pool",
    ),
    (
        "captures",
        "a graph's private pool",
        "native, graph_capture_record_stream_reuse",
        "the same",
    ),
    *(
        (
            "gather",
            f"a batch, {form}",
            "native, plain PyTorch",
            f"CIFAR batches of {label}, gathered",
        )
        for form, label in (
            ("1 x 512", "512 images for one environment"),
            ("4 x 128", "128 for each of 4"),
            ("16 x 32", "32 for each of 16"),
            ("64 x 32", "32 for each of 64"),
        )
    ),
    *(
        (
            "normalize",
            f"update_and_normalize, {shape}",
            "plain PyTorch",
            f"running mean-std, {label}",
        )
        for shape, label in (
            ("64x64", "batches of 64 x 64"),
            ("1024x128", "of 1024 x 128"),
            ("65536x64", "of 65536 x 64"),
        )
    ),
    *(
        (
            "cifar_envs",
            f"16 environments on {on}",
            "native, plain PyTorch",
            f"16 networks on CIFAR, {label}",
        )
        for on, label in (
            ("one GPU: a step", "a stream each, a step"),
            ("one GPU: peak reserved", "peak reserved"),
            ("two GPUs, 10 and 6 environments: a step", "10 and 6 of them on two GPUs, a step"),
        )
    ),
    (
        "cudagraph_outputs",
        "simulator fp32, 1024 x 1024: graphs with the wrapper",
        "eager",
        "a simulator of 1024 x 1024, CUDA graphs with `cudagraph_outputs`",
    ),
    *(
        ("engines", f"{engine}: {figure}", peer, f"{label}{what}")
        for engine, peer, label in (
            ("ddp", "native", "DDP training of a Llama with 1.2 B parameters on two GPUs"),
            ("fsdp2", "native", "FSDP2 training of the same"),
            (
                "fsdp2, automatic uses, nothing kept",
                "native",
                "the same with automatic uses, and nothing kept for other streams",
            ),
            ("tensor_parallel", "native", "tensor parallelism, perceptrons with 1.1 B parameters"),
            (
                "tensor_parallel, registered",
                "native, registered",
                "the same, all memory registered with NCCL",
            ),
        )
        for figure, what in (
            ("tokens", " (more is better)"),
            ("peak reserved", ", peak reserved"),
        )
    ),
    *(
        (
            "engines",
            f"{engine}: losses, largest relative difference from native's",
            "native, run again",
            f"losses of 200 steps, largest relative difference from native's, {label}",
        )
        for engine, label in (
            ("ddp", "DDP"),
            ("fsdp2", "FSDP2"),
            ("tensor_parallel", "tensor parallelism"),
        )
    ),
]

#: The README's rows: topic, name, peer, what was measured, and what it is compared with.
FEW: list[tuple[str, Names, str, str, str]] = [
    (
        "pipeline",
        "peak active over base",
        "native, record_stream",
        "weights gathered on one stream, used on another: their peak memory",
        "PyTorch's default, `record_stream`",
    ),
    (
        "pipeline",
        "peak active over base",
        "native, recipe",
        "the same",
        "PyTorch's default, tensors kept by hand",
    ),
    (
        "prefetch",
        "compute-bound: peak active over base",
        "native, record_stream",
        "prefetching batches on a copy stream: peak memory",
        "PyTorch's default, `record_stream`",
    ),
    (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "native, expandable",
        "Llama training, sequences of 64 to 2,048 tokens: peak reserved",
        "PyTorch's expandable segments",
    ),
    (
        "jobs",
        ("gpt2: step time", "gpt2, mapped segments: step time"),
        "native, expandable",
        "GPT-2 124M training: time of a step",
        "PyTorch's expandable segments",
    ),
    (
        "engines",
        "fsdp2: peak reserved",
        "native",
        "FSDP2 training of a Llama with 1.2 B parameters on two GPUs: peak reserved",
        "PyTorch's default",
    ),
    (
        "gather",
        "a batch, 16 x 32",
        "native, plain PyTorch",
        "a helper, here on esper_alloc: gathering CIFAR batches for 16 networks",
        "plain PyTorch",
    ),
    (
        "malloc_times",
        "gpt_train: malloc, the whole job, 99.9th percentile",
        "native",
        "99.9th percentile of malloc time while GPT-2's memory grows",
        "PyTorch's default",
    ),
]

#: The README's sentences, each with a link to its file. `{x.ours}` and `{x.peer}` are figures of SAID["x"].
BULLETS = """\
- **[Memory comes back at the last read.](benchmarks/results/precision.json)** A tensor's memory can be
  reused after {dropped.ours}, although 50 ms of other work is queued behind its last read; with
  PyTorch's allocator and `record_stream` after {dropped.peer}.
- **[Memory stays level at the same speed.](benchmarks/results/pipeline.json)** A pipeline gathers weights on one
  stream and uses them on another, with the host far ahead. A step takes {step.ours} and {peak.ours};
  with PyTorch's allocator and `record_stream` {step.peer} and {peak.peer}; with tensors kept alive by hand
  {kept_step.peer} and {kept.peer}. Keeping them by hand takes less: up to 128 MiB may
  wait for the readers before esper_alloc holds the host back.
- **[CUDA graphs benefit, too.](benchmarks/results/captures.json)** A captured graph with readers on a side
  stream keeps {graph.ours} for itself; with PyTorch's allocator and `record_stream` {graph.peer}, or
  {graph_reuse.peer} with its option `graph_capture_record_stream_reuse`.
- **[Little is wasted.](benchmarks/results/jobs.json)** Training a Llama on sequences of random lengths
  reserves {llama.ours} for {live.peer} of tensors; PyTorch's default reserves {llama.peer}, its expandable segments {llama_expandable.peer}.
- **[Jobs on one stream gain little.](benchmarks/results/jobs.json)** GPT-2 124M takes {gpt2.ours} and
  {gpt2_step.ours} a step; with PyTorch's expandable segments {gpt2.peer} and {gpt2_step.peer}."""
SAID: dict[str, tuple[str, Names, str]] = {
    "dropped": (
        "precision",
        "dropped memory serves again after, 50 ms of work queued",
        "native, record_stream",
    ),
    "step": ("pipeline", "step time", "native, record_stream"),
    "peak": ("pipeline", "peak active over base", "native, record_stream"),
    "kept_step": ("pipeline", "step time", "native, recipe"),
    "kept": ("pipeline", "peak active over base", "native, recipe"),
    "graph_reuse": (
        "captures",
        "a graph's private pool",
        "native, graph_capture_record_stream_reuse",
    ),
    "llama_expandable": (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "native, expandable",
    ),
    "graph": ("captures", "a graph's private pool", "native, record_stream"),
    "llama": (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "native",
    ),
    "live": (
        "jobs",
        ("llama_varlen: peak reserved", "llama_varlen, mapped segments: peak reserved"),
        "least peak allocated of any peer",
    ),
    "gpt2": (
        "jobs",
        ("gpt2: peak reserved", "gpt2, mapped segments: peak reserved"),
        "native, expandable",
    ),
    "gpt2_step": (
        "jobs",
        ("gpt2: step time", "gpt2, mapped segments: step time"),
        "native, expandable",
    ),
}
