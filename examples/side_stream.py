"""A tensor that a second stream reads: protected exactly as long as it is read."""

import torch

import esper_alloc

if not torch.cuda.is_available():
    raise SystemExit("this example needs an NVIDIA GPU")

esper_alloc.enable()  # before anything touches the GPU
side, x = torch.cuda.Stream(), torch.full((1 << 24,), 0.5, device="cuda")
with esper_alloc.using(x, stream=side) as scope:
    total = x.sum()  # on side, after x was written
del x  # reused when the sum is done, and not before
print(scope.take(total).item())  # 8388608.0; the current stream waits for side
