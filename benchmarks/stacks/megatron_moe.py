"""Megatron-core trains a GPT with mixtures of experts on one GPU: shared experts run beside the
routed ones on a stream, and a quarter of the optimizer works on the host, with two more."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def program(run: Any) -> None:
    run.process_group()
    parallel_state.initialize_model_parallel()
    on_gpu, width, length = run.device == "cuda", run.size(512, 32), run.size(1024, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = TransformerConfig(
        num_layers=run.size(8, 2), hidden_size=width, num_attention_heads=max(width // 64, 2),
        num_moe_experts=8, moe_router_topk=2, moe_shared_expert_intermediate_size=4 * width,
        moe_shared_expert_overlap=not run.control, add_bias_linear=False,
        moe_token_dispatcher_type="alltoall" if on_gpu else "allgather",
        hidden_dropout=0.0, attention_dropout=0.0, bf16=on_gpu, params_dtype=dtype,
        use_cpu_initialization=True,
    )  # fmt: skip
    if on_gpu:
        model_parallel_cuda_manual_seed(0)
    else:  # Megatron knows CUDA alone
        torch.cuda.current_device = lambda: "cpu"  # type: ignore
        get_cuda_rng_tracker().fork = nullcontext
    vocabulary = run.size(4096, 64)
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    model = GPTModel(config, spec, vocabulary, length).to(run.device, dtype)
    adam: Any = torch.optim.AdamW
    optimizer = adam(model.parameters(), lr=1e-4)
    if on_gpu:
        optimizer = HybridDeviceOptimizer(
            list(model.parameters()), offload_fraction=0.25, cpu_optimizer_cls=adam, lr=1e-4,
            gpu_optimizer_cls=adam, overlap_cpu_optimizer_d2h_h2d=not run.control,
        )  # fmt: skip
    places = torch.arange(length, device=run.device)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=run.device).triu(1)
    for _ in range(run.steps):
        ids = torch.randint(vocabulary, (run.size(4, 2), length)).to(run.device)
        loss = model(ids, places.expand_as(ids), mask, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
