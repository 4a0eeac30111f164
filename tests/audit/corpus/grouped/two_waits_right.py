"""Both waits are there."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x, y = torch.empty(1 << 12, device="cuda"), torch.empty(1 << 12, device="cuda")


def step():
    x.zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.clone()
    y.zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y.clone()
    main.wait_stream(side)


for _ in range(3):
    step()
torch.cuda.synchronize()
