"""The loop of the PyTorch documentation, with `DistributedDataParallel` for several workers."""

from __future__ import annotations

import torch_data
import worker
from torch_data import torch


def build(setting: worker.Setting):
    torch_data.join_group(setting)
    device = torch_data.device(setting)
    network = model = torch_data.make_model(setting.model).to(device)
    if setting.workers:
        network = torch.nn.parallel.DistributedDataParallel(model)
    if setting.jit_compile:
        network = torch.compile(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    cross_entropy = torch.nn.CrossEntropyLoss()
    data = torch_data.batches(*(t.to(device) for t in torch_data.load()), setting)
    network.train()

    def train(steps: int) -> float:
        # Tensors, read once at the end, so that no step waits for a value.
        total, correct = torch.zeros([2], device=device)
        for _ in range(steps):
            images, labels = next(data)
            optimizer.zero_grad()
            logits = network(images)
            loss = cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            correct += (logits.detach().argmax(1) == labels).sum()
        return torch_data.mean_over_workers(total / steps, setting)

    return train, {
        "versions": {"torch": torch.__version__},
        "device": f"{device.type}, {torch.get_num_threads()} threads",
    }


if __name__ == "__main__":
    worker.serve(build)
