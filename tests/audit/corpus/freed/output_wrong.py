"""A tensor is dropped while the side stream may still read it, and an operator's output comes next."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

w = torch.empty(1 << 16, device="cuda").zero_()
x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
del x  # BUG: freed-in-use
z = torch.mul(w, 2.0)
main.wait_stream(side)
z.clone()
torch.cuda.synchronize()
