"""Wrong: A stream writes columns that lie between the first elements of overlapping windows, which another reads.
Right: A stream writes what overlapping windows show, after it has waited for their reader."""

from two_streams import main, side, torch

x = torch.empty(8, 64, device="cuda")
torch.cuda.synchronize()
y = x[:, 0:11].unfold(1, 5, 3).clone()
side.wait_stream(main)  # RIGHT
with torch.cuda.stream(side):
    x[:, 6:10].zero_()  # BUG: write-early
torch.cuda.synchronize()
