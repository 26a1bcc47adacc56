"""The models of `embeddings_worker.py` in PyTorch: embeddings with sparse gradients, and
`DistributedDataParallel` for several workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.utils import _pytree

from ctl.flags import defaults

# Of the tables and of all else. SparseAdam leaves rows without a gradient as they are.
OPTIMIZERS = {
    "sgd": (optim.SGD, optim.SGD),
    "adagrad": (optim.Adagrad, optim.Adagrad),
    "adam": (optim.SparseAdam, optim.Adam),
    "adamw": (optim.SparseAdam, optim.AdamW),
}


class Bag(nn.Module):
    """A table, the mean over the ids of an example, and a layer of two logits."""

    loss = staticmethod(nn.functional.cross_entropy)

    def __init__(self, table_rows: Sequence[int], width: int):
        super().__init__()
        (rows,) = table_rows
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="mean", sparse=True)])
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tables[0](ids.long()))


class DLRM(nn.Module):
    """`ctl.models.dlrm`, with its initial distributions."""

    def __init__(self, table_rows: Sequence[int], width: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=True) for rows in table_rows)
        for table in self.tables:
            limit = table.num_embeddings**-0.5
            nn.init.uniform_(table.weight, -limit, limit)
        vectors = 1 + len(table_rows)
        self.register_buffer("below", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.bottom = _mlp([13, *defaults.BOTTOM_UNITS, width])
        top = _mlp([width + self.below.shape[1], *defaults.TOP_UNITS])
        self.top = nn.Sequential(top, nn.Linear(defaults.TOP_UNITS[-1], 1))

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.bottom(torch.log1p(features["dense"].clamp(min=0)))
        columns = features["ids"].unbind(1)
        vectors = [table(ids) for table, ids in zip(self.tables, columns, strict=True)]
        together = torch.stack([x, *vectors], 1)
        products = torch.bmm(together, together.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.below[0], self.below[1]]], 1))

    @staticmethod
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels)


def _mlp(units: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(units[:-1], units[1:], strict=True):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, 0.0, math.sqrt(2 / (inputs + outputs)))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def trainer(
    kind: str,
    table_rows: Sequence[int],
    width: int,
    optimizer: str,
    rate: float,
    data: tuple[Any, Any],
    batch: int,
    workers: Sequence[str],
    index: int,
) -> Callable[[int], None]:
    """What trains so many steps, on this worker's part of each batch."""
    torch.manual_seed(1)
    if workers:
        torch.set_num_threads(1)  # as torchrun sets it
        where: dict[str, Any] = {"init_method": f"tcp://{workers[0]}", "rank": index}
        torch.distributed.init_process_group("gloo", world_size=len(workers), **where)
    model = {"bag": Bag, "dlrm": DLRM}[kind](table_rows, width)
    of_tables = {*model.tables.parameters()}
    others = [p for p in model.parameters() if p not in of_tables]
    sparse, dense = OPTIMIZERS[optimizer]
    optimizers = sparse(model.tables.parameters(), lr=rate), dense(others, lr=rate)
    network = nn.parallel.DistributedDataParallel(model) if workers else model
    batches = _shares(data, batch, max(1, len(workers)), index)

    def train(steps: int) -> None:
        for _ in range(steps):
            features, labels = next(batches)
            loss = model.loss(network(features), labels)
            for one in optimizers:
                one.zero_grad()
            loss.backward()
            for one in optimizers:
                one.step()

    return train


def _shares(
    data: tuple[Any, Any], batch: int, workers: int, index: int
) -> Iterator[tuple[Any, torch.Tensor]]:
    """This worker's part of every batch, without end."""
    features, labels = _pytree.tree_map(torch.from_numpy, data)
    size = batch // workers
    while True:
        for start in range(index * size, len(labels), batch):
            part = slice(start, start + size)
            yield _pytree.tree_map(lambda x, part=part: x[part], features), labels[part]
