"""Programs that XLA has compiled, kept for later runs: the persistent cache of TensorFlow.

TensorFlow executes what it finds in its cache, and does not check it. So each process has a
directory of its own, made of the entries that are intact; what the process adds is sealed with a
checksum, and published when it is complete. A damaged entry costs a compilation. Processes may run
at once. Imports no TensorFlow, which must see the environment as `open_cache` leaves it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from absl import logging

from ctl.base import cache

_MOST_BYTES = 64 << 20  # in all; the oldest entries go first
_FLAGS = "TF_XLA_FLAGS"
_ENTRIES = "*.pb"


class XlaCache:
    """The directory of TensorFlow's cache in this process.

    Args:
        shared: directory of the entries of all processes: a checksum on the first line, then what
            TensorFlow wrote.

    Attributes:
        path: directory for TensorFlow.
        shared: as given.
        published: number of programs that this process has compiled for later ones.

    Raises:
        OSError: a directory cannot be made.
    """

    def __init__(self, shared: Path):
        self.shared = shared
        self.published = 0
        shared.mkdir(mode=0o700, exist_ok=True)
        _sweep(shared)
        self.path = Path(tempfile.mkdtemp(prefix=f"run-{os.getpid()}-", dir=shared))
        left = _MOST_BYTES
        newest = sorted(shared.glob(_ENTRIES), key=_time, reverse=True)
        for entry in newest:
            content = _intact(entry)
            left -= len(content or b"")
            if content is None or left < 0:
                entry.unlink(missing_ok=True)
                continue
            (self.path / entry.name).write_bytes(content)
        self._known = {path.name for path in self.path.iterdir()}
        self._looked_at = 0  # when the directory was changed last, in ns

    def publish(self) -> None:
        """Gives later processes what this one has compiled so far. An action, too."""
        with contextlib.suppress(OSError):  # a full disk: the programs are compiled again
            before, self._looked_at = self._looked_at, self.path.stat().st_mtime_ns
            if before == self._looked_at:
                return
            for entry in self.path.glob(_ENTRIES):
                if entry.name not in self._known:
                    self._known.add(entry.name)
                    content = entry.read_bytes()
                    sealed = self.path / f"sealed-{entry.name}.tmp"
                    sealed.write_bytes(_checksum(content) + b"\n" + content)
                    os.replace(sealed, self.shared / entry.name)
                    self.published += 1

    def close(self) -> None:
        """Publishes, and deletes the directory of this process."""
        self.publish()
        shutil.rmtree(self.path, ignore_errors=True)


def open_cache() -> XlaCache | None:
    """Makes TensorFlow, which is not loaded yet, keep compiled programs below `ctl.base.cache`.
    Returns None if that cannot be used, or the user has set another directory."""
    flags = os.environ.get(_FLAGS, "")
    if "persistent_cache" in flags or (directory := cache.directory()) is None:
        return None
    try:
        opened = XlaCache(directory / f"xla-{_key()}")
    except OSError as error:
        logging.warning("cannot save XLA's programs for later runs: %s", error)
        return None
    os.environ[_FLAGS] = " ".join(
        filter(None, (flags, f"--tf_xla_persistent_cache_directory={opened.path}"))
    )
    atexit.register(opened.close)
    return opened


def _key() -> str:
    """Names what a program depends on beside its source, which TensorFlow compares itself."""
    versions = [importlib.metadata.version(package) for package in ("tensorflow", "keras")]
    settings = [os.environ.get(name, "") for name in (_FLAGS, "XLA_FLAGS")]
    return hashlib.sha256(repr([versions, settings, cache.processor()]).encode()).hexdigest()[:16]


def _intact(entry: Path) -> bytes | None:
    """What TensorFlow wrote; None if the file differs from what was sealed."""
    try:
        checksum, _, content = entry.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if checksum == _checksum(content) else None


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _time(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # another process has deleted it
        return 0.0


def _sweep(shared: Path) -> None:
    """Deletes the directories of processes that were killed."""
    for path in shared.glob("run-*"):
        number = path.name.split("-")[1]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(path, ignore_errors=True)
