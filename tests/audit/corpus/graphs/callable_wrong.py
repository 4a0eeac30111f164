"""Outputs of a graphed callable are collected and read at the end."""

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

layer = torch.nn.Linear(64, 64, device="cuda")
batch = torch.ones(32, 64, device="cuda")
graphed = torch.cuda.make_graphed_callables(layer, (batch,))
with torch.no_grad():
    outs = [graphed(batch) for _ in range(3)]
    total = outs[0] + outs[2]  # BUG: stale-output
torch.cuda.synchronize()
