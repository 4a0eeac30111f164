"""Two streams read the same tensor, which needs no order."""

from two_streams import main, side, torch

x = torch.empty(1 << 16, device="cuda").zero_()
side.wait_stream(main)
for _ in range(3):
    with torch.cuda.stream(side):
        y = x.clone()
    z = x.clone()
torch.cuda.synchronize()
