"""The side stream waits for an event that comes after the write."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda")
x.zero_()
written = main.record_event()
x2 = x.clone()
side.wait_event(written)
with torch.cuda.stream(side):
    y = x.clone()
torch.cuda.synchronize()
