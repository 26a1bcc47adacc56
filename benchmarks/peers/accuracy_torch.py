"""The recipe of `recipe.py` in PyTorch, on arrays that `arrays.py` has written."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import torch_data
from absl import flags
from recipe import TEST_BATCH, Evaluated, Recipe, race
from torch_data import torch

from ctl.flags.parsing import group

with group("This peer"):
    _ARRAYS = flags.DEFINE_string("arrays", None, "the folder in which arrays.py has written")


def load(split: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images float32 [n, 1, height, width] in [0, 1], and labels int64 [n]."""
    folder = pathlib.Path(_ARRAYS.value)
    images, labels = (
        torch.from_numpy(np.load(folder / f"{split}_{what}.npy")).to(device)
        for what in ("images", "labels")
    )
    return images.permute(0, 3, 1, 2).float() / 255.0, labels


def train(recipe: Recipe, evaluated: Evaluated) -> dict[str, Any]:
    device = torch_data.device(recipe.setting)
    images, labels = load("train", device)
    test_images, test_labels = load("test", device)
    model = torch_data.make_model(recipe.setting.model, recipe.seed).to(device)
    network = torch.compile(model) if recipe.setting.jit_compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate, eps=1e-7)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    cross_entropy = torch.nn.CrossEntropyLoss()
    size, step = recipe.setting.global_batch_size, 0

    def accuracy() -> float:
        with torch.no_grad():
            correct = [
                (model(batch).argmax(1) == answers).sum()
                for batch, answers in zip(
                    test_images.split(TEST_BATCH), test_labels.split(TEST_BATCH), strict=True
                )
            ]
        return float(sum(correct)) / len(test_labels)

    while True:
        order = torch.randperm(len(labels))
        for index in order[: len(order) // size * size].split(size):
            optimizer.zero_grad()
            loss = cross_entropy(network(images[index]), labels[index])
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            due = step % recipe.evaluate_every == 0 or step == recipe.steps
            if due and evaluated(step, accuracy()):
                return {"versions": {"torch": torch.__version__}}


if __name__ == "__main__":
    race(train)
