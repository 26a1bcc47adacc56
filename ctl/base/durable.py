"""File-system primitives that survive a kill, a power cut and a full disk. No TensorFlow here.

Unfinished and discarded files have names from `scratch` (``tmp-…``). A file gets its final name by
one ``rename``, after its bytes have reached the disk. `sweep` deletes the scratch files of dead
writers. A `Lock` admits one writer.

POSIX only: these guarantees need ``fsync`` of directories, ``rename`` and ``flock``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

from absl import logging

from ctl.base.interactive import another_directory
from ctl.errors import CheckpointError

_SCRATCH = re.compile(r"tmp-[\w.-]+-\d+-[0-9a-f]{8}")
_JSON_LIMIT = 64 << 20
_REASONS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOENT),
)


class Damaged(Exception):
    """The files differ from what was written; the message says how."""


def scratch(directory: Path, name: str) -> Path:
    """Returns a new path in ``directory`` that no reader takes for ``name``; creates nothing."""
    return directory / f"tmp-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def sweep(directory: Path) -> None:
    """Deletes all scratch files in ``directory``. The caller must hold its `Lock`."""
    for entry in os.scandir(directory):
        if _SCRATCH.fullmatch(entry.name):
            _delete(Path(entry.path))


def discard(path: Path) -> None:
    """Renames ``path``, a file or a directory, to a scratch name, and then deletes it."""
    doomed = scratch(path.parent, path.name)
    os.rename(path, doomed)
    _delete(doomed)


def seal(directory: Path) -> dict[str, dict[str, Any]]:
    """Flushes every file of ``directory`` to disk; returns ``{name: {"size", "crc32"}}``.

    The names of the files are flushed by the next `write_json` or `fsync_directory`. Threads flush
    while this one reads.
    """
    with contextlib.ExitStack() as stack:
        opened = {p.name: stack.enter_context(open_regular(p)) for p in directory.iterdir()}
        threads = stack.enter_context(ThreadPoolExecutor(len(opened) or 1, "ctl-flush"))
        flushed = [threads.submit(os.fsync, file.fileno()) for file in opened.values()]
        files = {
            name: {"size": os.fstat(file.fileno()).st_size, "crc32": _crc32(file)}
            for name, file in sorted(opened.items())
        }
        for flush in flushed:
            flush.result()
    return files


def verify(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that all ``files``, as `seal` returned them, are unchanged in ``directory``.

    Raises:
        Damaged: a file is missing or unreadable, or its size or checksum differs.
    """
    with verifying(directory, files):
        pass


@contextlib.contextmanager
def verifying(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """As `verify`, but a thread reads the files beside the body, which begins when all are known to
    be regular and to have their sizes. A wrong checksum is raised in place of what the body raises.
    """
    with contextlib.ExitStack() as stack:
        opened = {}
        for name, expected in files.items():
            with _readable(name):
                opened[name] = stack.enter_context(open_regular(directory / name))
            size = os.fstat(opened[name].fileno()).st_size
            if size != expected["size"]:
                raise Damaged(f"{name} has {size} bytes instead of {expected['size']}")
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ctl-verify"))
        checked = thread.submit(_check_sums, opened, files)
        try:
            yield
        finally:
            checked.result()


def _check_sums(
    opened: Mapping[str, BufferedReader], files: Mapping[str, Mapping[str, Any]]
) -> None:
    for name, file in opened.items():
        kind = next(kind for kind in SUMS if kind in files[name])
        with _readable(name):
            if SUMS[kind](file) != files[name][kind]:
                raise Damaged(f"the {kind} of {name} is not the one in its manifest")


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Damaged(f"{name} cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Raises `CheckpointError` where the system refuses to write ``what`` inside."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {what}: {error.strerror}") from error


def flush(directory: Path) -> None:
    """Flushes all files below ``directory``, and their names, to disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with open_regular(Path(folder) / name) as file:
                os.fsync(file.fileno())
        fsync_directory(Path(folder))


def publish(unfinished: Path, final: Path) -> None:
    """Renames the flushed directory ``unfinished`` to ``final``. An existing one is deleted after
    the new one is in its place."""
    replaced = scratch(final.parent, final.name) if os.path.lexists(final) else None
    if replaced:
        os.rename(final, replaced)
    try:
        os.rename(unfinished, final)
    except OSError:
        if replaced:
            os.rename(replaced, final)
        raise
    fsync_directory(final.parent)
    if replaced:
        _delete(replaced)


def write_json(path: Path, value: Any, *, via: Path) -> None:
    """Writes ``value`` as JSON, one item on a line, like `write_text`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n", via=via)


def write_text(path: Path, text: str, *, via: Path) -> None:
    """Writes ``text`` in UTF-8, like `write_bytes`."""
    write_bytes(path, text.encode(), via=via)


def write_bytes(path: Path, content: bytes, *, via: Path) -> None:
    """Replaces ``path`` atomically and durably, by way of a scratch file in directory ``via``."""
    unfinished = scratch(via, path.name)
    try:
        with open(unfinished, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file.

    Raises:
        Damaged: the file is missing, unreadable, larger than 64 MiB, or not JSON.
    """
    with _readable(path.name), open_regular(path) as file:
        data = file.read(_JSON_LIMIT + 1)
    if len(data) > _JSON_LIMIT:
        raise Damaged(f"{path.name} is larger than {_JSON_LIMIT >> 20} MiB")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is not JSON ({error})") from error


def is_number(value: Any) -> bool:
    """Whether ``value``, of JSON, is a number that a float can hold. A larger integer overflows."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def fsync_directory(directory: Path) -> None:
    """Makes the names in ``directory`` durable, which ``fsync`` of the files does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: Exception) -> str:
    """Why the system refused to read or write, by an error of Python or of TensorFlow, which puts
    paths and names of operations around the words of the system."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    known = (os.strerror(number) for number in _REASONS)
    words = re.sub(r"\{\{.*?\}\} ?", "", text).partition("\n")[0].partition(" [Op:")[0]
    return next((reason for reason in known if reason in text), words[:200])


class Locked(CheckpointError):
    """Another process holds a `Lock`."""


class Lock:
    """An exclusive ``flock``, which is freed with the object, and by the kernel when its process
    dies."""

    def __init__(self, path: Path):
        """Takes the lock.

        Raises:
            Locked: another process or object holds it; the message names the process.
        """
        self._path, self._process = path, os.getpid()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 256, 0).decode(errors="replace")
            self.release()
            raise Locked(
                f"{path.parent} is being written by process {holder or '(unknown)'}; "
                f"stop that one or choose {another_directory()}"
            ) from None
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raises `OSError` if the file was deleted or replaced. Its directory may still be there:
        ``rm -r`` leaves one in which a file was made meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        raise OSError(errno.ENOENT, "the directory was deleted meanwhile")

    def release(self) -> None:
        """Frees the lock. A second call has no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        # Closing is not enough: a forked child may still hold a copy of the descriptor. The child
        # must not free the lock of its parent.
        if self._process == os.getpid():
            with contextlib.suppress(OSError):  # of a file system that is gone
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def __del__(self) -> None:
        # At the end of Python, modules have lost their names; the kernel frees the lock.
        if os is not None and hasattr(self, "_descriptor"):
            self.release()


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading; follows no link and does not block on a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _crc32(file: BufferedReader) -> str:
    # A third of the time of SHA-256. TensorFlow's files have a CRC-32C of each variable besides.
    crc = 0
    for chunk in _chunks(file):
        crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def _sha256(file: BufferedReader) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: BufferedReader) -> Iterator[memoryview]:
    chunk = memoryview(bytearray(1 << 20))
    while count := file.readinto(chunk):
        yield chunk[:count]


# The checksums that a manifest may have; the first version had SHA-256.
SUMS = {"crc32": _crc32, "sha256": _sha256}


def _delete(path: Path) -> None:
    """Deletes scratch. What cannot be deleted now, such as a file that another machine of an NFS
    has open, stays until the next `sweep`: readers do not see it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logging.warning("cannot delete %s, which is no longer needed: %s", path, error.strerror)
