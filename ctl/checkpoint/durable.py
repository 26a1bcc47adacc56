"""File-system primitives that outlive a kill, a power cut and a full disk. No TensorFlow here.

Whatever is not yet, or no longer, valid has a name that `scratch` made (``tmp-…``); everything else
became visible by one ``rename`` after its bytes had reached the disk. `sweep` deletes the scratch
of dead writers, and a `Lock` makes sure that there is one writer only.

POSIX only: ``fsync`` of directories, ``rename`` and ``flock`` are what the promises rest on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctl.errors import CheckpointError

_SCRATCH = re.compile(r"tmp-[\w.-]+-\d+-[0-9a-f]{8}")
_JSON_LIMIT = 64 << 20


class Damaged(Exception):
    """What is on disk is not what was written; the text says what differs."""


def scratch(directory: Path, name: str) -> Path:
    """A path in ``directory``, not created, that no reader takes for ``name``."""
    return directory / f"tmp-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def sweep(directory: Path) -> None:
    """Deletes all scratch in ``directory``. Only for the holder of its `Lock`."""
    for entry in os.scandir(directory):
        if _SCRATCH.fullmatch(entry.name):
            _delete(Path(entry.path))


def discard(path: Path) -> None:
    """Deletes ``path``, a file or a whole directory, so that it is never seen half deleted."""
    doomed = scratch(path.parent, path.name)
    os.rename(path, doomed)
    _delete(doomed)


def seal(directory: Path) -> dict[str, dict[str, Any]]:
    """Flushes every file of ``directory`` to disk; returns ``{name: {"size", "sha256"}}``."""
    files = {}
    for path in sorted(directory.iterdir()):
        with _open_regular(path) as file:
            files[path.name] = {"size": os.fstat(file.fileno()).st_size, "sha256": _sha256(file)}
            os.fsync(file.fileno())
    fsync_directory(directory)
    return files


def verify(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `Damaged` unless every one of ``files`` is in ``directory`` as `seal` found it."""
    for name, expected in files.items():
        try:
            with _open_regular(directory / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["size"]:
                    raise Damaged(f"{name} has {size} bytes instead of {expected['size']}")
                if _sha256(file) != expected["sha256"]:
                    raise Damaged(f"the sha256 of {name} is not the one in its manifest")
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from error


def publish(unfinished: Path, final: Path) -> None:
    """Makes the sealed directory ``unfinished`` visible as ``final``, in place of what is there."""
    if os.path.lexists(final):
        discard(final)
    os.rename(unfinished, final)
    fsync_directory(final.parent)


def write_json(path: Path, value: Any, *, via: Path) -> None:
    """`write_text` of ``value`` as JSON, one item on a line."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n", via=via)


def write_text(path: Path, text: str, *, via: Path) -> None:
    """Replaces ``path`` atomically and durably; the scratch file lies in the directory ``via``."""
    unfinished = scratch(via, path.name)
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def read_json(path: Path) -> Any:
    """The value in a small JSON file; raises `Damaged` for whatever is in the way of it."""
    try:
        with _open_regular(path) as file:
            data = file.read(_JSON_LIMIT + 1)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from error
    if len(data) > _JSON_LIMIT:
        raise Damaged(f"{path.name} is larger than {_JSON_LIMIT >> 20} MiB")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is not JSON ({error})") from error


def fsync_directory(directory: Path) -> None:
    """Makes the names in ``directory`` durable: ``fsync`` of a file does not cover its name."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """An exclusive ``flock``. The kernel frees it when the holder dies, however it dies."""

    def __init__(self, path: Path):
        """Raises CheckpointError that names the holder when another process, or object, has it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 256, 0).decode(errors="replace")
            os.close(self._descriptor)
            raise CheckpointError(
                f"{path.parent} is being written by process {holder or '(unknown)'}; "
                "stop that one or choose another --model_dir"
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        # Unlocked by name, not only closed: a forked child may still hold a copy of the descriptor.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _open_regular(path: Path):
    """Opens for reading, but follows no link and does not block on a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _sha256(file) -> str:
    digest, chunk = hashlib.sha256(), bytearray(1 << 20)
    while count := file.readinto(chunk):
        digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
