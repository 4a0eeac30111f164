"""torch.cuda.memory._record_memory_history()."""

import threading
from typing import Any

import torch
from ground import MiB, busy, bytes_of, error_of, let_pass, scenario, type_of_error

record = torch.cuda.memory._record_memory_history


def entries(device: int = 0) -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][device]


def actions(device: int = 0) -> list[list[Any]]:
    return [[entry["action"], entry["size"]] for entry in entries(device)]


def stop() -> None:
    record(enabled=None)


def a_function_that_allocates(size: int) -> torch.Tensor:
    return bytes_of(size)


def program() -> None:
    x = a_function_that_allocates(12 * MiB - 7)
    y = a_function_that_allocates(1000)
    del x
    z = a_function_that_allocates(12 * MiB)
    del y, z


def mine(frames: list[dict[str, Any]] | None) -> list[str]:
    """The Python functions of this file, innermost first."""
    return [frame["name"] for frame in frames or () if frame["filename"] == __file__]


@scenario()
def what_happens_in_order() -> Any:
    record()
    program()
    torch.cuda.empty_cache()
    answer = actions()
    stop()
    return [answer, actions()]


@scenario()
def keys_of_entries() -> Any:
    record()
    program()
    taken = entries()
    answer = sorted({(entry["action"], *sorted(entry)) for entry in taken})
    order = [entry["time_us"] for entry in taken]
    return [answer, order == sorted(order), all(t > 1.5e15 for t in order)]


@scenario()
def addresses_and_streams() -> Any:
    record()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = bytes_of(12 * MiB)
    address = x.data_ptr()
    del x
    return [[e["action"], e["addr"] == address, e["stream"] == side.cuda_stream] for e in entries()]


@scenario()
def frames_of_each_action() -> Any:
    record()
    program()
    return [[e["action"], mine(e.get("frames"))[:2]] for e in entries()]


@scenario()
def which_entries_have_frames() -> Any:
    """For each context: entries, live blocks, segments."""
    answer = {}
    for context in (None, "state", "alloc", "all"):
        torch.cuda.empty_cache()
        record(context=context)
        x = a_function_that_allocates(12 * MiB)
        y = a_function_that_allocates(1000)
        del x
        picture = torch.cuda.memory._snapshot()
        answer[str(context)] = [
            [[e["action"], bool(e.get("frames"))] for e in picture["device_traces"][0]],
            sorted(
                [s["total_size"], len(s["blocks"]) > 1 or bool(s.get("frames")),
                 [[b["state"], mine(b.get("frames"))[:1]] for b in s["blocks"] if b["state"] != "inactive"]]
                for s in picture["segments"]
            ),
        ]  # fmt: skip
        stop()
        del y
    return answer


@scenario()
def kinds_of_stacks() -> Any:
    answer = []
    for stacks in ("python", "all"):
        record(stacks=stacks)
        x = a_function_that_allocates(5000)
        frames = [e for e in entries() if e["action"] == "alloc"][-1]["frames"]
        answer.append([stacks, mine(frames)[:1], any("::" in frame["name"] for frame in frames)])
        stop()
        del x
    return answer


@scenario()
def only_the_state() -> Any:
    record(enabled="state")
    _x = a_function_that_allocates(1000)
    picture = torch.cuda.memory._snapshot()
    live = [b for s in picture["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    return [len(picture["device_traces"][0]) <= 1, mine(live[-1]["frames"])[:1]]


@scenario()
def frames_of_live_memory_outlive_the_recording() -> Any:
    record()
    x = a_function_that_allocates(12 * MiB)
    stop()

    def seen() -> list[Any]:
        segments = torch.cuda.memory._snapshot()["segments"]
        return [[mine(b.get("frames"))[:1] for b in s["blocks"]] for s in segments]

    answer = [seen(), bool(torch._C._cuda_isHistoryEnabled())]
    del x
    _y = bytes_of(12 * MiB)
    answer.append(seen())
    return answer


@scenario()
def a_ring_of_a_few_entries() -> Any:
    record(max_entries=3, context=None)
    for size in (100, 200, 300, 400):
        bytes_of(size)
    return actions()


@scenario()
def starting_again_keeps_or_clears() -> Any:
    record(context=None)
    bytes_of(100)
    record(context=None)
    bytes_of(200)
    answer = [actions()]
    record(context=None, clear_history=True)
    bytes_of(300)
    answer.append([a for a in actions() if a[0] != "snapshot"])
    return answer


@scenario()
def actions_that_are_left_out() -> Any:
    record(context=None, skip_actions=["free_requested", "segment_alloc", "snapshot"])
    program()
    answer = actions()
    stop()
    return [answer, type_of_error(lambda: record(skip_actions=["nonsense"]))]


@scenario()
def wrong_arguments() -> Any:
    return [
        type_of_error(lambda: record(enabled="nonsense")),
        type_of_error(lambda: record(context="nonsense")),
        type_of_error(lambda: record(stacks="nonsense")),
    ]


@scenario()
def the_legacy_signature() -> Any:
    record(True, trace_alloc_max_entries=10, trace_alloc_record_context=True)
    x = a_function_that_allocates(1000)
    alloc = [e for e in entries() if e["action"] == "alloc"]
    answer = [
        len(alloc),
        mine(alloc[-1].get("frames"))[:1],
        bool(torch._C._cuda_isHistoryEnabled()),
    ]
    record(False)
    del x
    return [*answer, bool(torch._C._cuda_isHistoryEnabled())]


def annotations_of_pytorch() -> list[dict[str, Any]]:
    found = torch.cuda.memory._snapshot()["external_annotations"]
    return [one for one in found if not one["name"].startswith("esper_alloc.")]


@scenario()
def annotations() -> Any:
    record(global_record_annotations=True)
    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
        bytes_of(100)
    answer = [[a["stage"], a["name"], a["device"], sorted(a)] for a in annotations_of_pytorch()]
    stop()
    left = annotations_of_pytorch()
    return [[a for a in answer if a[1] in ("outer", "inner")], len(left)]


@scenario()
def user_metadata() -> Any:
    get, put = torch.cuda.memory._get_memory_metadata, torch.cuda.memory._set_memory_metadata
    answer: list[Any] = [get()]
    put("before")
    answer.append(get())
    record(context=None)
    bytes_of(100)
    put("during")
    bytes_of(200)
    others: list[str] = []
    thread = threading.Thread(target=lambda: (others.append(get()), bytes_of(300)))
    thread.start()
    thread.join()
    put("")
    bytes_of(400)
    answer += [
        get(),
        others,
        [[e["size"], e["user_metadata"]] for e in entries() if e["action"] == "alloc"],
    ]
    return answer


def a_function_that_annotates(x: torch.Tensor, text: str) -> None:
    torch.cuda.memory._annotate_tensor(x, text)


@scenario()
def annotated_tensors() -> Any:
    """From the first version on that has them."""
    if not hasattr(torch.cuda.memory, "_annotate_tensor"):
        return None
    pool, side = torch.cuda.MemPool(), torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool):
        x = bytes_of(12 * MiB - 7)
    with torch.cuda.stream(side):
        y = bytes_of(1000)
    torch.cuda.memory._set_memory_metadata("the thread's")
    answer: list[Any] = []
    for context, skipped in (("all", []), ("state", []), (None, []), ("all", ["annotate"])):
        record(context=context, skip_actions=skipped)
        a_function_that_annotates(x, "first")
        a_function_that_annotates(x[100:], "a view")
        a_function_that_annotates(y, "another stream's")
        answer.append([
            [
                e["action"], e["size"], e["user_metadata"], e["addr"] == x.data_ptr(),
                e["pool_id"] == pool.id, e["stream"] == side.cuda_stream, mine(e.get("frames"))[:1], sorted(e),
            ]
            for e in entries()
        ])  # fmt: skip
        stop()
    answer.append(torch.cuda.memory._get_memory_metadata())
    torch.cuda.memory._set_memory_metadata("")
    a_function_that_annotates(x, "nothing is recorded")
    return [*answer, entries()]


@scenario()
def only_live_memory_can_be_annotated() -> Any:
    """By its first address, and whether or not anything is recorded."""
    annotate = getattr(torch._C, "_cuda_annotateMemory", None)
    if annotate is None:
        return None
    x, dead = bytes_of(12 * MiB), bytes_of(1000).data_ptr()
    with torch.cuda.memory.caching_allocator_disabled():
        uncached = bytes_of(1000)
    answer = []
    for start in (stop, record):
        start()
        answer.append([
            error_of(lambda: annotate(x.data_ptr(), "live")),
            error_of(lambda: annotate(0, "null")),
            error_of(lambda: torch.cuda.memory._annotate_tensor(torch.empty(0, device="cuda"), "empty")),
            error_of(lambda: annotate(x.data_ptr() + 512, "inside")),
            error_of(lambda: annotate(dead, "dead")),
            error_of(lambda: annotate(4096, "foreign")),
            error_of(lambda: annotate(uncached.data_ptr(), "uncached")),
            error_of(lambda: torch.cuda.memory._annotate_tensor(torch.zeros(3), "of the CPU")),
        ])  # fmt: skip
    answer.append(actions())
    return answer


@scenario()
def where_memory_was_allocated() -> Any:
    find = getattr(torch.cuda.memory, "_allocation_traceback", None)
    if find is None:
        return None
    before = a_function_that_allocates(1000)
    record()
    x = a_function_that_allocates(12 * MiB)
    record(context=None)
    after = a_function_that_allocates(2000)
    pointers = (before.data_ptr(), x.data_ptr(), after.data_ptr(), x.data_ptr() + 512, 0, 4096)
    answer: list[Any] = [[mine(find(p))[:1] for p in pointers]]
    stop()
    answer.append([mine(find(p))[:1] for p in pointers])
    pointer = x.data_ptr()
    del x
    return [*answer, find(pointer)]


@scenario()
def compile_context_without_a_compiler() -> Any:
    record(context=None, compile_context=True)
    bytes_of(100)
    return [e["compile_context"] for e in entries()]


@scenario()
def a_use_that_is_over_later() -> Any:
    record(context=None)
    side = torch.cuda.Stream()
    x = bytes_of(12 * MiB)
    x.record_stream(side)
    busy(side)
    del x
    answer = [actions()]
    let_pass()
    _y = bytes_of(30 * MiB)
    torch.cuda.empty_cache()
    # Whether it is known over before or after the next is handed out is taste.
    answer.append(sorted(a for a in actions() if a[0] != "snapshot"))
    return answer


@scenario()
def memory_that_ran_out() -> Any:
    record(context=None)
    torch.cuda.set_per_process_memory_fraction(0.25)
    total = torch.cuda.mem_get_info()[1]
    error = type_of_error(lambda: bytes_of(total // 2))
    torch.cuda.set_per_process_memory_fraction(1.0)
    found = [e for e in entries() if e["action"] == "oom"]
    return [
        error, len(found), found[-1]["size"] == total // 2, sorted(found[-1]),
        found[-1]["device_free"] > 0,
    ]  # fmt: skip


@scenario()
def what_there_was_no_memory_for() -> Any:
    """Its size as it would have been handed out."""
    record(context=None)
    torch.cuda.set_per_process_memory_fraction(0.0)
    errors = [type_of_error(lambda: bytes_of(size)) for size in (100, 3 * MiB - 7, 50 * MiB + 1)]  # noqa: B023
    torch.cuda.set_per_process_memory_fraction(1.0)
    return [errors, actions()]
