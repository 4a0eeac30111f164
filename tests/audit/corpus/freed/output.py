"""Wrong: A tensor is dropped while the side stream may still read it, and an operator's output comes next.
Right: Memory is handed out before the main stream waits, but it is written after that."""

from two_streams import main, side, torch

w = torch.empty(1 << 16, device="cuda").zero_()
x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
del x  # BUG: freed-in-use
z = torch.mul(w, 2.0)  # WRONG
z = torch.empty_like(w)  # RIGHT
main.wait_stream(side)
z.clone()  # WRONG
torch.mul(w, 2.0, out=z)  # RIGHT
torch.cuda.synchronize()
