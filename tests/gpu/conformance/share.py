"""Programs of several processes, for sharing.py: share.py NAME prints what came of it.

The allocator of all of them is chosen by ESPER_ALLOC.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

if os.environ.get("ESPER_ALLOC") == "1":  # children import this module, too
    import esper_alloc  # noqa: F401

SMALL = 3000


def started(context: Any, target: Callable[[Any, Any], None]) -> tuple[Any, Any, Any]:
    """A child that runs target(inbox, outbox), and the two queues."""
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=target, args=(inbox, outbox))
    child.start()
    return child, inbox, outbox


def sum_and_return(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=600)
    total = int(x.sum())
    y = torch.full_like(x, 7)
    outbox.put((total, y))
    inbox.get(timeout=600)  # the other side is done with y
    del x, y


def there_and_back(context: Any) -> Any:
    child, inbox, outbox = started(context, sum_and_return)
    x = torch.arange(1000, device="cuda")
    inbox.put(x)
    total, y = outbox.get(timeout=600)
    answer = [total, int(y.sum()), y.device.index]
    del y
    inbox.put("done")
    child.join(60)
    return [*answer, child.exitcode]


def sum_many(inbox: Any, outbox: Any) -> None:
    total = 0
    for _ in range(SMALL // 100):
        total += sum(int(x.sum()) for x in inbox.get(timeout=600))
    outbox.put(total)


def thousands(context: Any) -> Any:
    child, inbox, outbox = started(context, sum_many)
    kept = [torch.full((5,), i, device="cuda") for i in range(SMALL)]
    for first in range(0, SMALL, 100):
        inbox.put(kept[first : first + 100])
    total = outbox.get(timeout=600)
    child.join(60)
    return [total == 5 * SMALL * (SMALL - 1) // 2, child.exitcode]


def hold(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=600)
    outbox.put("have it")
    inbox.get(timeout=600)  # the producer has let go of it and used its memory for others
    outbox.put(int(x.sum()))
    del x


def outlives(context: Any) -> Any:
    child, inbox, outbox = started(context, hold)
    x = torch.full((1 << 20,), 3, device="cuda")
    inbox.put(x)
    outbox.get(timeout=600)
    del x
    others = [torch.full((1 << 20,), 9, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    inbox.put("go on")
    total = outbox.get(timeout=600)
    child.join(60)
    return [total == 3 << 20, len(others), child.exitcode]


def look(inbox: Any, outbox: Any) -> None:
    for _ in range(3):
        x = inbox.get(timeout=600)
        outbox.put(int(x[0]))
        del x
    inbox.get(timeout=600)


def comes_back(context: Any) -> Any:
    child, inbox, outbox = started(context, look)
    seen = []
    for turn in range(3):
        x = torch.full((24 << 20,), turn, dtype=torch.uint8, device="cuda")
        inbox.put(x)
        seen.append(outbox.get(timeout=600))
        del x
    inbox.put("done")
    child.join(60)
    torch.cuda.ipc_collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [seen, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), child.exitcode]


def write(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=600)
    x += 1
    torch.cuda.synchronize()
    outbox.put("written")
    del x


def writes(context: Any) -> Any:
    child, inbox, outbox = started(context, write)
    x = torch.zeros(1000, device="cuda")
    inbox.put(x)
    outbox.get(timeout=600)
    answer = int(x.sum())
    child.join(60)
    return [answer, child.exitcode]


# ---- with mapped segments: see tests/gpu/test_mapped.py ----------------------


def number(mib: int, first: int) -> torch.Tensor:
    return torch.arange(first, first + (mib << 18), dtype=torch.int32, device="cuda")


def is_numbered(x: torch.Tensor, first: int) -> bool:
    return bool((x == torch.arange(first, first + x.numel(), dtype=x.dtype, device=x.device)).all())


def compare_all(inbox: Any, outbox: Any) -> None:
    kept = inbox.get(timeout=600)
    outbox.put([is_numbered(x, first) for first, x in kept])
    inbox.get(timeout=600)
    outbox.put([is_numbered(x, first) for first, x in kept])
    del kept


def stitched(context: Any) -> Any:
    """A block of pages that were free here and there, and its neighbours."""
    child, inbox, outbox = started(context, compare_all)
    parts = [number(24, i) for i in range(8)]
    before = torch.cuda.memory_reserved()
    del parts[::2]
    large = number(90, 1000)
    grown = torch.cuda.memory_reserved() - before
    inbox.put([(1000, large)] + [(2 * i + 1, x) for i, x in enumerate(parts)])
    seen = outbox.get(timeout=600)
    inbox.put("again")
    seen += outbox.get(timeout=600)
    child.join(60)
    return [all(seen), len(seen), grown < 32 << 20, child.exitcode]


def neighbours_move(context: Any) -> Any:
    """While the other process has a tensor, what is beside it is freed, moves and goes back."""
    child, inbox, outbox = started(context, compare_all)
    parts = [number(24, i) for i in range(9)]
    small = [number(1, 50 + i) for i in range(5)]
    kept = [(3, parts[3]), (6, parts[6]), (52, small[2])]
    inbox.put(kept)
    seen = outbox.get(timeout=600)
    del parts, small
    others = []
    for turn in range(4):
        others.append(number(60, 7000 + turn))
        others.append(number(3, 8000 + turn))
        torch.cuda.empty_cache()
    seen += [is_numbered(x, first) for first, x in kept]
    del kept  # the other process still has it
    torch.cuda.empty_cache()
    others.append(number(100, 9000))
    inbox.put("again")
    seen += outbox.get(timeout=600)
    child.join(60)
    del others
    torch.cuda.ipc_collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [all(seen), len(seen), torch.cuda.memory_reserved(), child.exitcode]


def other_segments(context: Any) -> Any:
    """The other process has segments of the other kind."""
    torch.zeros(1, device="cuda")  # this one has chosen
    os.environ["ESPER_ALLOC_SEGMENTS"] = "classic"
    return there_and_back(context)


def look_from_afar(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=600)
    y = x.to("cuda:1")
    z = torch.zeros(x.numel(), dtype=torch.int64, device="cuda:1")
    z[::2].copy_(x[::2])  # a kernel, where there is peer access
    seen = [is_numbered(y, 5), int(z.sum()) == int(x[::2].sum())]
    fresh = inbox.get(timeout=600)
    seen.append(is_numbered(fresh.to("cuda:1"), 9))
    for shared in (x, fresh):  # the other device writes
        shared.copy_(
            torch.arange(2, 2 + x.numel(), dtype=x.dtype, device="cuda:1")[: shared.numel()]
        )
        seen.append(is_numbered(shared, 2))
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    outbox.put(seen)
    del x, fresh, shared


def from_afar(context: Any) -> Any:
    """The other process copies to another device: before it and after, pages are opened."""
    child, inbox, outbox = started(context, look_from_afar)
    x, fresh = number(30, 5), number(12, 9)
    inbox.put(x)
    inbox.put(fresh)
    answer = outbox.get(timeout=600)
    answer += [is_numbered(x, 2), is_numbered(fresh, 2)]
    child.join(60)
    return [all(answer), len(answer), child.exitcode]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](mp.get_context("spawn"))))
