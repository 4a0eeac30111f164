"""Programs of several processes, for sharing.py: share.py NAME prints what came of it.

The allocator of all of them is chosen by ESPER_ALLOC.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.multiprocessing as mp

if os.environ.get("ESPER_ALLOC") == "1":  # children import this module, too
    import esper_alloc  # noqa: F401

SMALL = 3000


def sum_and_return(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=60)
    total = int(x.sum())
    y = torch.full_like(x, 7)
    outbox.put((total, y))
    inbox.get(timeout=60)  # the other side is done with y
    del x, y


def there_and_back(context: Any) -> Any:
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=sum_and_return, args=(inbox, outbox))
    child.start()
    x = torch.arange(1000, device="cuda")
    inbox.put(x)
    total, y = outbox.get(timeout=60)
    answer = [total, int(y.sum()), y.device.index]
    del y
    inbox.put("done")
    child.join(60)
    return [*answer, child.exitcode]


def sum_many(inbox: Any, outbox: Any) -> None:
    total = 0
    for _ in range(SMALL // 100):
        total += sum(int(x.sum()) for x in inbox.get(timeout=60))
    outbox.put(total)


def thousands(context: Any) -> Any:
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=sum_many, args=(inbox, outbox))
    child.start()
    kept = [torch.full((5,), i, device="cuda") for i in range(SMALL)]
    for first in range(0, SMALL, 100):
        inbox.put(kept[first : first + 100])
    total = outbox.get(timeout=90)
    child.join(60)
    return [total == 5 * SMALL * (SMALL - 1) // 2, child.exitcode]


def hold(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=60)
    outbox.put("have it")
    inbox.get(timeout=60)  # the producer has let go of it and used its memory for others
    outbox.put(int(x.sum()))
    del x


def outlives(context: Any) -> Any:
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=hold, args=(inbox, outbox))
    child.start()
    x = torch.full((1 << 20,), 3, device="cuda")
    inbox.put(x)
    outbox.get(timeout=60)
    del x
    others = [torch.full((1 << 20,), 9, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    inbox.put("go on")
    total = outbox.get(timeout=60)
    child.join(60)
    return [total == 3 << 20, len(others), child.exitcode]


def look(inbox: Any, outbox: Any) -> None:
    for _ in range(3):
        x = inbox.get(timeout=60)
        outbox.put(int(x[0]))
        del x
    inbox.get(timeout=60)


def comes_back(context: Any) -> Any:
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=look, args=(inbox, outbox))
    child.start()
    seen = []
    for turn in range(3):
        x = torch.full((24 << 20,), turn, dtype=torch.uint8, device="cuda")
        inbox.put(x)
        seen.append(outbox.get(timeout=60))
        del x
    inbox.put("done")
    child.join(60)
    torch.cuda.ipc_collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [seen, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), child.exitcode]


def write(inbox: Any, outbox: Any) -> None:
    x = inbox.get(timeout=60)
    x += 1
    torch.cuda.synchronize()
    outbox.put("written")
    del x


def writes(context: Any) -> Any:
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=write, args=(inbox, outbox))
    child.start()
    x = torch.zeros(1000, device="cuda")
    inbox.put(x)
    outbox.get(timeout=60)
    answer = int(x.sum())
    child.join(60)
    return [answer, child.exitcode]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](mp.get_context("spawn"))))
