"""Wrong: Outputs of a graphed callable are collected and read at the end.
Right: Outputs of a graphed callable are copied into a list."""

import torch
from captured import captured

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)

layer = torch.nn.Linear(64, 64, device="cuda")
batch = torch.ones(32, 64, device="cuda")
graphed = torch.cuda.make_graphed_callables(layer, (batch,))
with torch.no_grad():
    outs = [graphed(batch) for _ in range(3)]  # WRONG
    outs = [graphed(batch).clone() for _ in range(3)]  # RIGHT
    total = outs[0] + outs[2]  # BUG: stale-output
torch.cuda.synchronize()
