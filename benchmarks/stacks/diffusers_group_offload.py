"""A diffusion transformer denoises while its layers come from the host one by one: leaf-level
group offloading, with a stream and record_stream."""

from typing import Any

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel
from diffusers.hooks import apply_group_offloading


@torch.no_grad()
def program(run: Any) -> None:
    model = DiTTransformer2DModel(
        num_attention_heads=run.size(16, 2), attention_head_dim=run.size(72, 8),
        num_layers=run.size(28, 2), sample_size=run.size(32, 8), num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )  # fmt: skip
    model = model.to(torch.bfloat16).eval()
    if run.device == "cuda":
        apply_group_offloading(
            model, onload_device=torch.device("cuda"), offload_device=torch.device("cpu"),
            offload_type="leaf_level", use_stream=not run.control, record_stream=not run.control,
        )  # fmt: skip
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(run.steps, device=run.device)
    shape = (run.size(16, 2), 4, model.config.sample_size, model.config.sample_size)
    x = torch.randn(shape, dtype=torch.bfloat16).to(run.device)
    labels = torch.arange(len(x), device=run.device)
    for time in scheduler.timesteps:
        noise = model(x, timestep=time.expand(len(x)), class_labels=labels).sample
        x = scheduler.step(noise, time, x).prev_sample
        run.step(x)
