"""What the PyTorch peers share: the embedded images as tensors, the models of ctl.jobs.models in
PyTorch, and the process group.

The images are in memory and an index gathers a batch, which is faster than a `DataLoader` for data
of this size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pipeline
import worker

from ctl.errors import UsageError

try:
    import torch
    from torch import nn
except ImportError as error:
    raise SystemExit(f"PyTorch is not installed ({error}): pip install 'ctl[bench]'") from error


def device(setting: worker.Setting) -> torch.device:
    """A GPU if there is one; the CPU for several workers, which share this machine."""
    return torch.device("cuda" if torch.cuda.is_available() and not setting.workers else "cpu")


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 [n, 1, height, width] and labels int64 [n]."""
    images, labels = pipeline.arrays("fashion_mnist_mini", "train")
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


def batches(
    images: torch.Tensor, labels: torch.Tensor, setting: worker.Setting
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's part of every global batch, without end: images float32 in [0, 1], [n, 1,
    height, width], and labels int64 [n], on the device of ``images``."""
    workers = max(1, len(setting.workers))
    size = setting.global_batch_size // workers
    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for start in range(
            setting.worker_index * size,
            len(order) - setting.global_batch_size + 1,
            setting.global_batch_size,
        ):
            index = order[start : start + size]
            yield images[index].float() / 255.0, labels[index]


def make_model(name: str, seed: int = 1) -> nn.Module:
    """The model of this name in ctl.jobs.models, with its layers, parameters and initial
    distributions, for images of 28x28x1 and 10 classes. Raises `UsageError` for a name that is not
    here."""
    makers = {
        "dense": lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        "convnet": lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 13 * 13, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ),
        "resnet20": _ResNet20,
        "tiny_transformer": _TinyTransformer,
    }
    if name not in makers:
        raise UsageError(f"the PyTorch peers have no model {name!r}, only {', '.join(makers)}")
    torch.manual_seed(seed)
    model = makers[name]()
    for module in model.modules():  # the initial values of Keras
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class _Block(nn.Module):
    def __init__(self, inputs: int, filters: int):
        super().__init__()
        self.stride = 1 if inputs == filters else 2
        self.added = filters - inputs
        self.layers = nn.Sequential(
            *_conv_norm(inputs, filters, self.stride),
            nn.ReLU(),
            *_conv_norm(filters, filters),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if self.added:
            x = nn.functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added)
            )
        return torch.relu(x + y)


class _ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        blocks, inputs = [], 16
        for filters in (16, 32, 64):
            for _ in range(3):
                blocks.append(_Block(inputs, filters))
                inputs = filters
        self.layers = nn.Sequential(
            *_conv_norm(1, 16),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _conv_norm(inputs: int, filters: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, filters, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight)
    return [conv, nn.BatchNorm2d(filters, eps=1e-5, momentum=0.1)]


class _TinyTransformer(nn.Module):
    """Pre-LN blocks of width 128 with 4 heads over 7x7 patches of 4x4 pixels."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(16, 128, bias=False)
        self.positions = nn.Parameter(torch.empty(49, 128).normal_(std=0.02))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(128, eps=1e-3),
                    "qkv": nn.Linear(128, 384),
                    "out": nn.Linear(128, 128),
                    "norm2": nn.LayerNorm(128, eps=1e-3),
                    "mlp": nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(128, eps=1e-3)
        self.logits = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        n = images.shape[0]
        x = images.reshape(n, 7, 4, 7, 4).permute(0, 1, 3, 2, 4).reshape(n, 49, 16)
        x = self.dropout(self.patches(x) + self.positions)
        for block in self.blocks:
            qkv = block["qkv"](block["norm1"](x)).reshape(n, 49, 3, 4, 32).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(*qkv)
            y = block["out"](y.transpose(1, 2).reshape(n, 49, 128))
            x = x + self.dropout(y)
            x = x + self.dropout(block["mlp"](block["norm2"](x)))
        return self.logits(self.norm(x).mean(1))


def join_group(setting: worker.Setting) -> None:
    """Joins the process group at the address of the first worker. With several workers, each has
    one thread, as `torchrun` sets it."""
    if setting.workers:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{setting.workers[0]}",
            rank=setting.worker_index,
            world_size=len(setting.workers),
        )


def mean_over_workers(value: torch.Tensor, setting: worker.Setting) -> float:
    """The mean of a scalar over the workers; changes ``value``."""
    if setting.workers:
        torch.distributed.all_reduce(value)
        value /= len(setting.workers)
    return float(value)
