"""Memory is allocated and filled on the side stream."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

host = torch.ones(1 << 16)
with torch.cuda.stream(side):
    x = torch.empty(1 << 16, device="cuda")
    x.copy_(host, non_blocking=True)
torch.cuda.synchronize()
