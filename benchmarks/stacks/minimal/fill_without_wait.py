"""A stream copies over static inputs that another one fills, and does not wait for it.

So does transformers 5.24.0's continuous batching. The filling comes last, under any allocator:

    python fill_without_wait.py
"""

import torch

SIZE = 4 << 20
copies, current = torch.cuda.Stream(), torch.cuda.current_stream()
weights = torch.ones(4096, 4096, device="cuda")
batch = torch.ones(SIZE).pin_memory()
inputs = torch.empty(SIZE, device="cuda")


def wrong(waits):
    for _ in range(100):  # the current stream is busy
        weights @ weights
    inputs.zero_()
    if waits:
        copies.wait_stream(current)
    with torch.cuda.stream(copies):
        inputs.copy_(batch, non_blocking=True)
    torch.cuda.synchronize()
    return int((inputs.cpu() != 1).sum())


wrong(True)
print(f"wrong without the wait: {wrong(False)} of {SIZE}, with it: {wrong(True)}")
