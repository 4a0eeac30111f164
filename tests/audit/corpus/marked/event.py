"""Wrong: The mark's event was recorded before the last read.
Right: The mark's event was recorded after the last read."""

from two_streams import main, side, torch

import esper_alloc

done = torch.cuda.Event()
with torch.no_grad():
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
        z = x.clone()  # RIGHT
        done.record()
        z = x.clone()  # WRONG
    esper_alloc.record_use(x, event=done)  # BUG: marked-early
    del x  # BUG on native: freed-in-use
    w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
