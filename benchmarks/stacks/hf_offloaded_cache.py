"""A Llama generates with its KV cache on the host: generate(cache_implementation="offloaded").

While a layer computes, a stream copies the next one's keys and values to the GPU.
"""

from typing import Any

import torch


def program(run: Any) -> None:
    length = run.size(2048, 16)
    more = {"attn_implementation": "sdpa", "pad_token_id": 0, "eos_token_id": None}
    model = run.llama(1024, 16, run.device, **more).to(torch.bfloat16).eval()
    for _ in range(run.steps):
        ids = torch.randint(1, model.config.vocab_size, (run.size(8, 2), length), device=run.device)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
            cache_implementation="dynamic" if run.control else "offloaded",
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        run.step(torch.stack(found.logits))
