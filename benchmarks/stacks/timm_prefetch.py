"""A ResNet trains on images that timm's PrefetchLoader copies and normalizes on its stream."""

from typing import Any

import timm
import torch
from timm.data.loader import PrefetchLoader
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def program(run: Any) -> None:
    batch, side = run.size(128, 4), run.size(224, 32)
    images = torch.randint(256, (4 * batch, 3, side, side), dtype=torch.uint8)
    data = TensorDataset(images, torch.randint(10, (len(images),)))
    loader = PrefetchLoader(
        DataLoader(data, batch, pin_memory=run.device == "cuda"), device=torch.device(run.device)
    )
    if run.control:
        loader.is_cuda = False  # then it copies on the current stream
    model = timm.create_model(f"resnet{run.size(50, 18)}", num_classes=10).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(0, run.steps, 4):
        for x, target in loader:
            with torch.autocast(run.device, torch.bfloat16):
                loss = cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
