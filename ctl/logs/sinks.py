"""Writes log records to files: JSON lines, and event files of TensorBoard."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl.base import durable
from ctl.base.actions import scalars_of
from ctl.errors import CheckpointError
from ctl.logs.runs import to_json

_SCALAR = {"plugin_data": {"plugin_name": "scalars"}}
_FLOAT = {"dtype": tf.float32.as_datatype_enum, "tensor_shape": {}}
SCHEMA = 1  # Incremented when a key changes its meaning or is removed, not when one is added.


class JsonLines:
    """Appends records to a file as JSON lines: ``{"schema": 1, "phase": "train", ...}``.

    Numbers that are not finite are as in `to_json`. Each line is written at once, without a buffer.
    A killed run may leave an incomplete last line, which the next run cuts off.

    Args:
        path: of the file.
        after: the step at which a run resumes, -1 if it begins. Lines of later steps are of an
            attempt that was given up: they are moved to the end of ``PATH.old``. None keeps all.
        evaluates: whether the run evaluates again at that step, since it was killed before its
            checkpoint had the results. Then evaluations of that step are moved, too.

    Raises:
        CheckpointError: the file cannot be written, e.g. because the disk is full; or ``path`` is a
            pipe, a link or another kind of file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        after: int | None = None,
        *,
        evaluates: bool = False,
    ):
        self.path = Path(path)
        with durable.writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for file in (self.path, Path(f"{self.path}.old")):
                _check_kind(file, stat.S_ISREG, "file")
            if self.path.exists():
                _repair(self.path)
                if after is not None:
                    _set_aside(self.path, after, evaluates)
            self._file = self.path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line. Raises `CheckpointError` if it cannot be written."""
        line = to_json({"schema": SCHEMA, **record}).encode() + b"\n"
        with durable.writing(self.path):
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Writes scalars for TensorBoard, under ``train/``, ``eval/`` and ``test/`` of a directory.

    All phases use the same names (``loss``, ``accuracy``, ...), so that they share charts.

    Raises:
        CheckpointError: the files cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._files: dict[str, EventFile] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes and flushes the scalars of a record. Raises `CheckpointError` if it cannot."""
        phase = record["phase"]
        if phase not in self._files:
            path = self.directory / phase
            _check_kind(path, lambda mode: not stat.S_ISLNK(mode), "directory")
            self._files[phase] = EventFile(path)
        self._files[phase].write(scalar_messages(scalars_of(record)), record["step"])

    def close(self) -> None:
        """Closes the files of all phases."""
        for file in self._files.values():
            file.close()


class EventFile:
    """A new event file of TensorBoard in ``directory``. TensorFlow's own writer runs several
    operations for each record, which take 0.5 ms.

    Raises:
        CheckpointError: the file cannot be written.
    """

    _numbers = itertools.count()  # of this process

    def __init__(self, directory: Path):
        self._directory = directory
        place = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        with writing_events(directory):
            tf.io.gfile.makedirs(str(directory))
            self._file = tf.io.TFRecordWriter(f"{directory}/events.out.tfevents.{place}.v2")
        self._add(file_version="brain.Event:2")

    def write(self, values: Sequence[Mapping[str, Any]], step: int) -> None:
        """Writes the ``values`` (see `scalar_messages`) of ``step``, as one event, and flushes."""
        self._add(step=step, summary={"value": values})

    def close(self) -> None:
        """Closes the file."""
        with writing_events(self._directory):
            self._file.close()

    def _add(self, **content: Any) -> None:
        event = tf.compat.v1.Event(wall_time=time.time(), **content)
        with writing_events(self._directory):
            self._file.write(event.SerializeToString())
            self._file.flush()


def scalar_messages(scalars: Mapping[str, float]) -> list[dict[str, Any]]:
    """What TensorBoard's ``scalar_pb`` makes, which imports boto3 and fsspec where these are
    installed: a tenth of a second."""
    return [
        {"tag": name, "tensor": _FLOAT | {"float_val": [value]}, "metadata": _SCALAR}
        for name, value in scalars.items()
    ]


@contextlib.contextmanager
def writing_events(directory: Path) -> Iterator[None]:
    """Raises `CheckpointError` if TensorFlow cannot write event files to ``directory``."""
    try:
        yield
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0].split("}} ")[-1]
        raise CheckpointError(f"cannot write events to {directory}: {reason}") from error


def _check_kind(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    """Raises `CheckpointError` if something else has the place of a file: a pipe would block for
    ever, and a link would lead the output of a run elsewhere."""
    with contextlib.suppress(OSError):  # who opens it says why
        if not is_kind(path.lstat().st_mode):
            raise CheckpointError(f"cannot write {path}: it is not a {kind} of the run; move it")


def _repair(path: Path) -> None:
    """Completes the last line with a newline, or cuts it off if it is not valid JSON."""
    with open(path, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == len(content):
            return
        try:
            json.loads(content[whole:])
            file.write(b"\n")
        except ValueError:
            file.truncate(whole)


def _set_aside(path: Path, after: int, evaluates: bool) -> None:
    """Moves the lines of steps after ``after``, with -1 all lines, to the end of ``path.old``; with
    ``evaluates`` also the evaluations of that step."""

    def given_up(line: bytes) -> bool:
        step, phase = _of(line)
        return step > after or (evaluates and step == after and phase == "eval")

    with open(path, "r+b") as file:
        lines = file.readlines()
        if not any(map(given_up, lines)):
            return
        with open(f"{path}.old", "ab") as old:
            old.writelines(line for line in lines if given_up(line))
        file.seek(0)
        file.writelines(line for line in lines if not given_up(line))
        file.truncate()


def _of(line: bytes) -> tuple[int, Any]:
    """The step and the phase of a record; 0 and None if the line is damaged."""
    try:
        record = json.loads(line)
        step, phase = record["step"], record.get("phase")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0, None
    return (step if isinstance(step, int) else 0), phase
