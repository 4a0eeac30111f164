"""Wrong: The graph's input is filled on the side stream while the graph may still read it.
Right: The graph's input is filled on the side stream after the replay that reads it."""

from captured import captured
from two_streams import main, side, torch

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)

host = torch.ones(1 << 16).pin_memory()
graph.replay()  # RIGHT
side.wait_stream(main)
graph.replay()  # WRONG
with torch.cuda.stream(side):
    x.copy_(host, non_blocking=True)  # BUG: write-early
torch.cuda.synchronize()
