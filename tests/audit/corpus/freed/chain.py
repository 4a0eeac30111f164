"""Wrong: A tensor goes from stream to stream, and only the first of them is marked.
Right: A tensor goes from stream to stream, and the last of them is marked, which comes after the first."""

from two_streams import main, side, torch

third = torch.cuda.Stream()
x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
with torch.cuda.stream(side):
    y = x.clone()
x.record_stream(side)  # WRONG
third.wait_stream(side)
with torch.cuda.stream(third):
    z = x.clone()
x.record_stream(third)  # RIGHT
del x  # BUG: freed-in-use
w = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
