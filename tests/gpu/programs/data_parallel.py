"""One process, two GPUs: nn.DataParallel, and NCCL's collectives on tensors of both.

Usage: data_parallel.py ALLOCATOR

Reports the losses, exactly, and the elements of the collectives that are wrong.
"""

import sys

import torch
from device import report, use_allocator
from torch import nn
from torch.cuda import comm, nccl
from torch.nn import functional

MIB = 1 << 20
WIDTH = 1024


def train() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
    ).cuda()
    parallel = nn.DataParallel(model, device_ids=[0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(10):
        x = torch.randn(256, WIDTH, generator=draw).cuda()
        loss = functional.mse_loss(parallel(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [loss.item().hex() for loss in losses]


def collectives() -> int:
    wrong = 0
    for size in (1000, MIB, 64 * MIB):
        both = [torch.full((size,), float(d + 1), device=f"cuda:{d}") for d in range(2)]
        nccl.all_reduce(both)
        wrong += sum(int((x != 3.0).sum().item()) for x in both)
        sent = torch.full((size,), 5.0, device="cuda:0")
        received = comm.broadcast(sent, [0, 1])[1]
        wrong += int((received != 5.0).sum().item())
        total = comm.reduce_add([sent, received], destination=0)
        wrong += int((total != 10.0).sum().item())
    return wrong


if __name__ == "__main__":
    use_allocator(sys.argv[1])
    torch.use_deterministic_algorithms(True, warn_only=True)
    report(losses=train(), wrong=collectives())
