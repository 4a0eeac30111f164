"""Each stream allocates, uses and drops its own memory."""

from two_streams import main, side, torch

for _ in range(4):
    for stream in (main, side):
        with torch.cuda.stream(stream):
            x = torch.empty(1 << 16, device="cuda").zero_()
            y = x.clone()
            del x, y
