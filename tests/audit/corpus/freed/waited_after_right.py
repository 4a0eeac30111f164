"""The main stream waits right after the tensor is dropped, before it allocates or touches anything."""

from two_streams import main, side, torch

for _ in range(3):
    x = torch.empty(1 << 16, device="cuda").zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.clone()
    del x
    main.wait_stream(side)
torch.cuda.synchronize()
