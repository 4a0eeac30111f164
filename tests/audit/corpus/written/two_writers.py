"""Wrong: Two streams write the same tensor.
Right: Two streams write the same tensor, with an event between."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda")
side.wait_stream(main)
with torch.cuda.stream(side):
    x.zero_()
    written = side.record_event()  # RIGHT
written.wait(main)  # RIGHT
x.copy_(torch.ones(1 << 16))  # BUG: write-early
torch.cuda.synchronize()
