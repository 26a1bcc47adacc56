"""The only place that writes log records to files: lines of JSON, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from ctl.actions import scalars_of
from ctl.errors import CheckpointError

SCHEMA = 1  # Raised when a key changes its meaning or goes away, not when one is added.


class JsonLines:
    """One JSON object per record, appended to a file: ``{"schema": 1, "phase": "train", ...}``.

    Every line of the file is valid JSON: numbers that are not finite become the strings "NaN",
    "Infinity" and "-Infinity" (as in protobuf's JSON mapping; ``float()`` reads them). Each line is
    written whole and at once; a run that was killed within one leaves a torn last line, which the
    next run cuts off. A resumed run appends, so steps after the checkpoint come twice: of two lines
    with the same phase and step the later one counts.

    Raises:
        CheckpointError: the file cannot be written, e.g. a full disk.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _repair(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        values = {name: _valid(value) for name, value in record.items()}
        line = json.dumps({"schema": SCHEMA, **values}, allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars as TensorBoard reads them, under ``train/`` and ``eval/`` of a directory.

    Both phases use the same names (``loss``, ``accuracy``, ...), so that they share a chart.

    Raises:
        CheckpointError: the files cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        phase = record["phase"]
        try:
            if phase not in self._writers:
                path = self.directory / phase
                self._writers[phase] = tf.summary.create_file_writer(str(path))
            with self._writers[phase].as_default(step=record["step"]):  # flushes at its end
                for name, value in scalars_of(record).items():
                    tf.summary.scalar(name, value)
        except tf.errors.OpError as error:
            reason = error.message.splitlines()[0].split("}} ")[-1]
            raise CheckpointError(f"cannot write events to {self.directory}: {reason}") from error

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _repair(path: Path) -> None:
    """Ends the file with a newline, or cuts off what follows the last one if that is no JSON."""
    if not path.is_file():
        return
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


def _valid(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot write {path}: {error.strerror}")
