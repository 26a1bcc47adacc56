"""A store whose requests fail as a plan says: ``faulty:///tmp/x`` is the directory ``/tmp/x``.

The faults: ``503`` (nothing is done), ``lost`` (it is done, but the answer does not come),
``partial`` (half of the bytes are there, then an error), ``short`` (so, but it claims that all
are), ``slow``, ``stale`` (a list lacks what is new, and has what was deleted), ``expired`` (the
credentials, for some requests), ``full`` and ``kill`` (of this process, within the request).
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

KINDS = ("503", "lost", "partial", "short", "slow", "stale", "expired", "full", "kill")


class Faults:
    """Draws which requests fail, with probability ``rate`` each; ``told`` is called with each."""

    def __init__(
        self,
        seed: int,
        rate: float,
        kinds: tuple[str, ...] = KINDS,
        told: Callable[[str], Any] = lambda kind: None,
    ):
        self._random, self._rate, self._kinds, self._told = random.Random(seed), rate, kinds, told
        self._lasts: dict[str, int] = {}  # requests that still fail so
        self._guard = threading.Lock()

    def next(self, reads: bool, lists: bool) -> str:
        """The fault of the next request; empty for none."""
        with self._guard:
            for kind, left in self._lasts.items():
                if left:
                    self._lasts[kind] = left - 1
                    return kind
            if self._random.random() >= self._rate:
                return ""
            kind = self._random.choice(self._kinds)
            if (kind in ("partial", "short", "full") and reads) or (kind == "stale" and not lists):
                return ""
            if kind in ("expired", "full"):
                self._lasts[kind] = self._random.randint(0, 20)
            self._told(kind)
            return kind


class FaultyFileSystem(LocalFileSystem):
    """See the module."""

    protocol = "faulty"
    faults: Faults | None = None  # of all: a plan of the test
    _before: dict[str, list] = {}

    def _do(self, request: Callable[[], Any], *, reads: bool = True, lists: bool = False) -> Any:
        kind = self.faults.next(reads, lists) if self.faults else ""
        if kind == "503":
            raise OSError(errno.EBUSY, "reduce your request rate")
        if kind == "expired":
            raise PermissionError("The provided token has expired.")
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "slow":
            time.sleep(0.01)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        result = request()
        if kind == "lost":
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        return result

    def _put(self, path: str, value: bytes, mode: str) -> None:
        """One request that writes, with what may become of it."""
        kind = self.faults.next(False, False) if self.faults else ""
        if mode == "xb" and os.path.exists(path):
            raise FileExistsError(path)
        half = value[: len(value) // 2]
        if kind in ("partial", "short", "kill"):
            with open(path, "wb") as file:
                file.write(half)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "partial":
                raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
            return
        after = Faults(0, 0)
        after.next = lambda reads, lists: kind  # type: ignore[method-assign]
        before, self.faults = self.faults, after
        try:
            self._do(lambda: _write(path, value))
        finally:
            self.faults = before

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._put(self._strip_protocol(path), value, "xb" if mode == "create" else "wb")

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        if "r" in mode:
            return super()._open(path, mode, block_size, **kwargs)
        return _Parts(self, self._strip_protocol(path))

    def cat_file(self, path, start=None, end=None, **kwargs):
        def read():
            with open(self._strip_protocol(path), "rb") as file:
                return file.read()[start:end]

        return self._do(read)

    def info(self, path, **kwargs):
        return self._do(lambda: LocalFileSystem.info(self, path, **kwargs))

    def walk(self, path, **kwargs):
        key = self._strip_protocol(path)
        found = self._do(lambda: list(LocalFileSystem.walk(self, path, **kwargs)), lists=True)
        before, self._before[key] = self._before.get(key, found), found
        stale = self.faults and self.faults.next(True, True) == "stale"
        return before if stale else found

    def rm_file(self, path):
        self._do(lambda: os.remove(self._strip_protocol(path)))


class _Parts:
    """A file in parts. It is there with the last part, as in a store."""

    def __init__(self, filesystem: FaultyFileSystem, path: str):
        self._fs, self._path, self._parts, self.closed = filesystem, path, b"", False

    def write(self, data: bytes) -> None:
        self._fs._do(lambda: None)
        self._parts += data

    def close(self) -> None:
        self._fs._put(self._path, self._parts, "wb")

    def discard(self) -> None:
        self._parts = b""


def _write(path: str, value: bytes) -> None:
    """The object is there whole or not, as in a store."""
    with open(unfinished := f"{path}.{threading.get_ident()}~", "wb") as file:
        file.write(value)
    os.replace(unfinished, path)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
