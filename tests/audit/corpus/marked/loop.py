"""Wrong: A loop marks the tensor in each turn before the turn's read.
Right: A loop marks the tensor in each turn after the turn's read."""

from two_streams import main, side, torch

import esper_alloc

with torch.no_grad():
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(3):
            y = x.clone()  # RIGHT
            esper_alloc.record_use(x, side)  # BUG: marked-early
            y = x.clone()  # WRONG
    del x
    w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
