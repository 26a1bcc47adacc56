"""A store in memory, ``counted://``, that counts its requests, is slow, and fails when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class CountedStore(MemoryFileSystem):
    """All objects share the files and the faults.

    Attributes:
        requests: names of the methods that were called.
        fault: is called with the number of each request, and may raise.
        delay: seconds of each request.
    """

    protocol = "counted"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False
    requests: list[str] = []
    fault: Callable[[int], None] | None = None
    delay = 0.0
    most = 0  # requests at the same time
    _now = 0
    _lock = threading.Lock()

    @classmethod
    def reset(cls) -> None:
        """Forgets all."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.forget()

    @classmethod
    def forget(cls) -> None:
        """Forgets the requests and the faults."""
        cls.requests.clear()
        cls.fault, cls.delay, cls.most = None, 0.0, 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))

    def _request(self, method: str, *arguments: Any, **options: Any) -> Any:
        kind = CountedStore
        with kind._lock:
            kind.requests.append(method)
            number = len(kind.requests)
            kind._now += 1
            kind.most = max(kind.most, kind._now)
        try:
            time.sleep(kind.delay)
            if kind.fault:
                kind.fault(number)
            return getattr(MemoryFileSystem, method)(self, *arguments, **options)
        finally:
            with kind._lock:
                kind._now -= 1

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return self._request("cat_file", path, start, end)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return self._request("info", path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self._request("ls", path, detail)


fsspec.register_implementation("counted", CountedStore, clobber=True)


def upload(root: Path, name: str) -> None:
    """Puts all files below ``root`` in the store, below ``name``."""
    files = CountedStore()
    for path in root.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/{name}/{path.relative_to(root)}", path.read_bytes())
    CountedStore.forget()
