"""Each stream allocates, uses and drops its own memory."""

import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()

for _ in range(4):
    for stream in (main, side):
        with torch.cuda.stream(stream):
            x = torch.empty(1 << 16, device="cuda").zero_()
            y = x.clone()
            del x, y
