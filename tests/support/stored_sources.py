"""Files of every kind that `ctl.data.Streaming` reads, and streams of them."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
import tiny_tfds

from ctl.base.remote import AnyPath
from ctl.data import InMemory, Streaming, load_columns, mix
from ctl.data.clicks import ClickLines, ClickRecords
from ctl.data.image_tars import ImageTars, index_of
from ctl.data.sources import ImageFolder, JsonLines, UnlabelledImages, mapped
from ctl.data.tfds_source import ImageSource, find

COUNT = 50
SOURCES = ("tfrecord", "array_record", "mapped", "items", "data_source", "json", "folder", "tar")
SOURCES += ("click_lines", "click_records", "images_alone")
KINDS = (*SOURCES, "columns", "mixture")


def write(root: Path) -> None:
    """Files of `COUNT` examples each. The first number of an example is its own."""
    tfds.disable_progress_bar()
    for kind in ("tfrecord", "array_record"):
        tiny_tfds.CtlTinyColor(data_dir=root / kind, file_format=kind).download_and_prepare(
            download_config=tfds.download.DownloadConfig(num_shards=5)
        )
    numbers = np.arange(COUNT)
    np.save(root / "array.npy", numbers[:, None] + np.zeros(3, np.int64))
    lines = [json.dumps({"number": n, "text": "é" * n, "row": [n, 1.5]}) for n in range(COUNT)]
    (root / "a.jsonl").write_text("\n".join(lines[:20]) + "\n")
    (root / "b.jsonl").write_text("\n".join(lines[20:]))
    clicks = ["\t".join([f"{n % 2}\t{n}", *["-1"] * 12, *[f"{n:08x}"] * 26]) for n in range(COUNT)]
    (root / "a.txt").write_text("\n".join(clicks[:20]) + "\n")
    (root / "b.txt").write_text("\n".join(clicks[20:]))
    with tf.io.TFRecordWriter(str(root / "clicks.tfrecord")) as writer:
        for n in range(COUNT):
            features = tf.train.Features()
            for name in ("label", "I1"):
                features.feature[name].int64_list.value.append(n % 2 if name == "label" else n)
            writer.write(tf.train.Example(features=features).SerializeToString())
    for n in range(COUNT):
        folder = root / "folder" / f"class{n // 10}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full([4, 6, 3], n, np.uint8)
        (folder / f"{n:02}.png").write_bytes(tf.io.encode_png(pixels).numpy())
        (root / "class").write_text(str(n // 10))
        with tarfile.open(root / f"{n // 30}.tar", "a") as tar:
            tar.add(folder / f"{n:02}.png", f"{n:02}.png")
            tar.add(root / "class", f"{n:02}.cls")


def opened(root: AnyPath, kinds: Sequence[str] = SOURCES) -> dict[str, Any]:
    """What `write` has written, of these ``kinds``."""
    color = "ctl_tiny_color"
    made = {
        "tfrecord": lambda: ImageSource(find(color, root / "tfrecord"), "train"),
        "array_record": lambda: ImageSource(find(color, root / "array_record"), "train"),
        "mapped": lambda: mapped(root / "array.npy"),
        "items": lambda: [{"number": n, "x": np.zeros(2)} for n in range(COUNT)],
        "data_source": lambda: tfds.data_source(
            color, split="train", data_dir=root / "array_record"
        ),
        "json": lambda: JsonLines([root / "a.jsonl", root / "b.jsonl"]),
        "folder": lambda: ImageFolder(root / "folder", (4, 6, 3)),
        "images_alone": lambda: UnlabelledImages(root / "folder", (4, 6, 3), ["a", "b"]),
        "click_lines": lambda: ClickLines([root / "a.txt", root / "b.txt"]),
        "click_records": lambda: ClickRecords([root / "clicks.tfrecord"]),
        "tar": lambda: ImageTars("tar", index_of([root / "0.tar", root / "1.tar"]), (4, 6, 3)),
    }
    return {kind: made[kind]() for kind in kinds}


def stream(root: Path, kind: str, size: int, training: bool = True) -> Streaming:
    """A stream of one of `KINDS`, in batches of ``size``."""
    options: dict[str, Any] = {"global_batch_size": size, "training": training, "seed": 3}
    if kind == "columns":
        names = "ctl_tiny_color", ["image"], ["label"]
        options |= {"data_dir": str(root / "tfrecord"), "resident_limit_mib": 0}
        return load_columns(*names, split="train", **options)
    if kind != "mixture":
        return Streaming(opened(root, [kind])[kind], **options)
    own = np.full([9, 4, 6, 3], 100, np.uint8), np.arange(9) % 5
    parts = [
        (stream(root, part, size), weight) for part, weight in (("folder", 2), ("tfrecord", 3))
    ]
    return mix([*parts, (InMemory(own, **options), 1)])
