"""A batch is copied in on the side stream; the copy to the device waits on the host."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

host = torch.ones(1 << 16)
with torch.cuda.stream(side):
    x = host.to("cuda")
y = x.clone()
torch.cuda.synchronize()
