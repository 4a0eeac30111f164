"""Wrong: The side stream reads a graph's output without waiting for the replay.
Right: The side stream reads a graph's output, and the next replay comes after that."""

from captured import captured
from two_streams import main, side, torch

x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)

graph.replay()  # WRONG
with torch.cuda.stream(side):  # WRONG
    y = out.clone()  # WRONG, BUG: read-early
for _ in range(3):  # RIGHT
    graph.replay()  # RIGHT
    side.wait_stream(main)  # RIGHT
    with torch.cuda.stream(side):  # RIGHT
        y = out.clone()  # RIGHT
    main.wait_stream(side)  # RIGHT
torch.cuda.synchronize()
