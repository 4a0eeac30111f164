"""Two side streams read a tensor, and the main stream waits for both."""

import torch

main = torch.cuda.current_stream()
sides = torch.cuda.Stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda").zero_()
for side in sides:
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
del x
for side in sides:
    main.wait_stream(side)
z = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
