"""Wrong: The side stream reads a view, and the last reference is the view's.
Right: The side stream reads a view, and an event orders the main stream before it is dropped."""

from two_streams import main, side, torch

base = torch.empty(4, 1 << 16, device="cuda").zero_()
row = base[2]
del base
side.wait_stream(main)
done = torch.cuda.Event()  # RIGHT
with torch.cuda.stream(side):
    y = row.clone()
    done.record()  # RIGHT
done.wait()  # RIGHT
del row  # BUG: freed-in-use
z = torch.empty(4, 1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
