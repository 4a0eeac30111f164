"""The graph draws random numbers, whose state PyTorch sets on the stream that captures and on the
one that replays."""

import torch
from captured import captured

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * torch.rand_like(x))

for _ in range(3):
    graph.replay()
    y = out + 1
torch.cuda.synchronize()
