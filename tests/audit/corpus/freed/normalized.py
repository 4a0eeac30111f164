"""Wrong: A normaliser reads a batch on the side stream, and the batch is dropped.
Right: The batch is marked before."""

from two_streams import main, side, torch

from esper_alloc import RunningMeanStd

normalizer = RunningMeanStd(4, device="cuda")
x = torch.ones(1 << 14, 4, device="cuda")
normalizer.update(x)
side.wait_stream(main)
with torch.cuda.stream(side):
    y = normalizer.normalize(x)
x.record_stream(side)  # RIGHT
del x  # BUG: freed-in-use
z = torch.empty(1 << 14, 4, device="cuda").zero_()
torch.cuda.synchronize()
