"""Images in tar files: each with its class, read where it is; what is not whole is refused."""

from __future__ import annotations

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from ctl.base.names import has_table, is_path
from ctl.data import Files, Streaming, index
from ctl.data.image_tars import ImageTars, index_of
from ctl.errors import UsageError


def png(value: int) -> bytes:
    return tf.io.encode_png(np.full([4, 6, 3], value, np.uint8)).numpy()


def write(path, files: dict[str, bytes | str], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def shard(first: int, count: int, classes: tuple[str, ...]) -> dict[str, bytes | str]:
    """Examples as WebDataset writes them; all bytes of an image are its number."""
    files: dict[str, bytes | str] = {}
    for n in range(first, first + count):
        files |= {f"{n:04}.cls": classes[n % len(classes)], f"{n:04}.json": "{}"}
        files[f"{n:04}.png"] = png(n)
    return files


@pytest.mark.parametrize("classes", [("2", "10"), ("dog", "cat")])
def test_images_of_several_files(tmp_path, classes):
    """Numbers are sorted as numbers, names as text."""
    write(tmp_path / "train-0000.tar", shard(0, 6, classes))
    write(tmp_path / "train-0001.tar", shard(6, 6, classes))
    write(tmp_path / "val-0000.tar", shard(12, 1, classes))  # of the first class only
    files = Files(tmp_path)
    assert files.splits() == ("train", "validation", None)
    train = files.load("train", training=True, global_batch_size=2)
    names = ("2", "10") if classes[0] == "2" else ("cat", "dog")
    assert train.info.class_names == names and train.info.image_shape == (4, 6, 3)
    images, labels = train.arrays
    assert sorted(images[:, 0, 0, 0].tolist()) == list(range(12))
    for image, label in zip(images, labels.tolist(), strict=True):
        assert (image == image[0, 0, 0]).all()
        assert names[label] == classes[image[0, 0, 0] % 2]
    validation = files.load("validation", training=False, global_batch_size=1)
    assert [names[label] for label in validation.arrays[1]] == [classes[0]]


def test_one_file_is_streamed_by_its_splits(tmp_path):
    write(tmp_path / "all.tar", shard(0, 20, ("a", "b")))
    assert is_path("tips.xlsx") and not is_path("mnist:3.0.1") and not is_path("mine.py:load")
    assert is_path("all.tar") and not has_table(str(tmp_path / "all.tar"))
    files = Files(tmp_path / "all.tar", image_shape=(2, 2, 1))
    seen = []
    for split in ("train[:80%]", "train[80%:]"):
        data = files.load(split, training=False, global_batch_size=2, resident_limit_mib=0)
        assert isinstance(data, Streaming) and data.info.image_shape == (2, 2, 1)
        images, labels = data.read(np.arange(data.num_examples))
        decoded = [tf.io.decode_png(image).numpy()[0, 0, 0] for image in images]
        assert [value % 2 for value in decoded] == labels.tolist()
        seen += decoded
    assert sorted(seen) == list(range(20))
    assert files.table()[-1].split() == ["all", "16", "4"]


def test_threads_that_close_files_of_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_OPEN_FILES", 1)
    for n in range(3):
        write(tmp_path / f"{n}.tar", shard(0, 20, ("a", "b")))
    source = ImageTars("x", index_of(sorted(tmp_path.iterdir())), (4, 6, 3))
    with ThreadPoolExecutor(8) as threads:
        read = [*threads.map(source.encoded, [7 * n % 60 for n in range(4000)])]
    assert read[:60] * 66 == read[:3960]


def test_the_content_is_what_a_resume_compares(tmp_path):
    hashes = set()
    for classes in (("a", "b"), ("b", "a"), ("a", "b")):
        write(tmp_path / "x.tar", shard(0, 4, classes))
        data = Files(tmp_path / "x.tar").load(
            "train", training=True, global_batch_size=2, resident_limit_mib=0
        )
        hashes.add(data.fingerprint()["content"])
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"1.png": b"", "2.cls": "a"}, "has no class of '1.png': add a file with the same name"),
        ({"1.png": b"", "1.jpg": b"", "1.cls": "a"}, "has two images '1.jpg' and '1.png'"),
        ({"1.cls": "a"}, "has no images: files "),
        ({"1.png": b"", "1.cls": b"\xff"}, "cannot be read as a tar file"),
    ],
)
def test_files_that_are_not_whole(tmp_path, files, says):
    write(tmp_path / "x.tar", files)
    with pytest.raises(UsageError, match=says):
        Files(tmp_path / "x.tar")


def test_damaged_and_compressed_files(tmp_path):
    path = tmp_path / "x.tar"
    write(path, shard(0, 4, ("a", "b")))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for size in (0, 700, 1300, end, end + 512 - end % 512):  # the last is between two files
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"x\.tar (cannot be read|is damaged or cut short)"):
            Files(path)
    write(path, shard(0, 4, ("a", "b")), "w:gz")
    with pytest.raises(UsageError, match="if it is compressed, decompress it"):
        Files(path)


def test_a_class_that_the_training_data_have_not(tmp_path):
    write(tmp_path / "train.tar", shard(0, 4, ("a", "b")))
    write(tmp_path / "test.tar", shard(0, 4, ("a", "c")))
    with pytest.raises(UsageError, match="has the class 'c', which the training data have not"):
        Files(tmp_path)
