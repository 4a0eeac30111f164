"""Wrong: The tensor is marked, and the side stream reads it once more.
Right: The tensor is marked after the side stream's last read."""

from two_streams import main, side, torch

import esper_alloc

with torch.no_grad():
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
        z = x.clone()  # RIGHT
        esper_alloc.record_use(x, side)  # BUG: marked-early
        z = x.clone()  # WRONG
    del x
    w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
