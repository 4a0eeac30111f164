"""Two streams read the same tensor, which needs no order."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
for _ in range(3):
    with torch.cuda.stream(side):
        y = x.clone()
    z = x.clone()
torch.cuda.synchronize()
