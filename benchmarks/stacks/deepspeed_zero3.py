"""DeepSpeed trains a perceptron by ZeRO-3: parameters and optimizer wait on the host."""

from typing import Any

import deepspeed
import torch
from torch import nn


def program(run: Any) -> None:
    run.process_group()
    width, batch = run.size(2048, 16), run.size(2048, 4)
    on_host = {"device": "cpu", "pin_memory": run.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3, "offload_param": on_host, "offload_optimizer": on_host,
            "overlap_comm": not run.control, "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": run.size(50_000_000, 100),
        },
    }  # fmt: skip

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
            self.down = nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(Block() for _ in range(run.size(8, 2))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.randn(batch, width).to(run.device, torch.bfloat16)
    for number in range(run.steps):
        loss = nn.functional.mse_loss(engine(x.roll(number, 0)), x)
        engine.backward(loss)
        engine.step()
        run.step(loss)
