"""A Llama answers requests by generate_batch(): asynchronously, the host prepares a batch while
two streams copy the inputs and outputs of others."""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig


def program(run: Any) -> None:
    # In fp32, where tokens do not depend on how requests are batched.
    model = run.llama(1024, 12, run.device, attn_implementation="sdpa").eval()
    asked = GenerationConfig(
        max_new_tokens=run.size(12, 4), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        num_blocks=run.size(64, 32), max_batch_tokens=run.size(1024, 32),
        use_async_batching=not run.control, use_cuda_graph=False,
    )  # fmt: skip
    for _ in range(run.steps):
        prompts = [
            torch.randint(
                1, model.config.vocab_size, (int(torch.randint(4, run.size(512, 8), ())),)
            ).tolist()
            for _ in range(run.size(8, 3))
        ]
        found = model.generate_batch(
            prompts, generation_config=asked, continuous_batching_config=batching
        )
        assert len(found) == len(prompts), "its thread ended early"
        run.step([found[one].generated_tokens for one in sorted(found)])
