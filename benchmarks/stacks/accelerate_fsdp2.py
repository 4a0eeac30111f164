"""accelerate trains a Llama by FSDP2, which gathers weights on a stream of its own."""

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin


def program(run: Any) -> None:
    run.process_group()
    model = run.llama(2048, 12)
    vocabulary = model.config.vocab_size
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=run.device == "cpu")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    torch.manual_seed(accelerator.process_index)  # other data everywhere
    for _ in range(run.steps):
        ids = torch.randint(vocabulary, (2, run.size(1024, 8))).to(run.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
