"""A tensor that a second stream reads: protected exactly as long as it is read."""

import torch

import esper_alloc

if not torch.cuda.is_available():
    raise SystemExit("this example needs an NVIDIA GPU")
esper_alloc.enable()  # before anything touches the GPU

main = torch.cuda.current_stream()
side = torch.cuda.Stream()

batch = torch.full((1 << 24,), 0.5, device="cuda")
with esper_alloc.using(batch, stream=side):  # side waits for main, then reads
    total = batch.sum()
del batch  # its memory is reused as soon as the sum is done, and not before

# total was made on side and is read on main: order first, then mark.
main.wait_stream(side)
half = total / 2
esper_alloc.record_use(total, main)  # right after the last read there
del total

print(f"{half.item():.0f}")  # 4194304
