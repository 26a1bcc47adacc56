"""Writes a dataset of TFDS as arrays, for a peer that cannot read TFDS:

python benchmarks/peers/arrays.py fashion_mnist FOLDER [DATA_DIR]
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pipeline


def main(name: str, folder: str, data_dir: str | None = None) -> None:
    """Writes ``train`` and ``test``: images uint8 [n, height, width, channels] and labels int64
    [n]."""
    for split in ("train", "test"):
        images, labels = pipeline.arrays(name, split, data_dir)
        np.save(pathlib.Path(folder) / f"{split}_images.npy", images)
        np.save(pathlib.Path(folder) / f"{split}_labels.npy", labels)


if __name__ == "__main__":
    main(*sys.argv[1:])
