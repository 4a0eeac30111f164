"""A view of a graph's output is kept, and read when the next replay's was made."""

import torch


def captured(function):
    """The graph of a call, after a warm-up, and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * 2)

graph.replay()
first = out.view(2, -1)
graph.replay()
second = out.view(2, -1)
y = first + second  # BUG: stale-output
torch.cuda.synchronize()
