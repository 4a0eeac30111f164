"""The tensor is marked, and the side stream reads it once more."""

import torch

import esper_alloc

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

with torch.no_grad():
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
        esper_alloc.record_use(x, side)  # BUG: marked-early
        z = x.clone()
    del x
    w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
