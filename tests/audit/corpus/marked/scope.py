"""Wrong: A scope marks the tensor at its end, and the side stream reads it after the scope.
Right: A scope marks the tensor at its end, after all reads of the side stream."""

from two_streams import side, torch

import esper_alloc

with torch.no_grad():
    x = torch.empty(1 << 16, device="cuda").zero_()
    with esper_alloc.using(x, stream=side):  # BUG: marked-early
        y = x.clone()
    with torch.cuda.stream(side):  # WRONG
        z = x.clone()
    del x
    w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
