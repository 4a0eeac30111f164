"""Memory is handed out before the main stream waits, but it is written after that."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

w = torch.empty(1 << 16, device="cuda").zero_()
x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
del x
z = torch.empty_like(w)
main.wait_stream(side)
torch.mul(w, 2.0, out=z)
torch.cuda.synchronize()
