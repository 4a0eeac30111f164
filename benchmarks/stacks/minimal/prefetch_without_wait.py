"""A loader copies batches on a stream of its own, into memory that may still be read.

So does PyTorch Geometric 2.8.0's PrefetchLoader. Sums are wrong, but not with automatic uses:

    python prefetch_without_wait.py
    esper-alloc run --uses automatic prefetch_without_wait.py
"""

import torch

BATCHES, SIZE = 20, 4 << 20  # 16 MiB each
copies, current = torch.cuda.Stream(), torch.cuda.current_stream()
weights = torch.ones(4096, 4096, device="cuda")
batches = [torch.full((SIZE,), number, dtype=torch.int32).pin_memory() for number in range(BATCHES)]


def load(batch):
    with torch.cuda.stream(copies):
        return batch.to("cuda", non_blocking=True)


def step(x):
    current.wait_stream(copies)
    for _ in range(20):  # the GPU falls behind the host
        weights @ weights
    return x.sum()


step(load(batches[0]))
torch.cuda.synchronize()
sums = [step(load(batch)) for batch in batches]  # each batch is dropped before it is read
wrong = sum(int(found) != number * SIZE for number, found in enumerate(sums))
print(f"{wrong} of {BATCHES} sums are wrong")
