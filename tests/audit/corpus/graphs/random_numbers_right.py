"""The graph draws random numbers, whose state PyTorch sets on the stream that captures and on the
one that replays."""

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


x = torch.ones(1 << 16, device="cuda")
graph, out = captured(lambda: x * torch.rand_like(x))

for _ in range(3):
    graph.replay()
    y = out + 1
torch.cuda.synchronize()
