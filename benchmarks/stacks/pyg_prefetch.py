"""A graph network trains on batches that PrefetchLoader copies on a stream of its own.

The host is ahead of the GPU, as wherever a step takes longer than making a batch.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, PrefetchLoader
from torch_geometric.nn import GraphSAGE


def program(run: Any) -> None:
    nodes, width, graphs = run.size(4000, 40), run.size(128, 8), run.size(8, 2)

    def graph() -> Data:
        count = int(torch.randint(nodes // 2, nodes, ()))
        edges = torch.randint(count, (2, 20 * count))
        return Data(torch.randn(count, width), edges, y=torch.randint(16, (count,)))

    loader = DataLoader([graph() for _ in range(graphs * run.steps)], batch_size=graphs)
    model = GraphSAGE(width, run.size(512, 16), 8, 16).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in loader if run.control else PrefetchLoader(loader, torch.device(run.device)):
        if run.control:
            batch = batch.to(run.device)
        loss = cross_entropy(model(batch.x, batch.edge_index), batch.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
