"""Images in tar files, as WebDataset writes them: beside each image, a file of its class.

The files ``0001.jpg`` and ``0001.cls`` are one example. Others of that name are left out.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging

from ctl.data import image_files, index
from ctl.data.sources import EncodedImages
from ctl.errors import UsageError

_CLASS = "cls"  # the end of a file with a class
_LONGEST = 100  # bytes of a class
_END = bytes(tarfile.BLOCKSIZE)


class Index(NamedTuple):
    """Where the images of some tar files are."""

    paths: list[Path]
    names: np.ndarray
    """Bytes [N]: the tar file and the image in it."""
    places: np.ndarray
    """int64 [N, 3]: the number of the tar file, the first byte, and the number of bytes."""
    classes: list[str]
    """Of each image."""

    def encoded(self, row: int) -> bytes:
        """The bytes of one image."""
        number, begin, length = self.places[row].tolist()
        with open(self.paths[number], "rb") as file:
            return os.pread(file.fileno(), length, begin)


def index_of(paths: Sequence[Path]) -> Index:
    """Reads where the images are, and their classes.

    Raises:
        UsageError: a file is missing, damaged or compressed, or an image has no class.
    """
    names, places, classes = [], [], []
    left_out: list[str] = []
    for number, path in enumerate(paths):
        images: dict[str, tuple[str, int, int]] = {}
        of_image: dict[str, str] = {}
        with index.readable(path):
            try:
                with tarfile.open(path, "r:") as tar:
                    for member in tar:
                        folder, name = os.path.split(member.name)
                        key, _, end = name.partition(".")
                        key = f"{folder}/{key}"
                        if not member.isreg() or member.sparse is not None or not key:
                            continue
                        if f".{end.lower()}" in image_files.ENDS:
                            if key in images:
                                raise UsageError(
                                    f"{path} has two images {member.name!r:.80} and "
                                    f"{images[key][0]!r:.80}: which one is to be classified?"
                                )
                            images[key] = (member.name, member.offset_data, member.size)
                        elif end == _CLASS:
                            content = tar.extractfile(member)
                            of_image[key] = (
                                content.read(_LONGEST).decode().strip() if content else ""
                            )
                        else:
                            left_out.append(name)
                    # Where it finds no more files, Python does not say why.
                    with open(path, "rb") as file:
                        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != _END:
                            raise UsageError(f"{path} is damaged or cut short: copy it again")
            except (tarfile.TarError, UnicodeDecodeError, EOFError) as error:
                raise UsageError(
                    f"{path} cannot be read as a tar file: {str(error)[:80]}; if it is compressed, "
                    "decompress it"
                ) from error
        for key, (name, begin, length) in images.items():
            if key not in of_image or not of_image[key]:
                raise UsageError(
                    f"{path} has no class of {name!r:.80}: add a file with the same name and the "
                    f"end .{_CLASS}, as WebDataset does"
                )
            names.append(os.fsencode(f"{path.name}/{name}"))
            places.append((number, begin, length))
            classes.append(of_image[key])
    if left_out:
        logging.info("%s: left out %s", paths[0].name, image_files.left_out(left_out))
    if not names:
        raise UsageError(f"{paths[0]} has no images: files {', '.join(image_files.ENDS)}")
    return Index([*paths], np.array(names), np.array(places, np.int64), classes)


class ImageTars(EncodedImages):
    """The images of an `Index`. See `ctl.data.sources.ImageFolder` for the other arguments.

    Raises:
        UsageError: an image has a class that is not in ``classes``.
    """

    def __init__(
        self,
        name: str,
        found: Index,
        image_shape: tuple[int, int, int],
        classes: Sequence[str] | None = None,
    ):
        distinct = {*found.classes}
        is_number = all(one.isdecimal() for one in distinct)
        classes = [*(classes or sorted(distinct, key=int if is_number else str))]
        if unknown := distinct - {*classes}:
            raise UsageError(
                f"{name} has the class {min(unknown)!r:.80}, which the training data have not"
            )
        numbers = {one: number for number, one in enumerate(classes)}
        labels = np.array([numbers[one] for one in found.classes])
        counts = np.bincount(labels, minlength=len(classes)).tolist()
        logging.info("%s: images: %s", name, image_files.per_class(classes, counts))
        super().__init__(name, found.names, labels, image_shape, classes)
        self._places, self._files = found.places, index.opener(found.paths)

    def part(self, rows: np.ndarray) -> EncodedImages:
        """See `EncodedImages`."""
        part = super().part(rows)
        assert isinstance(part, ImageTars)
        part._places = self._places[rows]
        return part

    def where(self, index: int) -> str:
        """See `Source`."""
        return os.fsdecode(self._names[index])

    def encoded(self, index: int) -> bytes:
        """See `EncodedImages`."""
        number, begin, length = self._places[index].tolist()
        file = self._files(number)  # is closed when nobody holds it, which other threads decide
        return os.pread(file.fileno(), length, begin)
