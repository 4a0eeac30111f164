"""Wrong: Two side streams read a tensor, and the main stream waits for one of them only.
Right: Two side streams read a tensor, and the main stream waits for both."""

import torch

main = torch.cuda.current_stream()
sides = torch.cuda.Stream(), torch.cuda.Stream()

x = torch.empty(1 << 16, device="cuda").zero_()
for side in sides:
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
del x  # BUG: freed-in-use
main.wait_stream(sides[0])  # WRONG
for side in sides:  # RIGHT
    main.wait_stream(side)  # RIGHT
z = torch.empty(1 << 16, device="cuda").zero_()
torch.cuda.synchronize()
