"""Memory that sleeps on a GPU. Usage: sleep.py SCENARIO"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from audit import LENGTH, Gpt
from device import report, say
from torch import nn

import esper_alloc

MIB = 2**20
LAST = 1 << 20  # no turn comes after it


def used_on_device() -> int:
    """What this process and all others have on the device, as the driver says."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def device_memory() -> None:
    """What stays on the device beside the context."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    esper_alloc.sleep()
    context = used_on_device()
    esper_alloc.wake()
    kept = [torch.ones(256 * MIB, device="cuda", dtype=torch.uint8) for _ in range(8)]
    full = used_on_device()
    result = esper_alloc.sleep()
    asleep = used_on_device()
    esper_alloc.wake()
    report(context=context, full=full, asleep=asleep, given_back=result.given_back,
           sum=sum(int(t.sum()) for t in kept))  # fmt: skip


def graphs() -> None:
    """A captured graph with a pool of its own is replayed after many cycles, bit for bit."""
    torch.manual_seed(0)
    with esper_alloc.tag("rollout"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
        x = torch.randn(256, 512, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = model(x)
            state = y * 2
            y2 = state + x
    graph.replay()
    expected = y.clone(), y2.clone()
    refused = ""
    wrong = 0
    for _ in range(100):
        with esper_alloc.asleep("rollout") as result:
            wrong += len(result.stays)
            if not refused:
                try:
                    graph.replay()
                except RuntimeError as error:
                    refused = str(error)
        graph.replay()
        wrong += not (torch.equal(y, expected[0]) and torch.equal(y2, expected[1]))
    report(wrong=wrong, refused=refused)


def train(sleeps: bool) -> list[str]:
    torch.manual_seed(0)
    model = Gpt(256, 4, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        words = torch.randint(512, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = model(words.cuda(non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if sleeps and step % 2:  # with gradients and without step
            esper_alloc.sleep()
            esper_alloc.wake()
        optimizer.step()
        losses.append(loss.detach())
        if sleeps:
            esper_alloc.sleep()
            esper_alloc.wake()
    return [float(loss).hex() for loss in losses]


def training() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    report(plain=train(False), sleeping=train(True))


def two_devices() -> None:
    """Pages of several sizes on both devices, which each may access, sleep together and wake one
    by one; then each device copies from the other again."""
    sizes = [MIB // 2, 3 * MIB, 40 * MIB, 300 * MIB]
    wrong = 0

    def across() -> int:
        """Copies of everything on the other device that are not what they must be."""
        return sum(
            int((x.to(f"cuda:{1 - x.device.index}") != 7 + x.device.index).sum().item())
            for x in kept
        )

    kept = [
        torch.full((size,), 7 + d, device=f"cuda:{d}", dtype=torch.uint8)
        for d in range(2)
        for size in sizes
    ]
    wrong += across()
    addresses = [x.data_ptr() for x in kept]
    given_back = []
    for _ in range(3):
        slow = torch.empty_like(kept[3], device="cuda:1")
        with torch.cuda.device(0):
            torch.cuda._sleep(50_000_000)  # device 0 copies to device 1 when the sleep begins
            slow.copy_(kept[3], non_blocking=True)
        result = esper_alloc.sleep()
        given_back.append(result.given_back)
        wrong += len(result.stays)
        for device in (1, 0):
            esper_alloc.wake(device=device)
        wrong += int((slow != 7).sum().item()) + across()
        wrong += [x.data_ptr() for x in kept] != addresses
        del slow
    report(wrong=wrong, given_back=given_back, least=2 * sum(sizes))


def two_threads() -> None:
    """One tag goes to sleep, and another thread wakes the other one: where there is room for both,
    and then where there is not."""
    awake, asleep = names = ("one", "two")
    numbers = {"one": range(8), "two": range(8, 16)}
    kept = {}
    for name in names:
        with esper_alloc.tag(name):
            kept[name] = [torch.full((64 * MIB,), i, device="cuda") for i in numbers[name]]
    esper_alloc.sleep(asleep)
    wrong = failed = 0
    with ThreadPoolExecutor(1) as other:
        for turn in range(20):
            if turn == 10:
                room = torch.cuda.memory_reserved() + 1024 * MIB
                total = torch.cuda.mem_get_info()[1]
                torch.cuda.set_per_process_memory_fraction(room / total)
            woken = other.submit(esper_alloc.wake, asleep)
            wrong += len(esper_alloc.sleep(awake).stays)
            try:
                woken.result()
            except torch.OutOfMemoryError:  # it came before the sleep
                failed += 1
                esper_alloc.wake(asleep)
            awake, asleep = asleep, awake
            wrong += sum(not bool((t == i).all()) for t, i in zip(kept[awake], numbers[awake]))
    report(wrong=wrong, failed=failed)


def wait_for(file: Path, number: int) -> None:
    while not (file.exists() and int(file.read_text()) >= number):
        time.sleep(0.001)


def turns(folder: str, me: str, other: str) -> None:
    """Takes turns with another process. The device has room for one of them: `a` fills the
    rest of it once both have their contexts."""
    first = me < other
    mine, theirs = Path(folder, me), Path(folder, other)

    def tell(number: int) -> None:
        partial = mine.with_suffix(".new")
        partial.write_text(str(number))
        os.replace(partial, mine)

    torch.zeros(1, device="cuda")
    tell(0)
    wait_for(theirs, 0)
    kept: list[torch.Tensor] = []
    out_of_memory = wrong = 0
    try:
        if first:
            say("filling the rest of the device")
            with esper_alloc.tag("ballast"):
                free = torch.cuda.mem_get_info()[0] - 3 * 1024 * MIB
                ballast = torch.empty(max(free, 0), device="cuda", dtype=torch.uint8)  # noqa: F841
        for turn in range(50):
            say(f"turn {turn}")
            wait_for(theirs, turn if first else turn + 1)
            if not kept:
                with esper_alloc.tag("kept"):
                    kept = [torch.full((64 * MIB,), float(i), device="cuda") for i in range(8)]
            else:
                try:
                    esper_alloc.wake("kept")
                except torch.OutOfMemoryError:
                    out_of_memory += 1
                    break
            wrong += sum(int(not bool((t == float(i)).all())) for i, t in enumerate(kept))
            wrong += len(esper_alloc.sleep("kept").stays)
            torch.cuda.empty_cache()
            tell(turn + 1)
    finally:
        tell(LAST)  # whoever fails does not keep the other one waiting
    report(wrong=wrong, out_of_memory=out_of_memory)


if __name__ == "__main__":
    esper_alloc.enable()
    {
        "device_memory": device_memory,
        "graphs": graphs,
        "training": training,
        "two_devices": two_devices,
        "two_threads": two_threads,
        "turns": turns,
    }[sys.argv[1]](*sys.argv[2:])
