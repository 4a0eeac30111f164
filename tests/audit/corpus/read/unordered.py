"""Wrong: The side stream reads what the main stream has just written.
Right: The side stream waits for the main stream before it reads."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)  # RIGHT
with torch.cuda.stream(side):
    y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
