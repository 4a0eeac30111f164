"""Wrong: Two streams write parts of one tensor that overlap.
Right: Two streams write the two halves of one tensor."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda")
side.wait_stream(main)
x[: 1 << 15].zero_()
with torch.cuda.stream(side):
    x[1 << 14 :].zero_()  # WRONG, BUG: write-early
    x[1 << 15 :].zero_()  # RIGHT
torch.cuda.synchronize()
