"""The side stream reads a view, and an event orders the main stream before it is dropped."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

base = torch.empty(4, 1 << 16, device="cuda").zero_()
row = base[2]
del base
side.wait_stream(main)
done = torch.cuda.Event()
with torch.cuda.stream(side):
    y = row.clone()
    done.record()
done.wait()
del row
z = torch.empty(4, 1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
