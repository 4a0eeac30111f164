"""The side stream waits, but before the write."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda")
side.wait_stream(main)
x.zero_()
with torch.cuda.stream(side):
    y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
