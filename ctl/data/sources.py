"""Sources: examples that are read in any order, by their numbers.

`ctl.data.Streaming` reads from any object like `Source`. TFRecord and ArrayRecord are in
`ctl.data.records`, datasets of TFDS in `ctl.data.tfds_source`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from ctl.base.remote import (
    AnyPath,
    PathLike,
    StorePath,
    located,
    map_of,
    opened,
    read_spans,
)
from ctl.data import image_files, index
from ctl.data.arrays import arrays_of, as_array, check, common, content_hash, fitted, form
from ctl.data.dataset import DatasetInfo
from ctl.data.records import BadRecord, Lines
from ctl.errors import UsageError

# Rows of an array that its hash reads; examples of a source that gives no hash; and bytes at the
# beginning, in the middle and at the end of a file.
_HASHED_ROWS, _HASHED_EXAMPLES, _HASHED_BYTES = 64, 16, 4096
_HASHED_AT_ONCE = 16  # files; on a network file system, each waits for several round trips

_WEBP = b"RIFF"  # the first bytes of a file

# Lines that `JsonLines` reads for the types of their numbers.
_SAMPLED = 128


class Source(Protocol):
    """Examples, numbered from 0. `read` is called by several threads.

    A source may also have

    * ``decode(example)``: makes the example of what `read` gives for one row, by operations of
      TensorFlow, which run in parallel outside of Python; without it, `read` gives the examples;
    * ``where(index) -> str``: says where an example is, for messages;
    * ``content_hash() -> str``: identifies the data, to refuse a resume with others; without it,
      some examples do, which are read twice;
    * ``check()``: raises `UsageError` if the data are not suitable, before the first step;
    * ``reads_quickly``: True if a small example takes microseconds, so that a call of `read` may be
      for several batches;
    * ``info``: a `DatasetInfo`.
    """

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Any:
        """Returns a nest of arrays [n, ...], or a list of n encoded examples as bytes.

        ``indices`` is int64 [n], n > 0, in any order. Raises `BadRecord` for an example that
        cannot be read.
        """


def as_source(data: Any) -> Any:
    """Returns ``data`` as a `Source`: a source as it is, an array (also memory-mapped) or a tuple
    or dict of arrays as `Arrays`, anything else with a length and items as `Items`.

    Raises:
        UsageError: it is none of these.
    """
    if hasattr(data, "read") and hasattr(data, "__len__"):
        return data
    if isinstance(data, np.ndarray | tuple | dict):
        return Arrays(data)
    is_text = isinstance(data, str | bytes)  # such as a path
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_text:
        return Items(data)
    raise UsageError(
        f"a {type(data).__name__} is not a source of examples: it needs __len__, and "
        "read(indices) or __getitem__"
    )


def sample(source: Any) -> str | None:
    """A hash of some of the data, which a file of the same size with other contents does not have:
    of three places in each file, if the source has ``paths``, else of some examples. None if the
    source has a hash of its own, or gives other examples each time."""
    if paths := getattr(source, "paths", None):
        with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
            return hashlib.sha256(b"".join(threads.map(_sample_of_file, paths))).hexdigest()
    if hasattr(source, "content_hash") and not isinstance(source, ImageFolder):
        return None
    found = [_sample_of_examples(source) for _ in range(2)]
    if found[0] != found[1]:
        logging.warning(
            "the source of the data gives other examples each time they are read, so a resume "
            "cannot compare them: define content_hash()"
        )
    return found[0] if found[0] == found[1] else None


def _sample_of_file(path: AnyPath) -> bytes:
    content = hashlib.sha256()
    file = opened(path)
    for begin in (0, file.size // 2, max(0, file.size - _HASHED_BYTES)):
        content.update(file.pread(_HASHED_BYTES, begin, keep=False))
    return content.digest()


def _sample_of_examples(source: Any) -> str | None:
    rows = np.unique(np.linspace(0, len(source) - 1, _HASHED_EXAMPLES).astype(np.int64))
    while len(rows):
        try:
            data = source.read(rows)
            encoded = isinstance(data, list)
            return content_hash(_map(as_array, np.array(data, object) if encoded else data))
        except BadRecord as bad:
            left = rows[rows != bad.index]
            rows = left if len(left) < len(rows) else rows[:0]
    return None


def mapped(path: PathLike) -> np.ndarray:
    """The array of a ``.npy`` file, which is read where it is used: ``np.load`` with a mmap_mode.
    One of a store is copied to the cache.

    Raises:
        UsageError: the file is missing, cut short or cannot be read, or has Python objects.
    """
    with index.readable(path):
        try:
            file = located(path)
            file = file.copied() if isinstance(file, StorePath) else file
            array = np.load(file, mmap_mode="r")
        except (OSError, UsageError):
            raise
        except Exception as error:  # also of the parsers of headers and of .npz
            what = str(error).split(". ")[0].splitlines()[0]
            if "pickle" in what:
                what = "it does not begin as such a file does, or has Python objects"
            raise UsageError(f"{path} cannot be read as .npy: {what}"[:250]) from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path} has several arrays: save each in a .npy file of its own")
    if isinstance(array, np.memmap):
        size, wanted = file.stat().st_size, array.offset + array.nbytes
        if size != wanted:
            raise UsageError(
                f"{path} cannot be read as .npy: it has {size} bytes, and {wanted} by its header: "
                "save it again, each array in a file of its own"
            )
    return array


class Arrays:
    """A nest of arrays of equal length, in memory or `mapped`.

    Attributes:
        arrays: the nest.
    """

    def __init__(self, arrays: Any, info: DatasetInfo | None = None):
        self.info = info or DatasetInfo("arrays")
        try:
            self.arrays = _map(as_array, arrays)
        except ValueError as error:
            raise UsageError(f"{self.info.name}: there are lists of different lengths") from error
        check(self.arrays, self.info.name)
        shapes = [array.shape for array in tf.nest.flatten(self.arrays)]
        if () in shapes or len({shape[0] for shape in shapes}) != 1:
            raise UsageError(
                "the arrays of a source must have one length; their shapes are "
                + ", ".join(map(str, shapes))
            )
        self._length: int = shapes[0][0]

    def __len__(self) -> int:
        return self._length

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all examples."""
        return sum(array.nbytes for array in tf.nest.flatten(self.arrays))

    def part(self, rows: np.ndarray) -> Arrays:
        """The examples ``rows``, int64 [n]."""
        return Arrays(_map(lambda array: array[rows], self.arrays), self.info)

    def read(self, indices: np.ndarray) -> Any:
        """See `Source.read`."""
        return tf.nest.map_structure(lambda array: array[indices], self.arrays)

    def content_hash(self) -> str:
        """Returns a hash of the types, the shapes and 64 rows; reading all could take hours."""
        rows = np.linspace(0, self._length - 1, _HASHED_ROWS).astype(np.int64)
        return content_hash(self.arrays, rows)


class Items:
    """Any sequence of examples: ``items[i]``, or several at once by ``items.__getitems__``, as
    those of ``tfds.data_source`` and of PyTorch.

    Args:
        items: with a length and items.
        example: makes the nest of arrays of an item; by default the item is one.
        name: of the data.
        decode: see `Source`.
    """

    _casts = False
    _like: Any = None  # an example of the form that all must have, and its forms

    def __init__(
        self,
        items: Any,
        example: Callable[[Any], Any] = lambda item: item,
        *,
        name: str = "items",
        decode: Callable[[Any], Any] | None = None,
    ):
        self._items = items
        self._example = example
        self.info = DatasetInfo(name)
        if decode:
            self.decode = decode

    def __len__(self) -> int:
        return len(self._items)

    def where(self, index: int) -> str:
        """See `Source`."""
        return f"{self.info.name}, example {index}"

    def read(self, indices: np.ndarray) -> Any:
        """See `Source.read`."""
        numbers, nests = indices.tolist(), None
        if hasattr(self._items, "__getitems__"):
            try:
                items = self._items.__getitems__(numbers)
                nests = [arrays_of(self._example(item)) for item in items]
            except UsageError:
                raise
            except Exception:  # of the user's code; which item it was, it does not say
                pass
        nests = nests or [self._one(number) for number in numbers]
        if self._like is None:
            like = self._form_of_most(nests[0])
            self._like = like, _map(form, like)
        rows = map(self._fitted, numbers, nests)
        columns = [np.stack(column) for column in zip(*map(tf.nest.flatten, rows), strict=True)]
        return tf.nest.pack_sequence_as(self._like[0], columns)

    def _form_of_most(self, example: Any) -> Any:
        """An example of the form that all must have; ``example`` is the one read first."""
        return example

    def _one(self, number: int) -> Any:
        try:
            example = self._example(self._items[number])
        except BadRecord:
            raise
        except Exception as error:  # of the user's code
            raise BadRecord(number, f"{self.where(number)}: {error!r}"[:250]) from error
        try:
            return arrays_of(example)
        except ValueError as error:
            raise BadRecord(number, f"{self.where(number)}: {error}") from error

    def _fitted(self, number: int, nest: Any) -> Any:
        assert self._like
        like, forms = self._like
        if _map(form, nest) == forms:
            return nest
        try:
            return fitted(nest, like, cast=self._casts)
        except ValueError as error:
            what = f"{self.where(number)}: {error}: make all examples alike"
            raise BadRecord(number, what) from error


def _map(function: Callable[[Any], Any], nest: Any) -> Any:
    """``function`` of the leaves of tuples and dicts: lists are leaves, unlike in `tf.nest`."""
    if isinstance(nest, dict):
        return {key: _map(function, value) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_map(function, value) for value in nest)
    return function(nest)


class JsonLines(Lines, Items):
    """The lines of files of JSON in UTF-8, see `ctl.data.records.Lines`.

    JSON has numbers of one kind: 10 beside 10.5 is a float. The type of each number is the one that
    holds those of a sample, up to 128 lines of all files. A line with another number, such as 10.5
    where the sample has integers, or of another form than most of the sample, is a bad record.

    Args:
        paths: of the files, or of one file.
        example: makes a nest of numbers, arrays and strings of what a line says.
        name: of the data.
    """

    _casts = True

    def __init__(
        self,
        paths: Sequence[PathLike] | PathLike,
        example: Callable[[Any], Any] = lambda value: value,
        *,
        name: str = "json",
    ):
        Lines.__init__(self, paths, name=name)
        Items.__init__(self, self, example, name=name)

    def __getitem__(self, number: int) -> Any:
        (item,) = self.__getitems__([number])
        return item

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """What the lines ``numbers`` say."""
        spans = []
        for file, line in zip(*self.places(np.array(numbers)), strict=True):
            begin, end = self.span(file, line)
            spans.append((self.opened(int(file)), end - begin, begin))
        texts = zip(numbers, spans, read_spans(spans), strict=True)
        return [self._parsed(number, text, not begin) for number, (_, _, begin), text in texts]

    def _parsed(self, number: int, text: bytes, is_first: bool) -> Any:
        try:
            return json.loads(text.decode("utf-8-sig" if is_first else "utf-8"))
        except UnicodeDecodeError as error:
            what = f"it is not UTF-8: {error.reason} at byte {error.start}"
        except json.JSONDecodeError as error:
            what = f"it is not JSON: {error.msg} at character {error.pos}"
        raise BadRecord(number, f"{self.where(number)}: {what}")

    def _form_of_most(self, example: Any) -> Any:
        examples = []
        for number in np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(np.int64)).tolist():
            with contextlib.suppress(BadRecord):  # it is named when its turn comes
                examples.append(self._one(number))
        return common(examples or [example])


class EncodedImages:
    """Images and their classes, read as the bytes of a PNG, JPEG and so on. A base of sources.

    Attributes:
        info: the shape [H, W, C] to which images are resized, and the names of the classes.
    """

    _map: Callable[..., Any] = staticmethod(map)  # calls `encoded`
    has_labels = True

    def __init__(
        self,
        name: str,
        names: np.ndarray,
        labels: np.ndarray,
        image_shape: tuple[int, int, int],
        classes: Sequence[str],
    ):
        """Takes a name, bytes [N], and a class, int64 [N], of each image.

        Raises:
            UsageError: ``image_shape`` is no shape of images.
        """
        check_image_shape(image_shape)
        self._names, self._labels = names, labels
        self._image_shape, self._warned = image_shape, False
        self._names_webp = bool(np.char.endswith(np.char.lower(names), b".webp").any())
        self.info = DatasetInfo(
            name,
            image_shape=(*image_shape,),
            num_classes=len(classes),
            class_names=tuple(classes),
        )

    def where(self, index: int) -> str:
        """See `Source`."""
        raise NotImplementedError

    def path_of(self, index: int) -> str:
        """The path of an image in what was read."""
        return os.fsdecode(self._names[index])

    def encoded(self, index: int) -> bytes:
        """The bytes of an image. Raises `OSError` if they cannot be read."""
        raise NotImplementedError

    def _encoded_or_error(self, index: int) -> bytes | OSError:
        try:
            return self.encoded(index)
        except OSError as error:
            return error

    def __len__(self) -> int:
        return len(self._names)

    @property
    def labels(self) -> np.ndarray:
        """The class of each image, int64 [N]."""
        return self._labels

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all decoded images and labels."""
        return len(self) * (math.prod(self._image_shape) + 8)

    def part(self, rows: np.ndarray) -> EncodedImages:
        """The images ``rows``, int64 [n], with the same classes."""
        part = copy.copy(self)
        part._names, part._labels = self._names[rows], self._labels[rows]
        part.__dict__.pop("_content", None)
        return part

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of the files, and the labels, int64 [n]."""
        files = np.empty(len(indices), object)
        numbers = indices.tolist()
        for row, (number, data) in enumerate(
            zip(numbers, self._map(self._encoded_or_error, numbers), strict=True)
        ):
            if isinstance(data, OSError):
                raise BadRecord(number, f"{self.where(number)}: {data.strerror}") from data
            files[row] = data
            if problem := image_files.problem(files[row]):
                what = f"{self.where(number)}: TensorFlow cannot decode {problem}: make it a PNG"
                raise BadRecord(number, what)
            if not self._warned and image_files.is_rotated(files[row]):
                self._warned = True
                logging.warning(
                    "%s has an EXIF rotation, as others may: it is read as it is stored",
                    self.where(number),
                )
            if data[:4] == _WEBP and not self._names_webp:
                files[row] = self._as_png(data)
        return files, self._labels[indices]

    def decode(self, example: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (image uint8 [H, W, C], label int64 [])."""
        data, label = example
        if self._names_webp:  # this choice takes a quarter of the time of a small image
            is_webp = tf.strings.substr(data, 0, len(_WEBP)) == _WEBP
            image = tf.cond(is_webp, lambda: self._decoded_webp(data), lambda: self._decoded(data))
        else:
            image = self._decoded(data)
        return resized(image, self._image_shape), label

    def _decoded(self, data: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_image(data, channels=self._image_shape[2], expand_animations=False)

    def _decoded_webp(self, data: tf.Tensor) -> tf.Tensor:
        """Of a WebP, which is decoded with its own channels only, 3 or 4."""
        channels = self._image_shape[2]
        image = tf.io.decode_image(data, expand_animations=False)
        opaque = tf.fill([*tf.unstack(tf.shape(image)[:2]), 1], tf.constant(255, tf.uint8))
        rgb, alpha = image[..., :3], tf.concat([image[..., 3:], opaque], axis=2)[..., :1]
        if channels == 1:
            return tf.image.rgb_to_grayscale(rgb)
        return rgb if channels == 3 else tf.concat([rgb, alpha], axis=2)

    def _as_png(self, data: bytes) -> bytes:
        """A WebP of another name, with the pixels that `decode` would give; as it is if it cannot
        be decoded, which `decode` says."""
        with contextlib.suppress(tf.errors.OpError):
            return tf.io.encode_png(self._decoded_webp(tf.constant(data))).numpy()
        return data

    @functools.cached_property
    def _content(self) -> str:
        content = hashlib.sha256(repr(self.info.class_names).encode())
        content.update(self._names.tobytes() + self._labels.tobytes())
        return content.hexdigest()

    def content_hash(self) -> str:
        """Returns a hash of the names of classes and files."""
        return self._content


class ImageFolder(EncodedImages):
    """A folder with one folder of images for each class, in the order of their names.

    The log says how many images each class has, and what is left out: other files, folders in
    these folders, and all whose name begins with a dot.

    Args:
        folder: of the folders.
        image_shape: [H, W, C]; images of other sizes are resized.
        classes: names of all classes, in the order of the labels; by default those of the folders.
            Give the test data those of the training data, ``train.info.class_names``: a class that
            has no folder there would shift the labels of the classes after it.

    Raises:
        UsageError: the folder is missing, has no images, or has a folder not in ``classes``; or
            ``image_shape`` is no shape of images.
    """

    def __init__(
        self,
        folder: PathLike,
        image_shape: tuple[int, int, int],
        classes: Sequence[str] | None = None,
    ):
        check_image_shape(image_shape)
        self._folder = located(folder)
        self._map = map_of(self._folder)
        with index.readable(folder):
            found, left_out = image_files.classes(self._folder)
            classes = sorted(found) if classes is None else list(classes)
            if unknown := found - set(classes):
                raise UsageError(
                    f"{folder} has a folder {min(unknown)} that is not in classes, those of the "
                    "training data: move it away"
                )
            names = []
            for name in classes:
                path = self._folder / name
                images, others = image_files.images(path) if name in found else ([], [])
                names.append(images)
                left_out += [f"{name}/{other}" for other in others]
        counts = [len(of_class) for of_class in names]
        logging.info("%s: images: %s", folder, image_files.per_class(classes, counts))
        if left_out:
            logging.warning("%s: left out %s", folder, image_files.left_out(left_out))
        if not any(counts):
            raise UsageError(
                f"{folder} has no images: it needs a folder for each class, with files "
                + ", ".join(image_files.ENDS)
            )
        if 0 in counts:
            logging.warning(
                "%s: %d of %d classes have no images, such as %s",
                *(folder, counts.count(0), len(counts), classes[counts.index(0)]),
            )
        # One array of bytes: a million strings of Python take ten times as much memory.
        encoded = np.array([os.fsencode(name) for of_class in names for name in of_class])
        labels = np.repeat(np.arange(len(classes)), counts)
        self._folders = [os.fsencode(f"{self._folder}/{name}/") for name in classes]
        super().__init__(self._folder.name, encoded, labels, image_shape, classes)

    def _path(self, index: int) -> AnyPath:
        name = os.fsdecode(self._names[index])
        return self._folder / self.info.class_names[self._labels[index]] / name

    def where(self, index: int) -> str:
        """See `Source`."""
        return str(self._path(index))

    def path_of(self, index: int) -> str:
        """See `EncodedImages`."""
        return f"{self.info.class_names[self._labels[index]]}/{super().path_of(index)}"

    def encoded(self, index: int) -> bytes:
        """See `EncodedImages`."""
        if isinstance(self._folder, StorePath):
            return self._path(index).read_bytes()
        # `Path` would take three times as long.
        with open(self._folders[self._labels[index]] + self._names[index], "rb", 0) as file:
            return file.read()


class UnlabelledImages(EncodedImages):
    """The images of a folder, and of the folders in it, to predict for: all labels are 0.

    Args:
        folder: of the images.
        image_shape: [H, W, C]; images of other sizes are resized.
        classes: of the model.

    Raises:
        UsageError: the folder is missing or has no images.
    """

    has_labels = False

    def __init__(self, folder: PathLike, image_shape: tuple[int, int, int], classes: Sequence[str]):
        self._folder = located(folder)
        self._map = map_of(self._folder)
        with index.readable(folder):
            names, left_out = image_files.images(self._folder)
            folders = sorted(image_files.classes(self._folder)[0])
            left_out = [name for name in left_out if name.rstrip("/") not in folders]
            for inner in folders:
                found, others = image_files.images(self._folder / inner)
                names += [f"{inner}/{name}" for name in found]
                left_out += [f"{inner}/{name}" for name in others]
        if left_out:
            logging.warning("%s: left out %s", folder, image_files.left_out(left_out))
        if not names:
            raise UsageError(f"{folder} has no images: files {', '.join(image_files.ENDS)}")
        encoded = np.array([os.fsencode(name) for name in names])
        labels = np.zeros(len(names), np.int64)
        super().__init__(self._folder.name, encoded, labels, image_shape, classes)

    def where(self, index: int) -> str:
        """See `Source`."""
        return str(self._folder / self.path_of(index))

    def encoded(self, index: int) -> bytes:
        """See `EncodedImages`."""
        return (self._folder / self.path_of(index)).read_bytes()


def check_image_shape(shape: Sequence[int]) -> None:
    """Raises `UsageError` unless ``shape`` is [height, width, channels]."""
    if len(shape) != 3 or min(shape) < 1 or shape[2] not in (1, 3, 4):
        raise UsageError(
            f"image_shape is {list(shape)}: give [height, width, channels], with 1, 3 or 4 channels"
        )


def resized(image: tf.Tensor, shape: tuple[int, int, int]) -> tf.Tensor:
    """``image``, uint8 [h, w, C], in ``shape`` [H, W, C], antialiased; unchanged if it has it."""

    def resize() -> tf.Tensor:
        result = tf.image.resize(image, shape[:2], antialias=True)
        return tf.saturate_cast(tf.round(result), tf.uint8)

    if image.shape.rank == 3 and image.shape[0] is not None:
        same = tuple(image.shape[:2]) == tuple(shape[:2])
        return tf.ensure_shape(image if same else resize(), shape)
    image.set_shape([None, None, shape[2]])
    same = tf.reduce_all(tf.equal(tf.shape(image)[:2], shape[:2]))
    return tf.ensure_shape(tf.cond(same, lambda: image, resize), shape)
