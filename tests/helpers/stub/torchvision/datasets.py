from pathlib import Path

import torch


class CIFAR10:
    base_folder = "cifar-10-batches-py"
    url = "https://example.org/cifar-10-python.tar.gz"
    train_list = [(f"data_batch_{number}", "") for number in range(1, 6)]
    test_list = [("test_batch", "")]
    meta = {"filename": "batches.meta"}

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        folder = Path(root) / self.base_folder
        files = [folder / name for name, _ in (self.train_list if train else self.test_list)]
        parts = [torch.load(file) for file in files]
        rows = torch.cat([pixels for pixels, _ in parts]).numpy()
        self.data = rows.reshape(-1, 3, 32, 32).transpose((0, 2, 3, 1))
        self.targets = [label for _, labels in parts for label in labels]


class CIFAR100(CIFAR10):
    base_folder = "cifar-100-python"
    train_list = [("train", "")]
    test_list = [("test", "")]
    meta = {"filename": "meta"}
