"""Lightning Fabric: the loop of `torch_loop.py` with Fabric's strategy and backward."""

from __future__ import annotations

import os

import torch_data
import worker
from torch_data import torch

try:
    import lightning_fabric
except ImportError as error:
    raise SystemExit(
        f"Lightning Fabric is not installed ({error}): pip install 'ctl[bench]'"
    ) from error


def build(setting: worker.Setting):
    if setting.workers:
        torch.set_num_threads(1)  # as `torchrun` does
        host, _, port = setting.workers[0].rpartition(":")
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "WORLD_SIZE": str(len(setting.workers)),
            "RANK": str(setting.worker_index),
            "LOCAL_RANK": str(setting.worker_index),
            "LOCAL_WORLD_SIZE": str(len(setting.workers)),
        }
        fabric = lightning_fabric.Fabric(
            accelerator="cpu", devices=len(setting.workers), strategy="ddp"
        )
    else:
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = torch_data.make_model(setting.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    model, optimizer = fabric.setup(model, optimizer)
    cross_entropy = torch.nn.CrossEntropyLoss()
    data = torch_data.batches(*torch_data.load(), setting)
    model.train()

    def train(steps: int) -> float:
        total, correct = torch.zeros([]), torch.zeros([])
        for _ in range(steps):
            images, labels = next(data)
            optimizer.zero_grad()
            logits = model(images)
            loss = cross_entropy(logits, labels)
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
            correct += (logits.detach().argmax(1) == labels).sum()
        return torch_data.mean_over_workers(total / steps, setting)

    return train, {
        "versions": {"torch": torch.__version__, "lightning_fabric": lightning_fabric.__version__},
        "device": f"cpu, {torch.get_num_threads()} threads",
    }


if __name__ == "__main__":
    worker.serve(build)
