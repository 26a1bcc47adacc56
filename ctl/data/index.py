"""Where each record of a file begins. An index that took long to make is kept on disk.

It is kept in the directory of `ctl.base.cache`, in one file for each list of data files: a line of
JSON, which has their names, sizes, times and the checksum of the rest, and the offsets as int64. An
index that is damaged, or of other files, is made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from ctl.base import cache, durable
from ctl.base.remote import AnyPath, PathLike, StorePath, opened
from ctl.errors import UsageError

# An index that was made sooner is not kept, and shows no progress bar.
_SHOW_SECONDS, _KEEP_SECONDS = 2.0, 1.0

# Begins the first line of an index. Change it with its format.
_MAGIC = "ctl index 1"

_OPEN_FILES = 256
_WALKS = 4  # files of a store that are read at once


@contextlib.contextmanager
def readable(path: PathLike) -> Iterator[None]:
    """Turns an `OSError` inside into a `UsageError` that names the file; ``path`` if it does not
    say which."""
    try:
        yield
    except FileNotFoundError as error:
        found = error.filename or path
        raise UsageError(f"{found} is missing: give another path, or prepare it again") from error
    except OSError as error:
        what = error.strerror or error
        raise UsageError(f"{error.filename or path} cannot be read: {what}") from error


def opener(paths: Sequence[AnyPath]) -> Callable[[int], Any]:
    """Returns a function that opens a file of ``paths`` by its number, see
    `ctl.base.remote.opened`, and keeps 256 of them open.

    A file that it lets go is closed when the last thread has read from it.
    """
    return functools.lru_cache(_OPEN_FILES)(lambda number: opened(paths[number]))


def offsets(
    paths: Sequence[AnyPath], walk: Callable[[AnyPath], Iterator[np.ndarray]], kind: str
) -> list[np.ndarray]:
    """Returns where the records of each file begin, and where the last one ends.

    Args:
        paths: of the files.
        walk: yields parts of the offsets of one file, int64 [n]; the last offset is the end.
        kind: tells the indices of two formats apart.

    Returns:
        int64 [records + 1] for each file, in memory or mapped from the kept index.

    Raises:
        UsageError: a file is missing or cannot be read, or ``walk`` raises it.
    """
    files = [_identity(path) for path in paths]
    name = hashlib.sha256("\0".join([kind, *(file[0] for file in files)]).encode()).hexdigest()
    kept = cache.path() / f"{kind}-{name[:24]}.index"
    if (found := _kept(kept, files)) is not None:
        return found
    started = time.monotonic()
    result = []
    with contextlib.closing(_Bar(f"indexing {len(paths)} files of {paths[0].parent}")) as bar:
        done, total = 0, sum(size for _, size, _ in files)

        def of_file(path: AnyPath) -> np.ndarray:
            parts = []
            with readable(path):
                for part in walk(path):
                    parts.append(part)
                    bar.show((done + abs(int(part[-1]))) / max(1, total))
            return np.concatenate(parts)

        with ThreadPoolExecutor(_WALKS) as threads:
            in_store = isinstance(paths[0], StorePath)
            walked = (threads.map if in_store else map)(of_file, paths)
            for found_here, (_, size, _) in zip(walked, files, strict=True):
                done += size
                result.append(found_here)
    if time.monotonic() - started >= _KEEP_SECONDS:
        _keep(kept, files, result)
    return result


def _identity(path: AnyPath) -> tuple[str, int, int]:
    with readable(path):
        found = path.stat()
    return str(path.resolve()), found.st_size, found.st_mtime_ns


def _keep(path: Path, files: Sequence[Any], parts: Sequence[np.ndarray]) -> None:
    """Writes the index. A disk that is full or read-only costs the next start the same time."""
    if cache.directory() is None:
        return
    data = np.concatenate(parts).astype("<i8")
    header = {
        "magic": _MAGIC,
        "files": files,
        "lengths": [len(part) for part in parts],
        "sha256": hashlib.sha256(data.data).hexdigest(),
    }
    line = json.dumps(header).encode()
    line += b" " * (-(len(line) + 1) % 8) + b"\n"
    unfinished = durable.scratch(path.parent, path.name)
    try:
        with open(unfinished, "wb") as file:
            file.write(line)
            data.tofile(file)
        os.replace(unfinished, path)
    except OSError as error:
        logging.warning("cannot save the index %s: %s", path, error.strerror)
        unfinished.unlink(missing_ok=True)


def _kept(path: Path, files: Sequence[Any]) -> list[np.ndarray] | None:
    """The kept index of ``files``; None if there is none that is whole and of these files."""
    try:
        if cache.why_not(path.parent):  # whoever can write there could choose what is read
            return None
        with open(path, "rb") as file:
            line = file.readline()
        header = json.loads(line)
        if header["magic"] != _MAGIC or header["files"] != [list(entry) for entry in files]:
            return None
        data = np.memmap(path, "<i8", "r", offset=len(line))
        if hashlib.sha256(data.data).hexdigest() == header["sha256"]:
            return np.split(data, np.cumsum(header["lengths"])[:-1])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    logging.warning("%s is damaged: the index is made again", path)
    return None


class _Bar:
    """A progress bar on a terminal, shown after `_SHOW_SECONDS`."""

    def __init__(self, text: str):
        self._text = text
        self._started = time.monotonic()
        self._bar: Any = None

    def show(self, done: float) -> None:
        if not self._bar:
            if time.monotonic() - self._started < _SHOW_SECONDS or not sys.stderr.isatty():
                return
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._text, total=1.0)
            self._bar.start()
        self._bar.update(self._task, completed=done)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
