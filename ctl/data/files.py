"""Datasets in files of the user's: folders of images, tables and clicks; their parts and splits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from ctl.base.interactive import names_arguments
from ctl.base.names import (
    BINARY,
    CLASSES,
    CLICKS,
    DROP,
    HOLD_OUT,
    RECORDS,
    TABLES,
    TARS,
    UNKNOWN,
    click_day,
    click_files,
    has_table,
    suffix,
)
from ctl.base.remote import (
    AnyPath,
    PathLike,
    inside,
    is_folder,
    is_pattern,
    located,
    map_of,
)
from ctl.data import clicks, image_files, image_tars, index, tables
from ctl.data.dataset import DatasetInfo
from ctl.data.image_tars import ImageTars
from ctl.data.in_memory import InMemory
from ctl.data.load import Splits, in_memory_or_streamed, refuse_common
from ctl.data.order import are_classes, oversampled
from ctl.data.sources import Arrays, EncodedImages, ImageFolder, UnlabelledImages
from ctl.data.streaming import Streaming
from ctl.data.tables import PARTS, Choice, Table
from ctl.errors import UsageError
from ctl.flags.record_schema import parse_record_schema

# Images of several sizes are resized to this one.
_SIZE = (64, 64)
_LOOKED_AT = 16  # classes, and images of each, for the sizes
_MOST_CLASSES = 20  # in the log


class Files:
    """The data of a file or a folder of the user's.

    A folder has a folder of images for each class, or ``train`` and ``test`` (also ``validation``)
    with these, or ``train.csv`` and ``test.csv``, or ``train-0000.tar``. A file is a table, see
    `ctl.data.tables`, a tar file, see `ctl.data.image_tars`, or click data, see `ctl.data.clicks`.
    Of several days of clicks, ``day_0``, ``day_1``, …, the last one is ``test``.

    A part ``train[90%:]`` is the last tenth of a permutation that is the same in each run, because
    files are often sorted by class.

    Attributes:
        schema: JSON. What the data of a run have alike: ``image_shape``, ``features``, ``labels``,
            ``classes``, ``words``, ``missing``, ``mean``, ``deviation``; and what was found:
            ``columns``, ``examples``.
    """

    @names_arguments
    def __init__(
        self,
        path: PathLike,
        *,
        image_shape: tuple[int, int, int] | None = None,
        features: Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        loss_of: str = UNKNOWN,
        schema: Mapping[str, Any] | None = None,
        record_schema: str | None = None,
        missing: str | None = None,
        needs_labels: bool = True,
    ):
        """Reads tables, and looks for images.

        Args:
            path: of the file or the folder; also a URL, see `ctl.base.remote.StorePath`.
            image_shape: [H, W, C] to resize images to; by default that of all images, or 64x64 if
                they differ in size.
            features: columns of a table, or one; see `ctl.data.tables.choose`.
            labels: as ``features``.
            loss_of: what the labels of a table are for the loss: ``"classes"``, ``"binary"`` or
                ``"numbers"``. By default, text is classes, and so are numbers that are 0, 1, …
                without a gap; others stay numbers.
            schema: of the training data, if this is other data for the same model.
            record_schema: the features of TFRecord files that are read, and their types, such as
                ``"image:uint8[28,28],label:int64"``; by default all, by what they hold.
            missing: what becomes of the values that a table lacks: with ``"mean"``, features have
                the mean of the training examples, and text no word; with ``"drop"``, the rows are
                left out. By default, they are refused.
            needs_labels: False for data to predict for, with the ``schema`` of the training data.
                They may lack the columns of labels, or values in them, and images the folders of
                the classes: then all labels are 0, and ``has_labels`` is false.

        Raises:
            UsageError: the data are missing, damaged or not suitable.
        """
        path = located(path)
        features = [features] if isinstance(features, str) else features
        labels = [labels] if isinstance(labels, str) else labels
        known = _checked(schema or {})
        self.schema: dict[str, Any] = {"path": str(path), "examples": {}}
        self._columns: list[list[str]] = []
        self._last_column = ""  # that has the labels because nothing says which does
        self._sources: dict[str, Any] = {}
        self._needs_labels = needs_labels
        self._is_loss_unknown = loss_of == UNKNOWN
        if parts := _clicks(path):
            self._sources = {part: clicks.source(of, path.name) for part, of in parts.items()}
            self._info = clicks.info(path.name)
        elif found := _tables(path, record_schema):
            whole = next(iter(found.values())) if known["features"] else _part(found, path)
            choice = Choice(*(known[name] for name in Choice._fields))
            if not known["features"]:
                if not needs_labels:
                    raise UsageError(
                        f"{path.name} is a table, and the model was not trained on one: which "
                        "columns it takes is unknown"
                    )
                choice = tables.choose(whole, features, labels, loss_of, missing)
                if labels is None and choice.labels[0].lower() not in tables.LABELS:
                    self._last_column = choice.labels[0]
                if hint := tables.comma_hint(whole, f"{path.name}: "):
                    logging.warning("%s", hint)
                if features is None and (hint := tables.typing_hint(whole, choice)):
                    logging.warning("%s", hint)
                if features is None and (hint := tables.words_hint(whole, choice)):
                    logging.info("%s: %s", path.name, hint)
            self._whole, self._missing, self._is_of_model = whole, missing, bool(known["features"])
            self._is_fitted = self._is_of_model
            self._set_choice(choice)
            self._info = DatasetInfo(path.name)
            for part, table in found.items():
                self._sources[part] = _Rows(
                    table, choice, missing, self._is_of_model, loss_of, needs_labels
                )
            self._set_info(choice, loss_of, known)
        else:
            images = _images(path)
            shape = image_shape or known["image_shape"] or _image_shape(path, _part(images, path))
            make = functools.partial(_source, shape=shape, needs_labels=needs_labels)
            first = make(path.name, _part(images, path), classes=known["classes"])
            names = first.info.class_names
            self._sources = {
                part: first if part == "train" else make(f"{path.name} {part}", one, classes=names)
                for part, one in images.items()
            }
            self._info = dataclasses.replace(first.info, name=path.name)
            self.schema |= {"image_shape": shape, "classes": names}

    def _set_info(self, choice: Choice, loss_of: str, known: Mapping[str, Any]) -> None:
        """Sets what the info of a table is, but for what follows from the training examples. A
        column of 0 and 1 for a loss of these has two classes, as text has."""
        labels = next(iter(self._sources.values())).labels
        names = choice.classes
        every = [source.labels for source in self._sources.values()]
        if loss_of == BINARY and labels.ndim == 1 and all(map(are_classes, every)):
            names = names or ("0", "1")
        classes = len(choice.classes) if loss_of in (CLASSES, UNKNOWN) and choice.classes else None
        self._info = dataclasses.replace(
            self._info,
            class_names=names,
            num_classes=classes,
            num_outputs=None if classes else labels[0].size,
            mean=known["mean"],
            deviation=known["deviation"],
        )

    def _set_choice(self, choice: Choice) -> None:
        """Sets how columns become numbers, and what is said of it."""
        self._choice, self._columns = choice, tables.described(self._whole, choice)
        self.schema |= choice._asdict() | {"columns": self._columns}

    def has_labels(self, split: str) -> bool:
        """Whether the examples of ``split`` have labels, see ``needs_labels``."""
        source = self._sources[self._rows(split)[0]]
        return getattr(source, "has_labels", True)

    def names(self, split: str) -> tuple[str, list[str]]:
        """What the examples of ``split`` are called, and of each, in their order: the path of an
        image, in the folder; or the number of a row, from 0, in the file that was read."""
        part, rows = self._rows(split)
        source = self._sources[part]
        if isinstance(source, EncodedImages):
            return "path", [source.path_of(row) for row in rows.tolist()]
        if isinstance(source, _Rows) and source.table.taken_from:
            rows = source.table.taken_from[1][rows]
        return "row", [*map(str, rows.tolist())]

    def evaluation(self, *, whole: bool = False) -> str:
        """What to evaluate on: ``test``, or else ``validation``; or else the last tenth of
        ``train``, and with ``whole`` all of it."""
        parts = [part for part in ("test", "validation") if part in self._sources]
        return [*parts, "train" if whole else "train[90%:]"][0]

    def splits(self, given: Splits = Splits(), *, select: bool = False) -> Splits:  # noqa: B008
        """What to train on, to evaluate on meanwhile, and to test on at the end.

        Args:
            given: names some of these.
            select: whether the evaluation selects the best checkpoint: not on the test data.

        Raises:
            UsageError: there is no such part, or an example would be trained on and evaluated,
                unless both are given.
        """
        last = self.evaluation()
        chosen = Splits("train[:90%]" if "[" in last else "train", last)
        if select and "validation" in self._sources:
            chosen = Splits("train", "validation", "test" if last == "test" else None)
        elif select:
            chosen = Splits("train[:90%]", "train[90%:]", last)
            if "[" in last:
                chosen = Splits("train[:80%]", "train[80%:90%]", last)
        if given.evaluation:
            chosen = chosen._replace(evaluation=given.evaluation, test=None)
        chosen = chosen._replace(train=given.train or chosen.train)
        for split in chosen[1:]:
            self._check_apart(chosen.train or "", split, bool(given.train and given.evaluation))
        return chosen

    def _check_apart(self, train: str, other: str | None, meant: bool) -> None:
        if other is None:
            return
        (part, rows), (other_part, other_rows) = self._rows(train), self._rows(other)
        if part != other_part or not (common := len(np.intersect1d(rows, other_rows))):
            return
        share = f"{common} of the {len(other_rows)}"
        refuse_common(self._info.name, share, train, other, meant)

    def _rows(self, split: str) -> tuple[str, np.ndarray]:
        """The part that ``split`` is of, and its examples there, int64 [n]."""
        sizes = {
            part: types.SimpleNamespace(num_examples=len(source))
            for part, source in self._sources.items()
        }
        try:
            ((part, begin, end),) = [
                (found.splitname, found.from_ or 0, found.to)
                for found in tfds.core.ReadInstruction.from_spec(split).to_absolute(sizes)
            ]
        except (ValueError, KeyError, AssertionError) as error:
            raise UsageError(
                f"{self._info.name} has no split {split!r:.80}; it has {', '.join(sizes)}, and "
                f"parts of one of them: to hold out a fifth, give {HOLD_OUT}"
            ) from error
        count = len(self._sources[part])
        rows = np.arange(count)
        if (begin, end) != (0, count):
            # The legacy generator is the one whose numbers NumPy never changes.
            rows = np.sort(np.random.RandomState(0).permutation(count)[begin:end])
        if not len(rows):
            raise UsageError(
                f"{self._info.name}: the split {split} of {count} examples is empty: give a larger "
                "one with --train_split and --eval_split"
            )
        return part, rows

    @names_arguments
    def load(
        self,
        split: str,
        *,
        global_batch_size: int,
        training: bool,
        seed: int = 0,
        oversample: bool = False,
        resident_limit_mib: float = 1024,
        shuffle_block: int = 1,
        on_bad_record: str = "stop",
    ) -> InMemory | Streaming:
        """Loads ``split``, the training data first; see `ctl.data.load` for the others.

        Args:
            oversample: repeats examples of a training until all classes have as many, see
                `ctl.data.order.oversampled`.

        Raises:
            UsageError: there is no such split, a file is damaged, there are fewer examples than a
                training batch, or no classes to ``oversample``.
        """
        part, rows = self._rows(split)
        if oversample and training:
            if not self._info.class_names:
                raise UsageError(f"{self._info.name} has no classes: leave out --oversample")
            rows = rows[oversampled(self._labels(part)[rows])]
        source: Any = self._sources[part]
        if isinstance(source, _Rows):
            source = self._arrays(source, rows, training)
        else:
            source = source.part(rows)
        if training and self._columns and source.arrays[0].ndim == 2:
            values = source.arrays[0].astype(np.float64)
            deviation = values.std(axis=0)
            self._info = dataclasses.replace(
                self._info,
                mean=tuple(values.mean(axis=0).tolist()),
                deviation=tuple(np.where(deviation > 0, deviation, 1.0).tolist()),
            )
            self.schema |= {"mean": self._info.mean, "deviation": self._info.deviation}
        source.info = dataclasses.replace(self._info, split=split)
        source.description = f"{self._info.name} {split}, {len(rows)} examples"
        self.schema["examples"][split] = self._counts(part, rows)
        return in_memory_or_streamed(
            source,
            resident_limit_mib,
            shuffle_block,
            on_bad_record,
            global_batch_size=global_batch_size,
            training=training,
            seed=seed,
        )

    def _arrays(self, source: _Rows, rows: np.ndarray, training: bool) -> Arrays:
        """The examples ``rows``, int64 [n], of a table. Those of a training decide what stands
        for words and for values that are missing."""
        table = source.table.take(rows)
        if training and not self._is_of_model:
            self._set_choice(tables.fitted(table, self._choice, self._missing))
            self._is_fitted = True
        if not self._is_fitted and (self._choice.words or self._choice.missing):
            raise UsageError(
                f"{self._info.name}: load the training data first: words and means are theirs"
            )
        examples = tables.features(table, self._choice)
        self._info = dataclasses.replace(self._info, image_shape=examples.shape[1:])
        return Arrays((examples, source.labels[rows]))

    def _labels(self, part: str) -> np.ndarray:
        """The classes of all examples of a part, integers [N]."""
        source = self._sources[part]
        labels = source.labels if isinstance(source, EncodedImages | _Rows) else source.arrays[1]
        return labels.astype(np.int64)

    def _counts(self, part: str, rows: np.ndarray) -> int | list[int]:
        """The examples of each class; of all, if there are no classes."""
        if not self._info.class_names or not self.has_labels(part):
            return len(rows)
        return np.bincount(self._labels(part)[rows], minlength=len(self._info.class_names)).tolist()

    def table(self) -> list[str]:
        """What was found and loaded, for the log: columns, and examples of each class."""
        lines = _aligned(self._columns)
        if self._last_column:
            name = tables.plain(self._last_column)
            lines.append(
                f"  {name} has the labels, as the last column that is no feature; --labels names "
                "another"
            )
        examples = self.schema["examples"]
        counts = {split: n if isinstance(n, list) else [n] for split, n in examples.items()}
        counted = any(isinstance(n, list) for n in examples.values())
        rows = [["class" if counted else "", *counts]]
        names = self._info.class_names[:_MOST_CLASSES] if counted else ()
        for number, name in enumerate(names):
            rows.append([tables.plain(name), *(str(n[number]) for n in counts.values())])
        if counted and (left := len(self._info.class_names) - len(names)):
            rows.append([f"{left} others", *(str(sum(n[len(names) :])) for n in counts.values())])
        rows.append(["all", *(str(sum(n)) for n in counts.values())])
        lines += _aligned(rows)
        if counted and not self._info.num_classes:  # one output
            lines.append(f"  the positive class, label 1, is {tables.plain(names[1])}")
        elif self._is_loss_unknown and self._columns and not self._is_of_model:
            lines.append(f"  {self._what_labels_are()}")
        return lines

    def _what_labels_are(self) -> str:
        if classes := self._info.num_classes:
            return f"labels are classes, 0 to {classes - 1}: an output for each"
        number = self._info.num_outputs
        outputs = "1 output" if number == 1 else f"{number} outputs"
        return f"labels are these numbers: {outputs} (classes begin at 0)"


class _Rows:
    """The rows of a table. `Files` makes arrays of those that it loads.

    Attributes:
        table: without the rows that are left out.
        labels: see `ctl.data.tables.labels`; float32 [N] if the loss takes no classes. Zeros if
            there are none, and none are needed.
        has_labels: whether there are.
    """

    def __init__(
        self,
        table: Table,
        choice: Choice,
        missing: str | None,
        is_other: bool,
        loss_of: str,
        needs_labels: bool,
    ):
        columns = [table.columns.get(name) for name in choice.labels]
        self.has_labels = needs_labels or not any(
            column is None or tables.missing_rows(column).any() for column in columns
        )
        if not self.has_labels:
            choice = choice._replace(labels=())
        names = [name for name in (*choice.features, *choice.labels) if name in table.columns]
        kept = tables.complete(table, names) if missing == DROP else table
        if len(kept) < len(table):
            logging.info(
                "%s: %d of %d rows have no value in a column that is used, and are left out",
                *(table.name, len(table) - len(kept), len(table)),
            )
        tables.check(kept, choice, not is_other)
        shape = (len(kept), len(columns)) if len(columns) > 1 else len(kept)
        kind = np.int64 if choice.classes else np.float32
        targets = tables.labels(kept, choice) if self.has_labels else np.zeros(shape, kind)
        self.table = kept
        takes_classes = loss_of in (CLASSES, UNKNOWN)
        self.labels = targets if takes_classes else targets.astype(np.float32)

    def __len__(self) -> int:
        return len(self.table)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns: the first is flush left, numbers are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number and cell[:1] in "-0123456789" else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _part(parts: Mapping[str, Any], path: AnyPath) -> Any:
    """The training part."""
    if "train" not in parts:
        raise UsageError(f"{path} has {' and '.join(parts)}, but no train")
    return parts["train"]


def _text(path: AnyPath) -> str:
    """``path`` in a form in which it is one, see `ctl.base.names.is_path`."""
    return os.path.abspath(path) if isinstance(path, Path) else str(path)


def _clicks(path: AnyPath) -> dict[str, list[AnyPath]]:
    """The files of click data by their part; none of other data."""
    found = click_files(_text(path))
    if not is_folder(path):
        return {"train": [path]} if found else {}
    by_name = {file.name: file for file in inside(path)}
    files = [by_name[os.path.basename(file)] for file in found]
    if len(files) > 1 and click_day(files[0].name) is not None:
        return {"train": files[:-1], "test": files[-1:]}
    return _by_part(path, files, "click data")


def _tables(path: AnyPath, record_schema: str | None) -> dict[str, Table]:
    """The tables of a file, or of the files of a folder, by their part; none of other folders."""
    types = parse_record_schema(record_schema) if record_schema else None
    with index.readable(path):
        if not is_folder(path):
            path.stat()
            if suffix(path.name) not in TABLES:
                return {}
            return tables.read(path, types)
        if not has_table(_text(path)):
            return {}
        files = [p for p in inside(path) if suffix(p.name) in TABLES and p.is_file()]
    found = {
        part: [tables.read(file, types)["train"] for file in of_part]
        for part, of_part in _by_part(path, files, "tables").items()
    }
    return {part: tables.joined(path.name, of_part) for part, of_part in found.items()}


def _by_part(path: AnyPath, files: Sequence[AnyPath], kind: str) -> dict[str, list[AnyPath]]:
    """The ``files`` of a folder by their part, which their names begin with. Those of a pattern,
    and of kinds that are often in several files, are all for the training if none names a part."""
    words = [re.split(r"[-_.]", file.name.lower()) for file in files]
    parts = [PARTS.get(first) for first, *_ in words]
    may_be_of_one = is_pattern(path) or {suffix(file.name) for file in files} <= {RECORDS, TARS}
    if files and may_be_of_one and PARTS.keys().isdisjoint(word for name in words for word in name):
        logging.info("%s: for the training: %s", path, tables.listed(p.name for p in files))
        return {"train": [*files]}
    found: dict[str, list[AnyPath]] = {}
    for file, part in zip(files, parts, strict=True):  # of train-00000-of-00002.csv
        if part is None:
            raise UsageError(
                f"{path} has the {kind} {tables.listed(p.name for p in files)}: name them train "
                "and test, or give one of them"
            )
        found.setdefault(part, []).append(file)
    return found


def _images(path: AnyPath) -> dict[str, AnyPath | image_tars.Index]:
    """The folders of classes, or what is in the tar files, by their part."""
    with index.readable(path):
        if path.is_file():
            if suffix(path.name) != TARS:
                raise UsageError(
                    f"{path} is no file that ctl reads: give a folder of images, or a file "
                    f"{', '.join((*TABLES, TARS, CLICKS))}"
                )
            return {"train": image_tars.index_of([path])}
        files = [p for p in inside(path) if suffix(p.name) == TARS and p.is_file()]
    if not files:
        return {**_folders(path)}
    parts = _by_part(path, files, "tar files")
    return {part: image_tars.index_of(of_part) for part, of_part in parts.items()}


def _source(
    name: str,
    images: AnyPath | image_tars.Index,
    shape: tuple[int, int, int],
    classes: Sequence[str],
    needs_labels: bool,
) -> EncodedImages:
    if isinstance(images, image_tars.Index):
        return ImageTars(name, images, shape, classes or None)
    if classes and not needs_labels:
        with index.readable(images):
            folders, _ = image_files.classes(images)
        if not folders or folders - {*classes}:
            return UnlabelledImages(images, shape, classes)
    return ImageFolder(images, shape, classes or None)


def _folders(path: AnyPath) -> dict[str, AnyPath]:
    """The folders that hold those of the classes, by their part."""
    with index.readable(path):
        names, _ = image_files.classes(path)
    found = {PARTS[name.lower()]: path / name for name in sorted(names) if name.lower() in PARTS}
    if "train" not in found:
        return {"train": path}
    if others := sorted(name for name in names if name.lower() not in PARTS):
        logging.warning("%s: left out %s, beside train", path, tables.listed(others))
    return found


def _image_shape(path: AnyPath, images: AnyPath | image_tars.Index) -> tuple[int, int, int]:
    """The shape of the images; if they differ in size, one that is chosen."""
    shapes = []
    for data in _samples(images):
        with contextlib.suppress(tf.errors.OpError):  # it is named when it is read
            shapes.append(tuple(tf.io.decode_image(data, expand_animations=False).shape))
    if not shapes:  # `ImageFolder` says what is missing
        return (*_SIZE, 3)
    colours = {shape[2] >= 3 for shape in shapes}
    said = "are in colour" if all(colours) else "some are in colour" if any(colours) else "are grey"
    sizes = {shape[:2] for shape in shapes}
    shape = (*(sizes.pop() if len(sizes) == 1 else _SIZE), 3 if any(colours) else 1)
    logging.info(
        "%s: images become %d,%d,%d, because %d that were looked at %s, and %s: "
        "--image_shape=HEIGHT,WIDTH,CHANNELS gives another shape",
        *(path, *shape, len(shapes)),
        "differ in size" if sizes else "have this size",
        said,
    )
    return shape


def _samples(images: AnyPath | image_tars.Index) -> Iterator[bytes]:
    """Some images of some classes, drawn: every so many of them may be alike."""
    drawn = random.Random(0)
    if not isinstance(images, image_tars.Index):
        with index.readable(images):
            for name in sorted(image_files.classes(images)[0])[:_LOOKED_AT]:
                files, _ = image_files.images(images / name)
                chosen = sorted(drawn.sample(files, min(len(files), _LOOKED_AT)))
                paths = [images / name / file for file in chosen]
                yield from map_of(images)(lambda path: path.read_bytes(), paths)
    else:
        count = len(images.names)
        for row in sorted(drawn.sample(range(count), min(count, _LOOKED_AT**2))):
            yield images.encoded(row)


def _checked(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema says, as tuples, and dicts of columns; it is not trusted. Empty where it says
    nothing."""
    kinds: dict[str, Any] = {"features": str, "labels": str, "classes": str, "image_shape": int}
    kinds |= {"mean": (int, float), "deviation": (int, float)}
    result: dict[str, Any] = {}
    for name, kind in kinds.items():
        value = schema.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(one, kind) for one in value):
            raise UsageError(f"config.json: the {name} of the data cannot be {str(value)[:80]}")
        result[name] = tuple(value)
    for name, fits in (("words", _are_words), ("missing", _are_numbers)):
        value = schema.get(name) or {}
        if not isinstance(value, dict) or not fits(value, result.get("words", {})):
            raise UsageError(f"config.json: the {name} of the data cannot be {str(value)[:80]}")
        result[name] = value
    return result


def _are_words(of_columns: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    """Whether each column has a list of text."""
    lists = [*of_columns.values()]
    return all(isinstance(one, list | tuple) and all(type(w) is str for w in one) for one in lists)


def _are_numbers(of_columns: Mapping[str, Any], words: Mapping[str, Any]) -> bool:
    """Whether each column has a number, but those with words, which have text."""
    kinds = {name: str if name in words else (int, float) for name in of_columns}
    return all(isinstance(value, kinds[name]) for name, value in of_columns.items())
