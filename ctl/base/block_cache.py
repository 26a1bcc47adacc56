"""A cache of parts of files on a disk, of bounded size, which several processes share.

A block is a file of the directory: a CRC-32, and the bytes that it is of. It gets its name, which
says of what it is, by one ``rename``, so a process that is killed leaves no wrong block. One that
is torn by a power cut is not taken. The file ``lock`` has the number of bytes in use. Who adds a
block holds its ``flock``, and deletes the blocks that were used longest ago if there is no room.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import logging

from ctl.base.units import size_text
from ctl.errors import UsageError

_OWN = re.compile(r"[0-9a-f]{32}(\.file)?|tmp-[0-9a-f]{16}")
_SUM = 4  # bytes
_PAGE = 1 << 12  # files take whole ones
_LARGEST_BLOCK = 4 << 20
_SMALLEST = 1 << 20
_ROOM = 0.05  # of the limit, that is made at once
_TOUCH_SECONDS = 60.0
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parsed(text: str) -> tuple[str, int]:
    """The directory and the bytes of ``/tmp/cache:20GiB``. Raises `UsageError` for another form."""
    directory, _, size = text.rpartition(":")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])iB", size)
    if not directory or not found:
        raise UsageError(
            f"the data cache {text!r:.200} is not DIRECTORY:SIZE, such as /tmp/cache:20GiB, with a "
            "size in KiB, MiB, GiB or TiB"
        )
    limit = int(float(found[1]) * _UNITS[found[2]])
    if limit < _SMALLEST:
        raise UsageError(f"the data cache {text} is too small: give it 1MiB or more")
    return directory, limit


@functools.cache
def from_text(text: str) -> BlockCache:
    """The cache that ``DIRECTORY:SIZE`` names, one for each text. Raises `UsageError` as `parsed`
    and `BlockCache` do."""
    return BlockCache(*parsed(text))


class BlockCache:
    """Blocks of files, by the names that `ctl.base.remote` gives them.

    Attributes:
        directory: of the files.
        limit: bytes on the disk that they take at most; at least 1 MiB.
        block: bytes of the parts in which files are kept.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int):
        """Makes the directory. Other files in it are left alone.

        Raises:
            UsageError: it cannot be made.
        """
        self.directory = Path(directory).expanduser().absolute()
        self.limit = limit
        self._most = limit - _PAGE  # without `lock`
        # Of few blocks, those of one batch would push out one another.
        self.block = min(_LARGEST_BLOCK, limit // 64 // _PAGE * _PAGE) - _SUM
        self._sizes: dict[str, int] = {}
        self._touched: dict[str, float] = {}  # the blocks that this process has checked
        self._pinned: dict[str, int] = {}  # descriptors of whole files
        self._warned = False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise UsageError(
                f"the data cache {self.directory} cannot be made: {error.strerror}"
            ) from error

    @property
    def _lock(self) -> Path:
        return self.directory / "lock"

    def announce(self, what: str, size: int, files: int) -> None:
        """Says that ``what`` has ``size`` bytes, in ``files``, which each epoch may read."""
        self._sizes[what] = max(size + files * _PAGE, self._sizes.get(what, 0))

    def keeps(self, name: str) -> bool:
        """Whether a block is one of those to keep. Of data that are larger than the cache, these
        are always the same ones: of the blocks that were used last, an epoch would find none."""
        total = sum(self._sizes.values()) * (1 + _SUM / self.block) + 1
        return int(name[:8], 16) / 2**32 < self._most * (1 - 2 * _ROOM) / total

    def get(self, name: str, begin: int, size: int) -> bytes | None:
        """``size`` bytes of a block from ``begin`` on; None if it is not there, or torn."""
        try:
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            now = time.monotonic()
            if name not in self._touched:
                data = os.pread(descriptor, self.block + _SUM + 1, 0)
                if zlib.crc32(data[_SUM:]) != int.from_bytes(data[:_SUM], "little"):
                    return None
            if now - self._touched.get(name, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
                os.utime(descriptor)
                self._touched[name] = now
            data = os.pread(descriptor, size, _SUM + begin)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return data if len(data) == size else None

    def put(self, name: str, data: bytes) -> None:
        """Keeps a block, if there is room. A disk that is full costs only the next read."""
        try:
            with self._reserved(len(data) + _SUM) as (unfinished, descriptor):
                if unfinished is None:
                    return
                os.pwrite(descriptor, zlib.crc32(data).to_bytes(_SUM, "little"), 0)
                os.pwrite(descriptor, data, _SUM)
                self._publish(unfinished, name)
                self._touched[name] = time.monotonic()
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = "the data cache %s cannot be written, and data are read again: %s"
                logging.warning(what, self.directory, error.strerror)

    def whole(self, name: str, size: int, fill: Callable[[int], None]) -> Path:
        """A file on the disk that stays there until this process ends.

        Args:
            name: of its blocks.
            size: bytes.
            fill: writes the file at a descriptor, if it is not there.

        Raises:
            UsageError: there is no room.
            OSError: it cannot be written.
        """
        path = self.directory / f"{name}.file"
        with open(self.directory / "filling", "wb") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            with self._locked():
                if self._pin(path, size):
                    return path
            with self._reserved(size) as (unfinished, descriptor):
                if unfinished is None:
                    raise UsageError(
                        f"the data cache {self.directory} of {size_text(self.limit)} has no room "
                        f"for files of this format, which are copied whole: {size_text(size)} more "
                        "are needed"
                    )
                fill(descriptor)
                os.fsync(descriptor)
                self._publish(unfinished, path.name)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                self._pinned[path.name] = os.dup(descriptor)  # has the same lock
        return path

    def _pin(self, path: Path, size: int) -> bool:
        """Keeps others from deleting ``path``; False if it is not there."""
        if path.name in self._pinned:
            return True
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if os.fstat(descriptor).st_size != size:
            os.close(descriptor)
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
        self._pinned[path.name] = descriptor
        return True

    @contextlib.contextmanager
    def _reserved(self, size: int) -> Iterator[tuple[Path | None, int]]:
        """An unfinished file of ``size`` bytes and its descriptor; (None, -1) without room."""
        needed = _on_disk(size)
        with self._locked() as lock:
            used = _number(os.pread(lock, 32, 0))
            if used is None or used + needed > self._most:
                used = self._make_room(needed)
            if used + needed > self._most:
                _write_number(lock, used)
                yield None, -1
                return
            unfinished = self.directory / f"tmp-{secrets.token_hex(8)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(unfinished, flags, 0o644)
            try:
                # While this is held, the process lives.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.posix_fallocate(descriptor, 0, size)
                _write_number(lock, used + needed)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                os.close(descriptor)
                raise
        try:
            yield unfinished, descriptor
        finally:
            unfinished.unlink(missing_ok=True)  # it is gone if it was published
            os.close(descriptor)

    def _publish(self, unfinished: Path, name: str) -> None:
        # Who counts the files holds the lock, and sees this one under one of its names.
        with self._locked():
            os.replace(unfinished, self.directory / name)

    def _make_room(self, needed: int) -> int:
        """Deletes what was used longest ago, and what the dead have left; returns the bytes in use.
        The caller holds the lock."""
        found = []
        for entry in os.scandir(self.directory):
            if _OWN.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # who could not fill one deletes it
                    about = entry.stat()
                    found.append((about.st_mtime, _on_disk(about.st_size), entry))
        used = sum(size for _, size, _ in found)
        enough = self._most * (1 - _ROOM) - needed
        for _, size, entry in sorted(found, key=lambda one: one[0]):
            unfinished = entry.name.startswith("tmp-")
            if used <= enough and not unfinished:
                continue
            with contextlib.suppress(FileNotFoundError):
                if (unfinished or entry.name.endswith(".file")) and _is_held(entry.path):
                    continue
                os.unlink(entry.path)
            self._touched.pop(entry.name, None)
            used -= size
        return used

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _on_disk(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _is_held(path: str) -> bool:
    """Whether a process holds the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _write_number(descriptor: int, number: int) -> None:
    os.pwrite(descriptor, f"{number:31}\n".encode(), 0)
