"""Two processes or $ESPER_RANKS, that work together through torch.distributed: a GPU each, or with
ESPER_ONE_GPU=1 one for all.

Usage: two_ranks.py SCENARIO ALLOCATOR [ARGUMENT...]

The scenarios are the functions below; each gives what its rank found. The program
prints a list of all ranks' answers, and in `killed` how each rank ended.
"""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

RANKS = int(os.environ.get("ESPER_RANKS", "2"))
ONE_GPU = os.environ.get("ESPER_ONE_GPU") == "1"  # for all ranks
LIMIT = 200.0  # seconds until a rank is taken to hang
LOST_S = 10.0  # after which a process group takes a rank for lost
ALONE_LIMIT = 10.0  # seconds that a rank may go on after the other has failed
KILLED_LIMIT = 100.0  # the same as LIMIT where a rank is lost: native may hang, too
OF_RANKS = sum(range(RANKS))
MIB = 1 << 20
OURS = "esper_alloc"

Found = dict[str, Any]
SCENARIOS: dict[str, Callable[..., Found]] = {}


def scenario(function: Callable[..., Found]) -> Callable[..., Found]:
    SCENARIOS[function.__name__] = function
    return function


# --- training ----------------------------------------------------------------


def train(model: Any, rank: int, between: Callable[[int], None], steps: int = 10) -> list[str]:
    """The losses of a model of WIDTH inputs and outputs, exactly."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    draw = torch.Generator().manual_seed(7 + rank)
    losses = []
    for number in range(steps):
        x = torch.randn(64, WIDTH, generator=draw).cuda()
        loss = functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        between(number)
    return [loss.item().hex() for loss in losses]


WIDTH = 512


def blocks(count: int) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)  # the same everywhere
    return nn.Sequential(*(Block() for _ in range(count))).cuda()


@scenario
def fsdp2_sleeps(rank: int) -> Found:
    """Ten steps; then the same, where each rank's memory sleeps after each step."""
    from torch.distributed.fsdp import fully_shard

    import esper_alloc

    stays: list[Any] = []
    given_back = []

    def nap(number: int) -> None:
        result = esper_alloc.sleep()
        stays.extend(result.stays)
        given_back.append(result.given_back)
        esper_alloc.wake()

    losses = []
    for between in (lambda number: None, nap):
        model = blocks(4)
        for block in model:
            fully_shard(block)
        fully_shard(model)
        losses.append(train(model, rank, between))
        del model
    return {"plain": losses[0], "sleeping": losses[1], "stays": stays, "given_back": given_back}


@scenario
def tensor_parallel(rank: int, how: str) -> Found:
    """`how`: plain; registered: with TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK; pool: what
    the forward makes lies in NCCL's own memory, which is registered after the second step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (RANKS,))
    backend = dist.group.WORLD._get_backend(torch.device("cuda", torch.cuda.current_device()))
    pool = None
    if how == "pool":
        own = backend.supports_tensor_alloc(torch.device("cuda", torch.cuda.current_device()))
        pool = torch.cuda.MemPool(backend.mem_allocator) if own else torch.cuda.MemPool()
    model = blocks(4)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    class InPool(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.cuda.use_mem_pool(pool) if pool else nullcontext():
                return model(x)

        def parameters(self, recurse: bool = True) -> Any:
            return model.parameters(recurse)

    def register(number: int) -> None:
        if pool is not None and number == 1:
            backend.register_mem_pool(pool)

    losses = train(InPool(), 0, register)  # the same data everywhere
    torch.cuda.synchronize()
    kinds = sorted({bool(one.get("is_expandable")) for one in torch.cuda.memory_snapshot()})
    if pool is not None:
        backend.deregister_mem_pool(pool)
    return {"losses": losses, "expandable": kinds}


# --- memory that the other rank maps ------------------------------------------


@scenario
def symmetric_memory(rank: int) -> Found:
    """One-shot sums of symmetric memory, beside memory that comes and goes, and after a nap."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    gpu = torch.device("cuda", torch.cuda.current_device())
    wrong = 0
    multicast = False

    def check(x: torch.Tensor, value: int) -> None:
        nonlocal wrong
        x.fill_(value + rank)
        total = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group)
        noise = torch.full((MIB,), -1.0, device=gpu)
        wrong += int((total != RANKS * value + OF_RANKS).sum())
        del noise, total

    buffers = []
    for size in (1024, 256 * 1024, 3 * MIB):
        x = symmetric.empty(size, dtype=torch.float32, device=gpu)
        handle = symmetric.rendezvous(x, group)
        multicast |= bool(handle.multicast_ptr)
        buffers.append(x)
    for value in range(5):
        for x in buffers:
            check(x, value)
    torch.cuda.synchronize()
    slept = -1
    if "esper_alloc" in sys.modules and sys.modules["esper_alloc"].is_enabled():
        esper_alloc = sys.modules["esper_alloc"]
        dist.barrier()
        kept = torch.full((MIB,), 3.0, device=gpu)
        slept = esper_alloc.sleep().given_back
        esper_alloc.wake()
        wrong += int((kept != 3.0).sum())
        dist.barrier()
        for x in buffers:
            check(x, 9)
    return {"wrong": wrong, "multicast": multicast, "slept": slept}


@scenario
def captured_collective_sleeps(rank: int) -> Found:
    """An all-reduce inside a CUDA graph, whose memory sleeps between replays."""
    import torch
    import torch.distributed as dist

    import esper_alloc

    x = torch.zeros(4 * MIB, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    wrong = given_back = 0
    for turn in range(4):
        x.fill_(turn + rank)
        graph.replay()
        wrong += int((z != 2 * (RANKS * turn + OF_RANKS) + 1).sum())
        torch.cuda.synchronize()
        dist.barrier()  # no rank sleeps while the other still reads its memory
        given_back += esper_alloc.sleep().given_back
        esper_alloc.wake()
        dist.barrier()
    return {"wrong": wrong, "given_back": given_back}


# --- communication streams ------------------------------------------------------


@scenario
def wait_then_allocate(rank: int, how: str, memory: str) -> Found:
    """The communication stream waits for the computation's, whose next memory a collective then
    writes, while blocks that lay there are read late. `how` uses are marked: record_use,
    record_stream or nothing; `memory`: short or plenty."""
    import torch
    import torch.distributed as dist
    from device import other_streams, sleep

    import esper_alloc

    torch.utils.deterministic.fill_uninitialized_memory = False  # else the main stream writes, too
    tries, size, count = 10, 32 * MIB, 1 if memory == "short" else 6
    main = torch.cuda.current_stream()
    reader, comm = other_streams(2)
    read = torch.cuda.Event()  # the last of the blocks
    copies = torch.empty(count, size, dtype=torch.uint8, device="cuda")
    copied = torch.empty(size, dtype=torch.uint8, device="cuda")
    mine = torch.empty(size // RANKS, dtype=torch.uint8, device="cuda")
    dist.all_gather_into_tensor(copied, mine.fill_(0))  # sets the connection up
    total = torch.cuda.mem_get_info()[1]

    def protect(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        if how == "record_stream":
            x.record_stream(stream)
        elif how == "record_use":
            with torch.no_grad():
                esper_alloc.record_use(x, stream)

    wrong = waited = 0
    for value in range(1, tries + 1):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        for place, x in enumerate(blocks):
            x.fill_(10 * value + place)
        mine.fill_(200 + rank)
        torch.cuda.synchronize()
        if memory == "short":
            limit = torch.cuda.memory_reserved() + size // 2
            torch.cuda.set_per_process_memory_fraction(limit / total)
        for x, copy in zip(blocks, copies):
            sleep(reader, 25)
            with torch.cuda.stream(reader):
                copy.copy_(x)
            read.record(reader)
            protect(x, reader)
        del x
        blocks.clear()
        comm.wait_stream(main)  # first this,
        result = torch.empty(size, dtype=torch.uint8, device="cuda")  # then the memory
        waited += read.query()
        with torch.cuda.stream(comm):
            dist.all_gather_into_tensor(result, mine)
            copied.copy_(result)
        protect(result, comm)
        main.wait_stream(comm)
        del result
        torch.cuda.synchronize()
        torch.cuda.set_per_process_memory_fraction(1.0)
        right = [bool((copies[place] == 10 * value + place).all()) for place in range(count)]
        for place, part in enumerate(copied.chunk(RANKS)):
            right.append(bool((part == 200 + place).all()))
        wrong += not all(right)
    return {"tries": tries, "wrong": wrong, "waited": waited}


@scenario
def fused_all_gather_matmul(rank: int) -> Found:
    """PyTorch's product that begins before its input is there: the kernel spins, and copies that
    are enqueued after it, into memory that is allocated after their stream's wait, let it go on.
    The gathered input is read late."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric
    from device import HeldBack, other_streams, sleep

    import esper_alloc

    torch.utils.deterministic.fill_uninitialized_memory = False
    seconds, rows, inner, columns = 20.0, 4096, 1024, 1024
    group = dist.group.WORLD.group_name
    gpu = torch.device("cuda", torch.cuda.current_device())
    main = torch.cuda.current_stream()
    (reader,) = other_streams(1)
    right = torch.ones(inner, columns, dtype=torch.bfloat16, device=gpu)
    wrong = torch.zeros(2, dtype=torch.int64, device=gpu)
    go_on = torch.ones(1, device=gpu)
    held_back = HeldBack(torch.cuda.current_device())
    turns = 0
    while turns % 10 or float(go_on) > 0:
        turns += 1
        kinds = [1.0 + (turns + one) % 4 for one in range(RANKS)]
        left = torch.full((rows // RANKS, inner), kinds[rank], dtype=torch.bfloat16, device=gpu)
        try:
            gathered, product = symmetric._fused_all_gather_matmul_native(left, right, group)
        except RuntimeError as error:
            if turns == 1 and "not" in str(error) and "support" in str(error):
                return {"supported": False, "said": str(error)[:300]}
            raise
        reader.wait_stream(main)
        sleep(reader, 2)
        for place, (part, result) in enumerate(zip(gathered.chunk(RANKS), product.chunk(RANKS))):
            wrong[0].add_((result != kinds[place] * inner).sum())
            with torch.cuda.stream(reader):
                wrong[1].add_((part != kinds[place]).sum())
        with torch.no_grad():
            esper_alloc.record_use(gathered, reader)
        del gathered, product, part, result, left
        if turns % 10 == 0:  # all ranks must end with the same turn
            torch.cuda.synchronize()
            go_on.fill_(held_back.elapsed() < seconds)
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    torch.cuda.synchronize()
    return {"supported": True, "turns": turns, "wrong": int(wrong.sum()), **held_back.found()}


@scenario
def exchanges(rank: int) -> Found:
    """Each rank sends blocks to the next, drops them, and only then asks for the memory that it
    receives into. So no send is over before the next rank has got that far, and there the same is
    true. The turns in the first seconds do not count for their rate."""
    import torch
    import torch.distributed as dist
    from device import HeldBack, other_streams

    import esper_alloc

    seconds, size, count = 12.0, 16 * MIB, 10  # more than the allowance
    groups = [dist.new_group(list(range(RANKS))) for _ in range(RANKS)]  # one for each sender
    following, other = (rank + 1) % RANKS, (rank - 1) % RANKS
    main = torch.cuda.current_stream()
    (sending,) = other_streams(1)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    go_on = torch.ones(1, device="cuda")

    def send(value: int) -> None:
        blocks = [
            torch.full((size,), value + 60 * rank, dtype=torch.uint8, device="cuda")
            for _ in range(count)
        ]
        with torch.cuda.stream(sending):
            sending.wait_stream(main)
            for work in [dist.isend(x, following, group=groups[rank]) for x in blocks]:
                work.wait()
        with torch.no_grad():
            esper_alloc.record_use(blocks, sending)

    def receive(value: int) -> None:
        got = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        for x in got:
            dist.irecv(x, other, group=groups[other]).wait()
            wrong.add_((x != value + 60 * other).sum())

    # First a turn in which nobody is waited for: NCCL connects two ranks when both are at their
    # first message, and CUDA loads a kernel when it is first launched, and may wait for others.
    for sender in range(RANKS):
        if sender == rank:
            send(0)
        elif sender == other:
            receive(0)
    dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    torch.cuda.synchronize()
    held_back = HeldBack(torch.cuda.current_device())
    turns = first_turns = 0
    while turns % 10 or float(go_on) > 0:
        turns += 1
        send(turns % 60)
        receive(turns % 60)
        main.wait_stream(sending)
        if held_back.first is None:
            first_turns = turns
        held_back.look()
        if turns % 10 == 0:  # all ranks must end with the same turn
            torch.cuda.synchronize()
            go_on.fill_(held_back.elapsed() < seconds)
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    torch.cuda.synchronize()
    found = held_back.found()
    rate = (turns - first_turns) / found["later_seconds"] if found["later_seconds"] else 0.0
    return {"turns": turns, "later_turns_a_second": rate, "wrong": int(wrong), **found}


# --- a rank that dies ----------------------------------------------------------


@scenario
def killed(rank: int, how: str) -> Found:
    """Rank 1 is killed in the middle of an all-reduce. `how` the others learn of it: the watchdog
    ends the process, or with blocking waits an exception is raised, and they go on alone."""
    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=LOST_S))
    x = torch.ones(16 * MIB, device="cuda")
    side = torch.cuda.Stream()
    dist.barrier()  # which has all the time that it needs
    for _ in range(20):
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(2)  # so that the others have done all that was, too, and wait for the next
        os.kill(os.getpid(), signal.SIGKILL)
    y = torch.ones(16 * MIB, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            work = dist.all_reduce(y, group=group, async_op=True)
            work.wait()
            y.record_stream(side)
            del y
        torch.cuda.synchronize()
        said = "done"
    except RuntimeError as error:
        said = type(error).__name__
        del x
        torch.cuda.empty_cache()
        said += f", {int(torch.full((MIB,), 3, device='cuda')[-1])}"
    return {"said": said}


# --- all ranks -----------------------------------------------------------------


def rank_main(rank: int, store: str, name: str, allocator: str, arguments: list[str]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that is ended leaves no dump
    faulthandler.dump_traceback_later(LIMIT - 10)  # where it hangs
    import torch
    import torch.distributed as dist
    from device import calibrate

    if allocator == OURS:
        import esper_alloc

        esper_alloc.enable()
    gpu = 0 if ONE_GPU else rank
    if ONE_GPU:  # NCCL refuses a second rank of one host there
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        device_id=torch.device("cuda", gpu),
        timeout=timedelta(seconds=LIMIT),
    )
    calibrate()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = SCENARIOS[name](rank, *arguments)
    print(json.dumps(found), flush=True)
    if name != "killed":
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL's way out can take long


def conduct(name: str, allocator: str, arguments: list[str]) -> None:
    """Starts the ranks, ends them when they take too long, and prints what they found."""
    import torch

    if torch.cuda.device_count() < (1 if ONE_GPU else RANKS):
        raise SystemExit(f"needs {RANKS} GPUs")
    environment = {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",  # nothing here is multicast
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [open(f"{folder}/rank-{rank}", "w+") for rank in range(RANKS)]  # noqa: SIM115
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), f"{folder}/store", name, allocator,
                 *arguments],
                env=environment, stdout=files[rank], stderr=subprocess.STDOUT,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        limit = time.monotonic() + (KILLED_LIMIT if name == "killed" else LIMIT)
        while any(process.poll() is None for process in ranks) and time.monotonic() < limit:
            if name != "killed" and any(process.poll() for process in ranks):
                limit = min(limit, time.monotonic() + ALONE_LIMIT)  # the others wait for it
            time.sleep(0.1)
        ends = [str(process.poll()) if process.poll() is not None else "hung" for process in ranks]
        outputs = []
        for process, file in zip(ranks, files, strict=True):
            process.kill()
            process.wait()
            file.seek(0)
            outputs.append(file.read())
            file.close()
    answers = []
    for output, end in zip(outputs, ends, strict=True):
        lines = [line for line in output.splitlines() if line.startswith("{")]
        answer = json.loads(lines[-1]) if lines else {}
        if name != "killed" and (end != "0" or not lines):
            said = (f"rank {i} ended with {ends[i]}:\n{outputs[i][-3000:]}" for i in range(RANKS))
            raise SystemExit("\n".join(said))
        answers.append({**answer, "end": end})
    print(json.dumps({"ranks": answers}))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_main(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], sys.argv[6:])
    else:
        conduct(sys.argv[1], sys.argv[2], sys.argv[3:])
