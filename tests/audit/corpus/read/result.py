"""Wrong: The main stream reads a result of the side stream without waiting.
Right: The main stream waits for the side stream's result."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
main.wait_stream(side)  # RIGHT
z = y.clone()  # BUG: read-early
torch.cuda.synchronize()
