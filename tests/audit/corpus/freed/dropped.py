"""Wrong: A tensor is dropped while the side stream may still read it.
Right: The main stream waits for the side stream before the tensor is dropped."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
main.wait_stream(side)  # RIGHT
del x  # BUG: freed-in-use
z = torch.empty(1 << 16, device="cuda").zero_()
main.wait_stream(side)  # WRONG
