"""Ways for a process to end: what is alive then, who frees it, and what went wrong before.

    python exits.py ALLOCATOR SCENARIO

A scenario leaves something behind, and its process ends. It must end with the status
that it has under PyTorch's own allocator, and say nothing that it does not say there.
Most of them run on the simulated device of tests/shim, too.
"""

import atexit
import builtins
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OURS, NATIVE = "esper_alloc", "native"
SIMULATED = "ESPER_SIMULATED" in os.environ
MiB = 1 << 20


@dataclass
class Scenario:
    run: Callable[[], Any]
    needs: frozenset[str]
    status: int  # that the process ends with
    silent: bool  # or it says what it says under PyTorch's own allocator
    noisy: bool  # a thread of PyTorch's may say why it ends, too
    env: Mapping[str, str]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *needs: str, status: int = 0, silent: bool = True, noisy: bool = False, **env: str
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """`needs`: "gpu" for what the simulated device cannot do, "simulated" for what only
    that can, "two_gpus". `noisy`: a thread of PyTorch's may say why it ends, under any
    allocator, and be cut off in the middle; only complaints of an allocator or of CUDA count."""

    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        SCENARIOS[run.__name__] = Scenario(run, frozenset(needs), status, silent, noisy, env)
        return run

    return register


# ---- tools ---------------------------------------------------------------------


def memory(mebibytes: float = 3, device: Any = "cuda") -> torch.Tensor:
    return torch.empty(int(mebibytes * MiB), dtype=torch.uint8, device=device)


def work(stream: torch.cuda.Stream) -> None:
    """Something that is still running when the process ends, on a GPU."""
    if SIMULATED:
        import simulated

        simulated.work(stream)
    else:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)


def read_elsewhere(x: torch.Tensor) -> torch.cuda.Stream:
    side = torch.cuda.Stream(x.device)
    work(side)
    x.record_stream(side)
    if is_ours():
        import esper_alloc

        with torch.no_grad():
            esper_alloc.record_use(x, side)
    return side


def is_ours() -> bool:
    return torch.cuda.get_allocator_backend() == OURS


def small_graph(pool: Any = None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    x = torch.ones(MiB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = x * 2
    graph.replay()
    return graph, y


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def child(run: Callable[[], Any]) -> int:
    """What a forked child ends with that ends as a Python process does. It is given ten minutes,
    PyTorch's own allocator ten seconds: a lock that was held at the fork stays locked there."""
    sys.stdout.flush()
    with warnings.catch_warnings():  # where other threads run, Python warns of a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.alarm(600 if is_ours() else 10)
        run()
        sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


# ---- who holds what ---------------------------------------------------------------

kept: list[Any] = []


def pool_in_use() -> torch.cuda.MemPool:
    """A pool whose memory is kept."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(memory())
    return pool


@scenario()
def live_tensors() -> None:
    x = memory()
    kept.extend([x, memory(0.01), x[MiB:], read_elsewhere(x)])


@scenario()
def freed_and_pending() -> None:
    x = memory()
    kept.append(read_elsewhere(x))
    del x


@scenario()
def they_sleep() -> None:
    kept.extend([memory(), memory(12)])
    if is_ours():
        import esper_alloc

        esper_alloc.sleep()
    del kept[0]


@scenario()
def a_module_holds_them() -> None:
    module = types.ModuleType("kept_for_good")
    module.x = memory()  # type: ignore[attr-defined]
    sys.modules["kept_for_good"] = module
    builtins.kept_to_the_very_end = memory()  # type: ignore[attr-defined]


@scenario()
def a_cycle_holds_them() -> None:
    class Knot:
        def __init__(self) -> None:
            self.x = memory()
            self.me = self

        def __del__(self) -> None:
            memory().fill_  # noqa: B018

    gc.disable()
    kept.append(Knot())


@scenario()
def a_hook_frees_them() -> None:
    kept.extend([memory(), memory(12)])
    atexit.register(kept.clear)
    atexit.register(torch.cuda.empty_cache)


@scenario()
def a_hook_allocates() -> None:
    x = memory()

    def hook() -> None:
        y = memory()
        kept.extend([x, y, read_elsewhere(y)])

    atexit.register(hook)


def in_daemon_threads(step: Callable[[], Any], count: int = 3) -> None:
    """Threads that do it over and over, until Python ends. Then they sleep: a thread that
    comes back from PyTorch to an interpreter that is gone brings down the process, under
    any allocator."""
    begun, over = threading.Barrier(count + 1), threading.Event()
    asleep = threading.Barrier(count + 1)

    def loop() -> None:
        step()
        begun.wait()
        while not over.is_set():
            held = step()
        asleep.wait()
        time.sleep(1000)
        del held

    for _ in range(count):
        threading.Thread(target=loop, daemon=True).start()
    begun.wait()
    atexit.register(lambda: (over.set(), asleep.wait()))


@scenario()
def daemon_threads_allocate() -> None:
    side = torch.cuda.Stream()

    def step() -> torch.Tensor:
        x = memory()
        x.record_stream(side)
        return x

    in_daemon_threads(step)


@scenario()
def a_thread_outlives_the_program() -> None:
    def later() -> None:
        time.sleep(0.3)
        x = memory()
        kept.append(read_elsewhere(x))

    threading.Thread(target=later).start()


@scenario()
def bare_memory() -> None:
    torch.cuda.caching_allocator_alloc(MiB)


# ---- how it ends -------------------------------------------------------------------


@scenario(status=7)
def sys_exit() -> None:
    kept.append(memory())
    sys.exit(7)


@scenario(status=3)
def os_exit() -> None:
    kept.append(memory())
    os._exit(3)


@scenario(status=1, silent=False)
def an_exception() -> None:
    x = memory()
    kept.append(read_elsewhere(x))
    raise KeyError("nobody catches this")


@scenario(status=-signal.SIGTERM)
def terminated() -> None:
    kept.append(memory())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@scenario(status=-signal.SIGINT, silent=False)
def interrupted() -> None:
    # Jobs in the background inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept.append(memory())
    signal.raise_signal(signal.SIGINT)


# ---- pools, histories, watchers -----------------------------------------------------


@scenario()
def a_mem_pool_goes_before_its_memory() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(memory())
        read_elsewhere(memory(12))


@scenario(status=4)
def inside_a_mem_pool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(memory())
        sys.exit(4)


@scenario()
def a_history_is_recorded() -> None:
    torch.cuda.memory._record_memory_history(context="all", stacks="python")
    x = memory()
    kept.extend([x, read_elsewhere(x)])
    del x
    atexit.register(lambda: kept.append(memory()))


@scenario()
def a_tracer_is_attached() -> None:
    """The sanitizer's callbacks are Python functions."""
    import torch.cuda._gpu_trace as trace

    torch._C._activate_gpu_trace()
    seen: list[int] = []
    trace.register_callback_for_memory_allocation(seen.append)
    trace.register_callback_for_memory_deallocation(seen.append)
    kept.append(memory())
    print(len(seen))


@scenario("gpu", silent=False, TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="1")
def a_watcher_is_attached() -> None:
    """NCCL's, who wants to know of every segment."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    x = torch.ones(MiB, device="cuda")
    dist.all_reduce(x)
    kept.extend([x, memory(64)])
    print(int(x[0].item()))


# ---- graphs -------------------------------------------------------------------------


@scenario("gpu")
def a_graph() -> None:
    kept.extend(small_graph())


@scenario("gpu")
def a_graph_is_replayed_at_the_end() -> None:
    graph, y = small_graph()
    atexit.register(lambda: (graph.replay(), kept.append(y)))


@scenario("gpu")
def a_graph_of_a_mem_pool() -> None:
    pool = pool_in_use()
    kept.extend([*small_graph(pool.id), pool])


@scenario("gpu")
def a_daemon_thread_replays() -> None:
    graph, y = small_graph()
    in_daemon_threads(lambda: (graph.replay(), y + 1), 1)


@scenario("gpu", status=6, silent=False)
def in_the_middle_of_a_capture() -> None:
    x = torch.ones(MiB, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kept.append(x * 2)
        sys.exit(6)


@scenario("gpu")
def an_exception_inside_a_capture() -> None:
    """It arrives, the pool is left, memory is not lost, and another capture works."""
    x = torch.ones(MiB, device="cuda")
    main = torch.cuda.current_stream()
    for attempt in range(3):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                kept.append(x * 2)
                raise KeyError(attempt)
        except KeyError as error:
            print(repr(error))
        torch.cuda.set_stream(main)
        kept.clear()
        del graph
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print(torch.cuda.memory_allocated())
    graph, y = small_graph()
    print(y.sum().item())
    kept.extend([graph, y])


@scenario("gpu", silent=False)
def a_forbidden_call_inside_a_capture() -> None:
    """What invalidates the capture; afterwards everything works."""
    x = torch.ones(MiB, device="cuda")
    main = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            y = x * 2
            y.sum().item()
    except Exception as error:
        print(type(error).__name__)
    torch.cuda.set_stream(main)
    del graph
    gc.collect()
    torch.cuda.synchronize()
    print((x + 1).sum().item())
    kept.append(memory())


# ---- devices ------------------------------------------------------------------------


@scenario("two_gpus")
def the_other_device_is_current() -> None:
    x, y = memory(3, "cuda:0"), memory(12, "cuda:1")
    for current, tensor in ((1, x), (0, y)):
        torch.cuda.set_device(current)
        read_elsewhere(tensor)
    del x, y, tensor
    torch.cuda.set_device(1)
    print(torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1))
    kept.extend([memory(3, "cuda:0"), memory(12, "cuda:1")])
    kept.append(read_elsewhere(kept[0]))
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    print(torch.cuda.current_device())


@scenario("gpu", "two_gpus")
def a_stream_of_the_other_device_reads() -> None:
    x = torch.arange(MiB, device="cuda:0")
    far = torch.cuda.Stream("cuda:1")
    far.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(far):
        torch.cuda._sleep(100_000_000)
        y = x.to("cuda:1", non_blocking=True)
    x.record_stream(far)
    with torch.cuda.device(1):
        del x
    over = torch.zeros(MiB, dtype=torch.int64, device="cuda:0")
    far.synchronize()
    print(bool((y.cpu() == torch.arange(MiB)).all()), int(over.sum()))


# ---- after an error ------------------------------------------------------------------


def fail_for_good() -> None:
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([9], device="cuda")] += 1
    torch.cuda.synchronize()


def first_words(text: str) -> str:
    """The type, and whether it is CUDA's error: the rest is an allocator's own."""
    kind, _, message = text.partition(": ")
    return f"{kind}, CUDA error: {'CUDA error' in message}"


@scenario("gpu", silent=False)
def a_sticky_error() -> None:
    x = memory()
    kept.extend([x, memory(12), read_elsewhere(x)])
    print(first_words(error_of(fail_for_good)))
    print(first_words(error_of(lambda: memory(40))))  # needs the driver
    kept.pop(1)


@scenario("gpu", status=1, silent=False)
def a_sticky_error_that_nobody_catches() -> None:
    x = memory()
    kept.extend([x, read_elsewhere(x)])
    fail_for_good()


@scenario("gpu", silent=False)
def a_sticky_error_with_a_graph_and_a_pool() -> None:
    pool = pool_in_use()
    kept.extend([*small_graph(), pool])
    print(first_words(error_of(fail_for_good)))


@scenario("simulated")
def a_driver_that_fails_from_now_on() -> None:
    import simulated

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(memory())
        inside = memory(12)
    kept.extend([memory(), memory(12), read_elsewhere(memory()), read_elsewhere(kept[0])])
    simulated.break_driver()
    assert first_words(error_of(lambda: memory(40))) == "AcceleratorError, CUDA error: True"
    assert first_words(error_of(torch.cuda.empty_cache)) == "AcceleratorError, CUDA error: True"
    del inside, pool
    gc.collect()
    assert simulated.core_is_valid()
    atexit.register(kept.clear)


# ---- forks --------------------------------------------------------------------------


@scenario()
def a_forked_child_uses_cuda() -> None:
    """A clear error, no hang."""
    kept.append(memory())

    def use() -> None:
        print(error_of(memory).split("'")[0], flush=True)

    assert child(use) == 0
    assert torch.cuda.memory_allocated() == 3 * MiB


@scenario()
def a_forked_child_frees_what_it_inherited() -> None:
    kept.extend([memory(), memory(12)])
    pool = pool_in_use()
    kept.extend([read_elsewhere(kept[0]), pool])
    del pool
    raw = torch.cuda.caching_allocator_alloc(1000)
    before = torch.cuda.memory_allocated()
    assert child(kept.clear) == 0
    assert child(lambda: torch.cuda.caching_allocator_delete(raw)) == 0
    assert child(lambda: None) == 0  # the interpreter frees it
    assert torch.cuda.memory_allocated() == before


@scenario()
def a_forked_child_leaves_a_mem_pool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept.append(memory())
        assert child(lambda: None) == 0  # out of the block, too
        kept.append(memory())
    ranges = [(s["address"], s["address"] + s["total_size"]) for s in pool.snapshot()]
    assert all(any(a <= x.data_ptr() < b for a, b in ranges) for x in kept)


@scenario("gpu", silent=False)
def a_forked_child_drops_a_graph() -> None:
    kept.extend(small_graph())
    assert child(kept.clear) == 0
    kept[0].replay()
    torch.cuda.synchronize()
    assert kept[1].sum().item() == 2 * MiB


@scenario()
def a_forked_child_while_threads_allocate() -> None:
    """A lock that another thread held at the fork stays locked in the child."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            x = memory()
            del x

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    kept.extend(memory() for _ in range(10))
    statuses = {child(kept.clear) for _ in range(12)}
    stop.set()
    for thread in threads:
        thread.join()
    assert statuses == {0}, statuses


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((64,), float(i))


def load(pin: bool, persistent: bool) -> float:
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=8, num_workers=2, pin_memory=pin, persistent_workers=persistent
    )
    total = 0.0
    for _ in range(2):
        for batch in loader:
            assert batch.is_pinned() == pin
            x = batch.to("cuda", non_blocking=True)
            total += batch.sum().item()
            if pin:
                assert (x.cpu() == batch).all()
            x.record_stream(torch.cuda.Stream())
            del x
    if persistent:
        kept.append(loader)  # its workers are there when the process ends
    return total


@scenario()
def a_data_loader_whose_workers_stay() -> None:
    kept.append(memory())
    print(load(pin=False, persistent=True))


@scenario("gpu")
def a_data_loader_with_pinned_memory() -> None:
    kept.append(memory())
    print(load(pin=True, persistent=False), load(pin=True, persistent=True))


@scenario("gpu", noisy=True)
def an_iterator_that_is_not_finished() -> None:
    kept.append(memory())
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, pin_memory=True)
    batches = iter(loader)
    kept.extend([batches, next(batches).to("cuda", non_blocking=True)])


# ---- a process -----------------------------------------------------------------------


def main(allocator: str, name: str) -> None:
    os.environ["ESPER_ALLOC"] = ""
    if SIMULATED:
        os.environ["ESPER_SIMULATED_ALLOCATOR"] = allocator
        import simulated  # noqa: F401
    elif allocator != NATIVE:
        import esper_alloc

        esper_alloc.enable()
    torch.cuda.init()
    assert is_ours() == (allocator == OURS)
    chosen = SCENARIOS[name]
    if "two_gpus" in chosen.needs and torch.cuda.device_count() < 2:
        raise SystemExit("needs two GPUs")
    chosen.run()
    print("done")


# ---- many of them ---------------------------------------------------------------------


@dataclass
class End:
    """How a process ended. Nothing is equal to a process that did not."""

    status: int | None
    printed: str
    said: list[str]  # on stderr, without what differs from run to run


#: The time and place of a warning, addresses, numbers of processes and threads.
VARYING = re.compile(r"\[[WE]\d{4} [\d:.]+ [^\]]*\]|\[rank\d+\]:|0x[0-9a-f]+|\b\d+\b")
#: Variables that would choose or tune an allocator behind a scenario's back.
FOREIGN = (
    "ESPER_ALLOC", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip
COMPLAINT = re.compile(r"esper_alloc:|CUDA error|terminate called")


def end_of(allocator: str, name: str, env: Mapping[str, str]) -> End:
    full = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    full["PYTHONPATH"] = os.pathsep.join([str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)])
    full.update({key: value for key, value in env.items() if key != "PYTHONPATH"})
    full.update(SCENARIOS[name].env)
    command = [sys.executable, str(Path(__file__).resolve()), allocator, name]
    try:
        done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=1200)
    except subprocess.TimeoutExpired as error:
        return End(None, str(error.stdout), [f"no end after 1200 s: {error.stderr!r}"])
    said = [VARYING.sub("#", line).strip() for line in done.stderr.splitlines()]
    return End(done.returncode, done.stdout, [line for line in said if line])


def run_all(
    jobs: Iterable[tuple[str, str]], env: Mapping[str, str] | None = None, workers: int = 12
) -> dict[tuple[str, str], End]:
    """{(allocator, name): how it ended}, several at a time."""
    listed = list(jobs)
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(listed, pool.map(lambda job: end_of(*job, env or {}), listed)))


def judge(name: str, ours: End, native: End | None) -> str | None:
    """What is wrong with the end of a scenario, or None. Without `native` it is held
    against what the scenario says of itself."""
    chosen = SCENARIOS[name]
    wrong = []
    if ours.status != chosen.status:
        wrong.append(f"it ended with {ours.status}, not {chosen.status}")
    if native and native.status != chosen.status:
        # It may be worse there, where destructors throw.
        if native.status not in (-signal.SIGABRT, -signal.SIGSEGV) and "forked" not in name:
            wrong.append(f"under PyTorch's own allocator it ends with {native.status}")
        native = None
    if native and native.printed != ours.printed:
        wrong.append(f"it printed {ours.printed!r}, there {native.printed!r}")
    allowed = native.said if native and not chosen.silent else []
    stray = [line for line in ours.said if line not in allowed]
    if chosen.noisy:
        stray = [line for line in stray if COMPLAINT.search(line)]
    if stray and (native or chosen.silent):
        wrong.append("it said:\n" + "\n".join(stray[:30]))
    return "\n".join(wrong) or None


if __name__ == "__main__":
    main(*sys.argv[1:])
