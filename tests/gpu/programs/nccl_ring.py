"""A ring over NCCL whose receive buffers are the blocks just sent.

Usage: nccl_ring.py MARK [TRIES]            (needs two GPUs)

Two processes, a GPU each. Each sends blocks on a stream of its own, marks them
there as MARK says (as hangs.py does), drops them, and only then
asks for the memory that it receives into. A send of this size ends when the
other rank receives, so an allocation that waits for the sending waits for
itself, around the ring. The allocator does wait, as the blocks are many enough,
and must give up.

A try in which the receiving is enqueued before the sending comes first: it
cannot hang, and shows that the memory asked for next is a block just sent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

PATIENCE = 20.0  # seconds that one try may take
LIMIT = 200.0  # seconds for everything; who started this may wait no longer than 250
MIB = 1 << 20
ELEMENTS = 16 * MIB  # of int32: 64 MiB, far more than NCCL buffers
BLOCKS = 4  # the last two to be dropped are never waited for


def rank_main(rank: int, store: str, mark: str, tries: int) -> None:
    """One rank; prints a JSON line."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    import torch
    import torch.distributed as dist
    from device import OURS, HeldBack, report, use_allocator

    import esper_alloc

    use_allocator(OURS)  # before anything initialises CUDA
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=600),
    )
    # One communicator for each direction, so that a send does not queue behind a receive.
    directions = [dist.new_group([0, 1]) for _ in range(2)]
    outgoing, incoming = directions[rank], directions[1 - rank]
    other = 1 - rank
    main = torch.cuda.current_stream()
    sender = torch.cuda.Stream()

    def blank() -> torch.Tensor:
        return torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")

    def receive(blocks: list[torch.Tensor]) -> None:
        for into in blocks:
            dist.irecv(into, other, group=incoming).wait()  # only the stream waits

    def send(value: int, how: str) -> set[int]:
        """Sends blocks and drops them: their addresses."""
        blocks = [blank().fill_(value) for _ in range(BLOCKS)]
        sender.wait_stream(main)
        with torch.cuda.stream(sender):
            for x in blocks:
                dist.isend(x, other, group=outgoing).wait()
        if how == "record_stream":
            for x in blocks:
                x.record_stream(sender)
        else:
            with torch.set_grad_enabled(how == "record_use_until_free"):
                esper_alloc.record_use(blocks, sender)
        return {x.data_ptr() for x in blocks}

    def finished() -> bool:
        limit = time.monotonic() + PATIENCE
        while not (main.query() and sender.query()):
            if time.monotonic() > limit:
                return False
            time.sleep(0.001)
        return True

    with torch.no_grad():
        # The first operation between two ranks sets a connection up, and waits for
        # both: the directions take turns.
        warm = [blank() for _ in range(BLOCKS)]
        for direction in range(2):
            if direction == rank:
                send(1, "record_stream")
            else:
                receive(warm)
            torch.cuda.synchronize()
        # Is the next memory asked for a block just sent?
        into = [blank() for _ in range(BLOCKS)]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        receive_stream = torch.cuda.Stream()
        receive_stream.wait_stream(main)
        with torch.cuda.stream(receive_stream):
            receive(into)
        addresses = send(2, "record_use")
        torch.cuda.synchronize()
        y = torch.empty_like(into[0])
        reused = y.data_ptr() in addresses
        wrong = sum(int((x != 2).sum()) for x in into)
        del y, warm, into

        hung = 0
        held_back = HeldBack(rank)
        for value in range(3, tries + 3):
            torch.cuda.empty_cache()
            send(value, mark)
            received = [blank().fill_(-1) for _ in range(BLOCKS)]
            receive(received)
            if not finished():
                hung += 1
                break
            wrong += sum(int((x != value).sum()) for x in received)
            del received
            held_back.look()
    report(rank=rank, tries=tries, hung=hung, wrong=wrong, reused=reused, **held_back.found())
    sys.stdout.flush()
    os._exit(0)  # NCCL's way out can take long, and would wait for what hangs


def conduct(mark: str, tries: int) -> None:
    """Starts both ranks, ends them when they take too long, and prints their sum."""
    import torch

    if torch.cuda.device_count() < 2:
        raise SystemExit("needs two GPUs")
    environment = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DEBUG": "WARN"}
    environment.setdefault("NCCL_NVLS_ENABLE", "0")  # nothing here is multicast
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--rank",
                    str(rank),
                    f"{folder}/store",
                    mark,
                    str(tries),
                ],
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        limit = time.monotonic() + LIMIT
        outputs = []
        for process in ranks:
            try:
                outputs.append(process.communicate(timeout=max(1.0, limit - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append(process.communicate()[0] + "\n(ended: no end in time)")
    found = []
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise SystemExit(f"a rank reported nothing:\n{output[-3000:]}")
        found.append(json.loads(lines[-1]))
    print(
        json.dumps(
            {
                "tries": tries,
                "hung": sum(one["hung"] for one in found),
                "wrong": sum(one["wrong"] for one in found),
                "reused": all(one["reused"] for one in found),
                "in_vain": sum(one["held_back_in_vain"] for one in found),
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        rank_main(int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        conduct(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
