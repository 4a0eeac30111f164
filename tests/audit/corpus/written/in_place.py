"""Wrong: The main stream changes a tensor in place while the side stream may still read it.
Right: The main stream changes a tensor in place after the side stream's read."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
main.wait_stream(side)  # RIGHT
x.zero_()  # BUG: write-early
torch.cuda.synchronize()
