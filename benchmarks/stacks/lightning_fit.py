"""Lightning's Trainer fits a perceptron with autocast, as its first example does."""

from typing import Any

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def program(run: Any) -> None:
    batch, width = run.size(2048, 8), run.size(4096, 16)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            hidden = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
            self.layers = nn.Sequential(*hidden, nn.Linear(width, 10))

        def training_step(self, given: list[torch.Tensor], _: int) -> torch.Tensor:
            return cross_entropy(self.layers(given[0]), given[1])

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            run.step(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    data = TensorDataset(torch.randn(4 * batch, width), torch.randint(10, (4 * batch,)))
    trainer = lightning.Trainer(
        accelerator="gpu" if run.device == "cuda" else "cpu", devices=1, precision="bf16-mixed",
        max_steps=run.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data, batch, pin_memory=run.device == "cuda"))
