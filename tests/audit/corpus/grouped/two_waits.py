"""Wrong: Two waits are missing between the same streams, and neither would stand for the other.
Right: Both waits are there."""

from two_streams import main, side, torch

x, y = torch.empty(1 << 12, device="cuda"), torch.empty(1 << 12, device="cuda")


def step():
    x.zero_()
    side.wait_stream(main)  # RIGHT
    with torch.cuda.stream(side):
        x.clone()  # BUG: read-early
    y.zero_()
    side.wait_stream(main)  # RIGHT
    with torch.cuda.stream(side):
        y.clone()  # BUG: read-early
    main.wait_stream(side)


for _ in range(3):
    step()
torch.cuda.synchronize()
