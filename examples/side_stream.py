"""A tensor that a second stream reads: protected exactly as long as it is read."""

import torch

import esper_alloc

if not torch.cuda.is_available():
    raise SystemExit("this example needs an NVIDIA GPU")
esper_alloc.enable()  # before anything touches the GPU

side = torch.cuda.Stream()
batch = torch.full((1 << 24,), 0.5, device="cuda")

with esper_alloc.using(batch, stream=side) as scope:
    total = batch.sum()  # on side, after batch was written
del batch  # reused as soon as the sum is done, and not before

total = scope.take(total)  # from here on this stream may read it
print(f"{total.item():.0f}")  # 8388608
