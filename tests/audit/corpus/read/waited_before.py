"""Wrong: The side stream waits, but before the write.
Right: The side stream waits for an event that comes after the write."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda")
side.wait_stream(main)  # WRONG
x.zero_()
written = main.record_event()  # RIGHT
x2 = x.clone()  # RIGHT
side.wait_event(written)  # RIGHT
with torch.cuda.stream(side):
    y = x.clone()  # BUG: read-early
torch.cuda.synchronize()
