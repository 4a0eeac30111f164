"""torchrec trains a DLRM by TrainPipelineSparseDist, which copies batches ahead on a stream.

The tables are not sharded, as that takes fbgemm's kernels for the GPU; its CPU build is enough.
"""

from itertools import cycle, islice
from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain


def program(run: Any) -> None:
    size, bags, width, ids = run.size(16384, 8), run.size(16, 2), run.size(128, 8), 20
    device, rows = torch.device(run.device), run.size(200_000, 50)
    keys = [f"feature_{number}" for number in range(bags)]
    tables = [
        EmbeddingBagConfig(rows, width, name=f"table_{key}", feature_names=[key]) for key in keys
    ]
    top = run.size(1024, 16)
    bags_of = EmbeddingBagCollection(tables, device=device)
    model = DLRMTrain(DLRM(bags_of, width, [top, width], [top, top, 1], dense_device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batch() -> Batch:
        sparse = KeyedJaggedTensor(
            keys, torch.randint(rows, (bags * size * ids,)),
            lengths=torch.full((bags * size,), ids), offsets=torch.arange(bags * size + 1) * ids,
            length_per_key=[size * ids] * bags,
            offset_per_key=[size * ids * number for number in range(bags + 1)],
        )  # fmt: skip
        made = Batch(torch.randn(size, width), sparse, torch.randint(2, (size,)))
        return made.pin_memory() if run.device == "cuda" else made

    batches = islice(cycle([batch() for _ in range(4)]), run.steps)
    if run.control:
        for one in batches:
            optimizer.zero_grad()
            loss, _ = model(one.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            run.step(loss)
        return
    pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    for _ in range(run.steps):
        loss, *_ = pipeline.progress(batches)
        run.step(loss)
