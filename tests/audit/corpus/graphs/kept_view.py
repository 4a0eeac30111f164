"""Wrong: A view of a graph's output is kept, and read when the next replay's was made.
Right: A graph's output is copied before the next replay."""

import torch
from captured import captured

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)

graph.replay()
first = out.view(2, -1)  # WRONG
first = out.view(2, -1).clone()  # RIGHT
graph.replay()
second = out.view(2, -1)
y = first + second  # BUG: stale-output
torch.cuda.synchronize()
