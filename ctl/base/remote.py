"""Files of a disk, or of an object store, read in the same way: by ranges, and one after the other.

Of a store, a `StorePath` has what is used of `pathlib.Path`. What it says of a file, its size and
its version, is what the store said first, so that all that is read is of one version; where the
store has another one by then, reading says so. With a cache, see `ctl.base.block_cache`, parts of
files are kept on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import gzip
import hashlib
import io
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from ctl.base import block_cache
from ctl.base.stores import About, StoreError, is_url, join, open_store
from ctl.errors import UsageError

# Requests at the same time. Threads wait for the store most of that time.
_REQUESTS = 64

# Parts of a file that are read before they are needed, if it is read from one end to the other.
_AHEAD = 8
_PART = 4 << 20  # bytes of them, without a cache

# A file is compared with what it was after one request of so many, and after each for a part of a
# larger one.
_COMPARED, _LARGER = 16, 1 << 20
_requests = itertools.count(1)


class StorePath:
    """A file or a folder of an object store, for ``--dataset``, ``data_dir`` and sources of data.

    It has these methods of `pathlib.Path`, for reading only. `stat` has ``st_size``, and
    ``st_mtime_ns``, a number that is another one where the file is.

    Args:
        url: such as ``s3://bucket/photos``, of any store that fsspec knows.
        cache: ``DIRECTORY:SIZE``, such as ``/tmp/cache:20GiB``, where what was read is kept. All
            processes of a machine may share it. By default, all is read from the store each time.

    Raises:
        UsageError: the package of this kind of store is missing, or the cache cannot be made.
    """

    def __init__(self, url: str, cache: str | block_cache.BlockCache | None = None):
        self._url = without_slash(url)
        self._store = _Store(self._url, cache)
        self._name = ""  # below the URL of the store

    def _at(self, name: str) -> StorePath:
        other = object.__new__(StorePath)
        other._store = self._store
        other._url = join(self._url, name)
        other._name = f"{self._name}/{name}".lstrip("/")
        return other

    def __truediv__(self, name: str | os.PathLike[str]) -> StorePath:
        return functools.reduce(StorePath._at, filter(None, os.fspath(name).split("/")), self)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"StorePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: StorePath) -> bool:
        return self._url.split("/") < other._url.split("/")  # as paths of a disk

    @property
    def path(self) -> str:
        """The URL, as `os.DirEntry` has a path."""
        return self._url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, with its dot."""
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> StorePath:
        """The folder; of the top of a store, itself."""
        folder = self._url.rpartition("/")[0]
        return self if folder.endswith("/") else StorePath(folder, self._store.cache)

    def resolve(self) -> StorePath:
        """The path itself: a store has no links."""
        return self

    def relative_to(self, other: StorePath) -> Path:
        """What follows the URL of ``other``."""
        return Path(self._url.removeprefix(other._url).lstrip("/"))

    def stat(self) -> SimpleNamespace:
        """The size, and what tells versions apart. Raises `FileNotFoundError`."""
        about = self._store.about(self)
        number = int(hashlib.sha256(about.version.encode()).hexdigest()[:15], 16)
        return SimpleNamespace(st_size=about.size, st_mtime_ns=number)

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        return self.is_file() or self.is_dir()

    def is_dir(self) -> bool:
        """Whether it is a folder: a name before others."""
        with contextlib.suppress(FileNotFoundError):
            return self._store.about(self).is_folder
        return False

    def is_file(self) -> bool:
        """Whether it is a file."""
        with contextlib.suppress(FileNotFoundError):
            return not self._store.about(self).is_folder
        return False

    def iterdir(self) -> Iterator[StorePath]:
        """What is in a folder, in any order."""
        for name in self._store.entries(self):
            yield self._at(name)

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """All below a folder; ``pattern`` is ``*``."""
        assert pattern == "*", pattern
        for entry in self.iterdir():
            yield entry
            if entry.is_dir():
                yield from entry.rglob(pattern)

    def open(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        """Opens a file to read bytes from one end to the other; it can be sought."""
        assert mode == "rb", mode
        return io.BufferedReader(_Reader(_File(self, self._store)), 1 << 17)

    def read_bytes(self) -> bytes:
        """All bytes of a file."""
        file = _File(self, self._store)
        return file.pread(file.size, 0)

    def copied(self) -> Path:
        """The file in the cache, whole, where it stays until the process ends.

        Raises:
            UsageError: there is no cache, or no room in it.
        """
        file = _File(self, self._store)
        if file.cache is None:
            raise UsageError(
                f"{self} is of a format that is read from a disk only: give a --data_cache, to "
                "which it is copied"
            )

        def fill(descriptor: int) -> None:
            with self.open() as source, open(descriptor, "wb", closefd=False) as target:
                shutil.copyfileobj(source, target, 1 << 20)

        return file.cache.whole(file.block_name(0), file.size, fill)


def without_slash(url: str) -> str:
    """``url`` without a slash at its end, unless it is the top of a store."""
    return url if url.endswith("://") else url.rstrip("/")


AnyPath = Path | StorePath
PathLike = str | os.PathLike[str] | StorePath


def located(path: PathLike, cache: str | None = None) -> AnyPath:
    """``path`` as a `StorePath` if it is a URL; else as a `Path`, with ``~`` as the home directory.

    Args:
        path: of a file or a folder.
        cache: of what is read from a store, ``DIRECTORY:SIZE``.

    Raises:
        UsageError: it is neither, or as `StorePath` raises.
    """
    if isinstance(path, StorePath):
        return path
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{path!r:.100} is no path: give a str or a pathlib.Path")
    text = os.fspath(path)
    return StorePath(text, cache) if is_url(text) else Path(text).expanduser()


def is_pattern(path: AnyPath) -> bool:
    """Whether the last part of ``path`` is a pattern of file names, such as ``*.tfrecord``."""
    return any(sign in path.name for sign in "*?[") and not path.exists()


def is_folder(path: AnyPath) -> bool:
    """Whether ``path`` may name several files: it is a folder, or `is_pattern`."""
    return path.is_dir() or is_pattern(path)


def scandir(folder: AnyPath) -> Iterable[Any]:
    """What is in a folder, or there has the names of a pattern (`is_pattern`), with the ``name``,
    ``path``, ``is_dir()`` and ``is_file()`` of each."""
    if is_pattern(folder):
        names = folder.name
        return [one for one in scandir(folder.parent) if fnmatch.fnmatchcase(one.name, names)]
    return folder.iterdir() if isinstance(folder, StorePath) else os.scandir(folder)


def inside(folder: AnyPath) -> list[AnyPath]:
    """The paths of what `scandir` finds, in order."""
    place = folder.parent if is_pattern(folder) else folder
    return [place / name for name in sorted(entry.name for entry in scandir(folder))]


def unzipped(file: BinaryIO, name: str) -> BinaryIO:
    """``file``, or what is compressed in it if its ``name`` ends in ``.gz``."""
    zipped = name.lower().endswith(".gz")
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if zipped else file


class _OnDisk:
    """A file of a disk, of which several threads read."""

    def __init__(self, path: Path):
        self._file = open(path, "rb")  # noqa: SIM115 - it is closed when nobody holds it

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def pread(self, size: int, begin: int, keep: bool = True) -> bytes:
        return os.pread(self._file.fileno(), size, begin)

    at_hand = pread

    def will_read(self, size: int, begin: int) -> None:
        os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_WILLNEED)


def opened(path: AnyPath) -> Any:
    """A file with a ``size`` and ``pread(size, begin)``, which several threads may call. It is
    closed when nobody holds it. With ``keep=False``, `pread` adds nothing to the cache."""
    return _File(path, path._store) if isinstance(path, StorePath) else _OnDisk(path)


def read_spans(spans: Sequence[tuple[Any, int, int]]) -> list[bytes]:
    """The bytes of several ``(file, size, begin)``, with files as `opened` gives them. The disk, or
    the store, works on all of them at the same time."""
    for file, size, begin in spans:
        if isinstance(file, _OnDisk):
            file.will_read(size, begin)
    found = [file.at_hand(size, begin) for file, size, begin in spans]
    missing = [row for row, data in enumerate(found) if data is None]
    asked = _threads().map if len(missing) > 1 else map

    def read(row: int) -> bytes:
        file, size, begin = spans[row]
        return file.pread(size, begin)

    for row, data in zip(missing, asked(read, missing), strict=True):
        found[row] = data
    return found


def map_of(path: AnyPath) -> Callable[..., Iterable[Any]]:
    """``map``; for files of a store, one that calls the function in several threads."""
    return _threads().map if isinstance(path, StorePath) else map


@contextlib.contextmanager
def on_disk(path: AnyPath) -> Iterator[Path]:
    """A file on the disk: ``path``, or a copy, which is deleted afterwards."""
    if not isinstance(path, StorePath):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=path.name[-64:]) as copy:
        with path.open() as file:
            shutil.copyfileobj(file, copy, _PART)
        copy.flush()
        yield Path(copy.name)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_REQUESTS, "ctl-store")


class _Store:
    """The store of a path, and what it has said of the files at and below it.

    Attributes:
        cache: None for none.
    """

    def __init__(self, url: str, cache: str | block_cache.BlockCache | None):
        self._url, self._store = url, open_store(url)
        self.cache = block_cache.from_text(cache) if isinstance(cache, str) else cache
        self._about: dict[str, About] = {}
        self._entries: dict[str, list[str]] = {}
        self._bytes = 0
        self.lock = threading.Lock()
        self.loading: dict[str, Future[bytes]] = {}

    def about(self, path: StorePath) -> About:
        """What the store said first of a file or a folder. Raises `FileNotFoundError`."""
        if found := self._about.get(path._name):
            return found
        return self._note(path._name, self.about_now(path))

    def about_now(self, path: StorePath) -> About:
        """What the store says now. Raises `FileNotFoundError`."""
        with _explained(path):
            return self._store.about(path._name)

    def _note(self, name: str, about: About) -> About:
        with self.lock:
            if name in self._about:  # what the store said first
                return self._about[name]
            self._about[name] = about
            self._bytes += about.size
        if self.cache:
            self.cache.announce(self._url, self._bytes, len(self._about))
        return about

    def entries(self, path: StorePath) -> list[str]:
        """The names of what is in a folder. Raises `FileNotFoundError`, `NotADirectoryError`."""
        if (names := self._entries.get(path._name)) is None:
            if not self.about(path).is_folder:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path._url)
            with _explained(path):
                found = self._store.entries(path._name)
            for name, about in found.items():
                self._note(f"{path._name}/{name}".lstrip("/"), about)
            names = self._entries[path._name] = [*found]
        return names

    def read(self, path: StorePath, begin: int, end: int) -> bytes:
        """A range of a file. Raises `FileNotFoundError`."""
        with _explained(path):
            return self._store.read(path._name, begin, end)


@contextlib.contextmanager
def _explained(path: StorePath) -> Iterator[None]:
    """Names ``path`` in the errors of its store.

    Raises:
        UsageError: the store refuses, or does not answer.
        FileNotFoundError: there is no such file.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path._url) from error
    except StoreError as error:
        raise UsageError(str(error)) from error


class _File:
    """A file of a store, of which several threads read.

    Attributes:
        size: in bytes.
        part: bytes that are read, and kept, at once.
        cache: None for none.
    """

    def __init__(self, path: StorePath, store: _Store):
        self._path, self._store, self.cache = path, store, store.cache
        self._as_first = store.about(path)
        if self._as_first.is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path._url)
        self.size = self._as_first.size
        self.part = self.cache.block if self.cache else _PART
        about = f"{path._url}\0{self._as_first.version}\0{self.size}\0{self.part}"
        self._about = hashlib.sha256(about.encode())
        self._names: dict[int, str] = {}

    def block_name(self, number: int) -> str:
        """The name of a part in the cache."""
        if (found := self._names.get(number)) is None:
            name = self._about.copy()
            name.update(f"\0{number}".encode())
            found = self._names[number] = name.hexdigest()[:32]
        return found

    def at_hand(self, size: int, begin: int) -> bytes | None:
        """As `pread`, if it is in one part, which is in the cache; else None."""
        size = min(size, self.size - begin)
        number, first = divmod(begin, self.part)
        if self.cache is None or first + size > self.part:
            return None
        return self.cache.get(self.block_name(number), first, size)

    def pread(self, size: int, begin: int, keep: bool = True) -> bytes:
        """As `os.pread`. Raises `UsageError` if the store fails, or the file has changed."""
        end, found = min(begin + size, self.size), []
        asked = begin  # from there to `begin`, neither is in the cache nor will be
        while begin < end:
            number, first = divmod(begin, self.part)
            count = min(end - begin, self.part - first)
            if (data := self._of_cache(number, first, count, keep)) is not None:
                if asked < begin:
                    found.append(self._asked(asked, begin - asked))
                found.append(data)
                asked = begin + count
            begin += count
        if asked < begin:
            found.append(self._asked(asked, begin - asked))
        return found[0] if len(found) == 1 else b"".join(found)

    def _of_cache(self, number: int, first: int, count: int, keep: bool) -> bytes | None:
        """Bytes of a part that is in the cache, or comes into it."""
        if self.cache is None:
            return None
        name = self.block_name(number)
        data = self.cache.get(name, first, count)
        if data is None and keep and self.cache.keeps(name):
            data = self._kept(name, number)[first : first + count]
        return data

    def load(self, number: int) -> bytes:
        """A whole part."""
        return self.pread(self.part, number * self.part)

    def _kept(self, name: str, number: int) -> bytes:
        """A part that is read from the store and kept. Threads that need the same one wait."""
        with self._store.lock:
            future = self._store.loading.get(name)
            if mine := future is None:
                future = self._store.loading[name] = Future()
        if not mine:
            return future.result()
        assert self.cache
        try:
            begin = number * self.part
            data = self._asked(begin, min(self.part, self.size - begin), whole=True)
            self.cache.put(name, data)
            future.set_result(data)
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._store.lock:
                del self._store.loading[name]
        return data

    def _asked(self, begin: int, size: int, whole: bool = False) -> bytes:
        """A range, from the store. A part of a larger file, to be kept, is of its version."""
        path = self._path
        data = self._store.read(path, begin, begin + size)
        is_part = whole and (size < self.size or size > _LARGER)
        if len(data) != size or is_part or not next(_requests) % _COMPARED:
            with contextlib.suppress(FileNotFoundError):
                if self._store.about_now(path) == self._as_first and len(data) == size:
                    return data
            raise UsageError(
                f"{path} has changed in the store since this run began: start again, and leave the "
                "files as they are while a run reads them"
            )
        return data


class _Reader(io.RawIOBase):
    """The bytes of a file, one after the other: parts are read before they are needed."""

    def __init__(self, file: _File):
        self._file, self._at, self._last, self._width = file, 0, -1, 1
        self._loading: dict[int, Future[bytes]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size, part = self._file.size, self._file.part
        if self._at >= size:
            return 0
        number, first = divmod(self._at, part)
        if number != self._last:
            in_order = number == self._last + 1
            self._width = min(2 * self._width, _AHEAD) if in_order else 1
            wanted = range(number, min(number + self._width, -(-size // part)))
            self._loading = {
                n: self._loading.get(n) or _threads().submit(self._file.load, n) for n in wanted
            }
            self._last = number
        data = self._loading[number].result()
        count = min(len(buffer), len(data) - first)
        buffer[:count] = data[first : first + count]
        self._at += count
        return count
