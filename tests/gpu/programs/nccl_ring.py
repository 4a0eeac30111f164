"""A ring over NCCL whose receive buffer is the block just sent.

Usage: nccl_ring.py MARK [TRIES]            (needs two GPUs)

Two processes, a GPU each. Each sends a block on a stream of its own, marks it
there as MARK says (as hangs.py does, without the control), drops it, and only then
asks for the memory that it receives into. A send of this size ends when the
other rank receives, so an allocation that waits for the sending waits for
itself, around the ring.

A try in which the receiving is enqueued before the sending comes first: it
cannot hang, and shows that the memory asked for next is the block just sent.
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


def rank_main(rank: int, store: str, mark: str, tries: int) -> None:
    """One rank; prints a JSON line."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    import torch
    import torch.distributed as dist
    from device import OURS, report, use_allocator

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
    if mark.startswith("trait"):
        esper_alloc.set_stream_traits(sender, rendezvous=True)

    def blank() -> torch.Tensor:
        return torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")

    def receive(into: torch.Tensor) -> None:
        dist.irecv(into, other, group=incoming).wait()  # only the stream waits

    def send(value: int, how: str) -> int:
        x = torch.full((ELEMENTS,), value, dtype=torch.int32, device="cuda")
        sender.wait_stream(main)
        with torch.cuda.stream(sender):
            dist.isend(x, other, group=outgoing).wait()
        if how == "record_stream":
            x.record_stream(sender)
            return x.data_ptr()
        others = [x]
        with torch.set_grad_enabled(how.endswith("_until_free")):
            esper_alloc.record_use(x, sender, gate=not how.startswith("gate_false"))
        others.clear()
        return x.data_ptr()

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
        warm = blank()
        for direction in range(2):
            if direction == rank:
                send(1, "record_stream")
            else:
                receive(warm)
            torch.cuda.synchronize()
        # Is the next memory asked for the block just sent?
        into = blank()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        receive_stream = torch.cuda.Stream()
        receive_stream.wait_stream(main)
        with torch.cuda.stream(receive_stream):
            receive(into)
        address = send(2, "gate_false")
        torch.cuda.synchronize()
        y = torch.empty_like(into)
        reused = y.data_ptr() == address
        wrong = int((into != 2).sum())
        del y

        hung = 0
        for value in range(3, tries + 3):
            torch.cuda.empty_cache()
            send(value, mark)
            y = torch.empty_like(into)
            y.fill_(-1)
            receive(y)
            if not finished():
                hung += 1
                break
            wrong += int((y != value).sum())
            del y
    report(rank=rank, tries=tries, hung=hung, wrong=wrong, reused=reused)
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
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        rank_main(int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        conduct(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
