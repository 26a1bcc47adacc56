"""Images in tar files, as WebDataset writes them: beside each image, a file of its class.

The files ``0001.jpg`` and ``0001.cls`` are one example. Others of that name are left out.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from ctl.base.remote import AnyPath, map_of, opened
from ctl.data import image_files, index
from ctl.data.sources import EncodedImages
from ctl.errors import UsageError

_CLASS = "cls"  # the end of a file with a class
_LONGEST = 100  # bytes of a class
_END = bytes(tarfile.BLOCKSIZE)


class Index(NamedTuple):
    """Where the images of some tar files are."""

    paths: list[AnyPath]
    names: np.ndarray
    """Bytes [N]: the tar file and the image in it."""
    places: np.ndarray
    """int64 [N, 3]: the number of the tar file, the first byte, and the number of bytes."""
    classes: list[str]
    """Of each image."""

    def encoded(self, row: int) -> bytes:
        """The bytes of one image."""
        number, begin, length = self.places[row].tolist()
        return opened(self.paths[number]).pread(length, begin)


def index_of(paths: Sequence[AnyPath]) -> Index:
    """Reads where the images are, and their classes.

    Raises:
        UsageError: a file is missing, damaged or compressed, or an image has no class.
    """
    names, places, classes = [], [], []
    left_out: list[str] = []
    for number, path in enumerate(paths):
        with index.readable(path):
            images, of_image, others = _contents(path)
        left_out += others
        for key, image in images.items():
            if not of_image.get(key):
                raise UsageError(
                    f"{path} has no class of {image.name!r:.80}: add a file with the same name and "
                    f"the end .{_CLASS}, as WebDataset does"
                )
            names.append(os.fsencode(f"{path.name}/{image.name}"))
            places.append((number, image.offset_data, image.size))
            classes.append(of_image[key])
    if left_out:
        logging.info("%s: left out %s", paths[0].name, image_files.left_out(left_out))
    if not names:
        raise UsageError(f"{paths[0]} has no images: files {', '.join(image_files.ENDS)}")
    return Index([*paths], np.array(names), np.array(places, np.int64), classes)


def _contents(path: AnyPath) -> tuple[dict[str, tarfile.TarInfo], dict[str, str], list[str]]:
    """Returns the images of a file and their classes, by what WebDataset calls the key, and the
    names of other files."""
    images: dict[str, tarfile.TarInfo] = {}
    classes: dict[str, str] = {}
    others: list[str] = []
    try:
        with (
            path.open("rb") as archive,
            tarfile.open(fileobj=archive, mode="r:") as tar,
            path.open("rb") as file,
        ):
            for member in tar:
                if not member.isreg() or member.sparse is not None:
                    continue
                folder, name = os.path.split(member.name)
                key, _, end = name.partition(".")
                key = f"{folder}/{key}"
                if f".{end.lower()}" in image_files.ENDS:
                    if key in images:
                        raise UsageError(
                            f"{path} has two images {member.name!r:.80} and "
                            f"{images[key].name!r:.80}: which one is to be classified?"
                        )
                    images[key] = member
                elif end == _CLASS:
                    file.seek(member.offset_data)
                    classes[key] = file.read(min(member.size, _LONGEST)).decode().strip()
                else:
                    others.append(name)
            # Where it finds no more files, Python does not say why.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != _END:
                raise UsageError(f"{path} is damaged or cut short: copy it again")
    except (tarfile.TarError, UnicodeDecodeError, EOFError) as error:
        raise UsageError(
            f"{path} cannot be read as a tar file: {str(error)[:80]}; if it is compressed, "
            "decompress it"
        ) from error
    return images, classes, others


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
        self._map = map_of(found.paths[0])

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
        return self._files(number).pread(length, begin)
