"""Two streams write the two halves of one tensor."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda")
side.wait_stream(main)
x[: 1 << 15].zero_()
with torch.cuda.stream(side):
    x[1 << 15 :].zero_()
torch.cuda.synchronize()
