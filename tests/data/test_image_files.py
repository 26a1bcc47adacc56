"""Folders of images: what is read, what is named, what is refused."""

from __future__ import annotations

import logging
import struct

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import image_files
from ctl.data.load import read_all
from ctl.data.sources import ImageFolder
from ctl.data.streaming import Streaming
from ctl.errors import UsageError

SHAPE = (2, 2, 3)
PIXELS = np.arange(12, dtype=np.uint8).reshape(SHAPE)
PNG = tf.io.encode_png(PIXELS).numpy()


def bmp(bits: int, palette: bytes = b"", compression: int = 0) -> bytes:
    """2 x 2 pixels, all 0, from below."""
    pixels = bytes(2 * 4 * -(-2 * bits // 32))
    begin = 54 + len(palette)
    header = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, bits, compression, len(pixels), 0, 0, 0, 0)
    file = b"BM" + struct.pack("<IHHI", begin + len(pixels), 0, 0, begin)
    return file + header + palette + pixels


def webp(alpha: int) -> bytes:
    """A red pixel without loss, in codes of one symbol (RFC 9649, section 3)."""
    bits, at = 0, 0
    fields = [(0, 14), (0, 14), (alpha < 255, 1), (0, 3), (0, 1), (0, 1), (0, 1)]
    for symbol in (0, 255, 0, alpha, 0):  # green, red, blue, alpha, distance
        fields += [(1, 1), (0, 1), (1, 1), (symbol, 8)]
    for value, width in fields:
        bits, at = bits | value << at, at + width
    chunk = b"\x2f" + bits.to_bytes((at + 7) // 8, "little")
    chunk = b"VP8L" + struct.pack("<I", len(chunk)) + chunk + bytes(len(chunk) % 2)
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


GRAY = b"".join(bytes([level] * 3 + [0]) for level in range(256))


def jpeg(orientation: int, order: str) -> bytes:
    image = tf.io.encode_jpeg(np.zeros([8, 8, 3], np.uint8)).numpy()
    mark = b"II" if order == "<" else b"MM"
    entries = struct.pack(f"{order}HHHIHHI", 1, 0x112, 3, 1, orientation, 0, 0)
    exif = b"Exif\0\0" + mark + struct.pack(f"{order}HI", 42, 8) + entries
    return image[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + image[2:]


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of files: ``{"cat/1.png": bytes}``."""

    def make(files):
        for name, data in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return tmp_path

    return make


def test_what_is_left_out_is_counted_and_named(folder, caplog):
    root = folder(
        {
            **{f"{name}/1.png": PNG for name in ("cat", "dog", ".ipynb_checkpoints")},
            **dict.fromkeys(("dog/2.PNG", "dog/.hidden.png", "dog/3.tif", "dog/4.tif"), PNG),
            **dict.fromkeys(("dog/deep/5.png", "6.png", "dog/folder.png/7"), PNG),
        }
    )
    (root / "owl").mkdir()
    with caplog.at_level(logging.INFO):
        source = ImageFolder(root, SHAPE)
    assert source.info.class_names == ("cat", "dog", "owl") and len(source) == 3
    images, labels = read_all(source)
    assert labels.tolist() == [0, 1, 1] and (images == PIXELS).all()
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith(": images: cat 1, dog 2, owl 0")
    assert said[1].endswith(
        ": left out 3 folders, 2 .png, 2 .tif: .ipynb_checkpoints/, 6.png, dog/.hidden.png, …"
    )
    assert said[2].endswith(": 1 of 3 classes have no images, such as owl") and len(said) == 3


def test_many_classes_are_one_line():
    names, counts = [str(n) for n in range(21)], list(range(21))
    assert image_files.per_class(names, counts) == "210 in 21 classes, 0 to 20 in each"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bmp(8, bytes(range(256)) * 4), "a BMP with a palette"),
        (bmp(4, GRAY[:64]), "a BMP with a palette"),
        (bmp(1, GRAY[:8]), "a BMP with a palette"),
        (bmp(16), "a BMP of 16 bits"),
        (bmp(24, compression=1), "a compressed BMP"),
        (bmp(32, struct.pack("<III", 0xFF, 0xFF00, 0xFF0000), 3), "a compressed BMP"),
        (bmp(24)[:14] + struct.pack("<I", 12) + bytes(40), "a BMP of OS/2"),
    ],
    ids=["8", "4", "1", "16", "compressed", "masks", "OS/2"],
)
def test_a_bmp_that_would_be_read_wrongly(folder, data, says):
    root = folder({"cat/1.bmp": data, "cat/2.png": PNG})
    with pytest.raises(UsageError, match=f"cat/1.bmp: TensorFlow cannot decode {says}: make it a"):
        Streaming(ImageFolder(root, SHAPE), global_batch_size=1)
    stream = Streaming(ImageFolder(root, SHAPE), global_batch_size=1, on_bad_record="skip")
    assert list(stream.read(np.array([0]))[0]) == [PNG]


@pytest.mark.parametrize("data", [bmp(24), bmp(32), bmp(8, GRAY)], ids=["24", "32", "gray"])
def test_other_bmp_are_read(folder, data):
    images, _ = read_all(ImageFolder(folder({"cat/1.bmp": data}), SHAPE))
    np.testing.assert_array_equal(images, np.zeros([1, *SHAPE]))


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_rotation_is_named_once(folder, warnings_of, order):
    rotated = {f"cat/{n}.jpg": jpeg(6, order) for n in range(3)}
    source = ImageFolder(folder({"cat/9.jpg": jpeg(1, order), **rotated}), (8, 8, 3))
    source.read(np.array([3]))
    assert not warnings_of()
    for _ in range(2):
        source.read(np.arange(3))
    (warning,) = warnings_of()
    assert "cat/0.jpg has an EXIF rotation" in warning
    for end in range(0, 60):  # cut short anywhere
        image_files.is_rotated(jpeg(6, order)[:end])


@pytest.mark.skipif(".webp" not in image_files.ENDS, reason="TensorFlow reads no WebP")
@pytest.mark.parametrize("alpha", [255, 128])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", ["1.WebP", "1.png"])
def test_webp(folder, alpha, channels, name):
    images, _ = read_all(ImageFolder(folder({f"cat/{name}": webp(alpha)}), (1, 1, channels)))
    wanted = {1: [76], 3: [255, 0, 0], 4: [255, 0, 0, alpha]}[channels]
    assert images[0, 0, 0].tolist() == wanted


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 2), (0, 4, 3)])
def test_what_is_no_shape_of_images(folder, shape):
    with pytest.raises(UsageError, match="with 1, 3 or 4 channels"):
        ImageFolder(folder({"cat/1.png": PNG}), shape)
