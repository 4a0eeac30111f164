"""A module hands out the same outputs after each replay: they show the newest."""

import torch
from captured import captured

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)


class Module:
    def __init__(self):
        self.view = None

    def __call__(self):
        graph.replay()
        self.view = out.view(2, -1) if self.view is None else self.view
        return out.contiguous(), self.view, self.view[0]


module = Module()
for _ in range(3):
    for result in module():
        y = result + 1
torch.cuda.synchronize()
