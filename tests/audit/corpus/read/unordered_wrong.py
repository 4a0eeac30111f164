"""The side stream reads what the main stream has just written."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda").zero_()
with torch.cuda.stream(side):
    y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
