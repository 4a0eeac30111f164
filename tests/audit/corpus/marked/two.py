"""Wrong: Two tensors are marked together, and one of them is read again.
Right: Two tensors are marked together, and one of them is read again on its own stream."""

from two_streams import main, side, torch

import esper_alloc

with torch.no_grad():
    a = torch.empty(1 << 16, device="cuda").zero_()
    b = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        a.copy_(b)
        esper_alloc.record_use([a, b], side)  # BUG: marked-early
        c = b.clone()  # WRONG
    c = b.clone()  # RIGHT
    del a, b
    w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
