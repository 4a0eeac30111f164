"""Wrong: A detached output is read, by a view of it, when the next one was detached.
Right: The output itself is read after each replay, and shows the newest."""

import torch
from captured import captured

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)

graph.replay()  # WRONG
kept = [out.detach()]  # WRONG
graph.replay()  # WRONG
kept.append(out.detach())  # WRONG
y = kept[0][:8] + 1  # WRONG, BUG: stale-output
for _ in range(3):  # RIGHT
    graph.replay()  # RIGHT
    y = out + 1  # RIGHT
torch.cuda.synchronize()
