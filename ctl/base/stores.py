"""Object stores by URL: ranged reads, whole writes, retries, and errors that name the remedy.

``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``, ``file:///tmp`` and whatever else `fsspec
<https://filesystem-spec.readthedocs.io>`_ opens, with the credentials that each store finds by its
own conventions. fsspec and the package of a store are extras of ctl, loaded when a store is opened.

A transient error (503, a time limit, a lost connection) is tried again after a pause that doubles,
with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015). Others
are raised at once: denied, expired, full, or no such bucket. Each request has a time limit. Nothing
is cached, so a list is as fresh as the store's.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ctl.base import durable
from ctl.errors import CheckpointError, UsageError

T = TypeVar("T")

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.*", re.DOTALL)
_CUT = re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")
_TENSORFLOWS = ("ram", "grpc")  # in the memory of TensorFlow alone; an address

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_EXTRAS |= {"abfs": "azure", "abfss": "azure", "az": "azure"}

_PART = 8 << 20  # bytes of a request; what an upload or a thread of a download holds in memory
_MOST_PARTS = 9_000  # S3 takes 10,000
_DOWNLOADS = 4  # threads

# What stores call what changes with an object. The last ones are times.
_VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified"),
    *("updated", "created"),
)

_TRIES = 6
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds
_SECONDS = 60.0  # of one request
# Keras draws initial weights from Python's generator, and forks would share one of our own.
_jitter = random.SystemRandom()

# What another try cannot mend, by the number of the error. The others of the system may pass.
_LASTING = (
    *(errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINVAL),
    *(errno.ENOSYS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EREMCHG),
)
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "adlfs", "requests")
_CREDENTIALS = "credential", "Credential", "ExpiredToken", "InvalidToken", "authenticat"


class StoreError(CheckpointError):
    """A store refuses a request, or did not answer in all tries. ``lasting``: it refused, so that
    another try would not help."""

    def __init__(self, message: str, lasting: bool = False):
        super().__init__(message)
        self.lasting = lasting


class NothingThere(UsageError):
    """There is nothing at a URL."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL of a store, ``scheme://…``. Raises `UsageError` for one that
    `pathlib` has changed: it takes the second slash away."""
    if cut := _CUT.match(os.fspath(path)):
        raise UsageError(f"{path} was a URL, before pathlib changed it: give {cut[1]}://… as text")
    found = _URL.fullmatch(os.fspath(path))
    return bool(found) and found[1] not in _TENSORFLOWS  # type: ignore[index]


def join(url: str, name: str) -> str:
    """The URL of ``name`` below ``url``."""
    return f"{url.rstrip('/')}/{name}"


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at ``url``. Sends no request.

    Raises:
        UsageError: the package for such a URL is missing, or fsspec does not know it.
    """
    url = os.fspath(url)
    protocol = url.partition("://")[0]
    extra = _EXTRAS.get(protocol)
    install = f"pip install 'ctl[{extra or 'stores'}]'"
    for name in ("botocore", "aiobotocore", "azure"):  # which tell of each request
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("gcsfs").setLevel(logging.ERROR)  # without credentials, it warns at each one
    try:
        import fsspec.core

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        if extra or (error.name or "").startswith("fsspec"):
            raise UsageError(f"{url} needs a package: {install}") from None
        raise UsageError(f"{url} needs a package: {error}") from None
    except ValueError:
        raise UsageError(f"{url}: fsspec knows no {protocol}://") from None
    options: dict[str, Any] = {"use_listings_cache": False}
    if extra == "s3":  # retries are those of this module
        limits = {"connect_timeout": 10, "read_timeout": 30}
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}}
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):  # fsspec keeps a client for each
            if name in os.environ:
                options.setdefault("endpoint_url", os.environ[name])
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"{url}: {_first_line(error)}") from error
    if extra in ("s3", "gcs"):
        filesystem.retries = 2  # of a part of an upload, where this module can only begin again
    return Store(url.rstrip("/"), filesystem, root.rstrip("/"))


class About(NamedTuple):
    """What a store says of an object or a folder.

    Attributes:
        size: bytes, 0 of a folder.
        version: changes with the object, as far as the store tells.
        is_folder: whether it is a name before others.
    """

    size: int
    version: str
    is_folder: bool


class Store:
    """What is below one URL. Names are relative to it, with slashes. Threads may share it.

    All methods raise `StoreError` if the store refuses, or does not answer in all tries.

    Attributes:
        url: without a slash at its end.
        requests: how many requests were sent, tries included.
    """

    def __init__(self, url: str, filesystem: Any, root: str):
        self.url = url
        self.requests = 0
        self._fs, self._root = filesystem, root

    def list(self, prefix: str = "", deep: bool = True) -> dict[str, int]:
        """The names of all objects below the folder ``prefix``, with their sizes in bytes; without
        ``deep``, of those directly in it."""
        place = self._place(prefix)

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            if not deep:
                infos = self._fs.ls(place, detail=True)
                return {one["name"]: one["size"] for one in infos if one["type"] == "file"}
            if getattr(self._fs, "async_impl", False):
                found = self._fs.find(place, detail=True)
                return {name: info["size"] for name, info in found.items()}
            try:  # `find` would pass over errors
                return {
                    info["name"]: info["size"]
                    for _, _, files in self._fs.walk(place, detail=True, on_error="raise")
                    for info in files.values()
                }
            except FileNotFoundError:
                return {}

        try:
            found = self._call(f"list {self._url(prefix)}", find)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {name[start:]: size for name, size in sorted(found.items()) if name[start:]}

    def check_bucket(self) -> None:
        """Raises `StoreError` if the store says that there is no such bucket. To list what is in it
        may say nothing of that."""
        bucket = self._root.partition("/")[0]
        if self.url.partition("://")[0] in _EXTRAS:
            try:
                self._call(f"find {self.url}", lambda: self._fs.info(bucket))
            except FileNotFoundError as error:
                raise StoreError(f"cannot write {self.url}: {_no_bucket(bucket)}", True) from error
            except StoreError:  # who may write there need not be allowed to ask this
                pass

    def size(self, name: str) -> int:
        """The size of the object ``name``, in bytes. Raises `FileNotFoundError`."""

        def info() -> int:
            self._fs.invalidate_cache()
            found = self._fs.info(self._place(name))
            if found["type"] == "directory":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return found["size"]

        return self._call(f"find {self._url(name)}", info)

    def about(self, name: str = "") -> About:
        """What the store says of an object or a folder. Raises `FileNotFoundError`."""

        def info() -> About:
            self._fs.invalidate_cache()
            return _about(self._fs.info(self._place(name)))

        return self._call(f"find {self._url(name)}", info)

    def entries(self, name: str = "") -> dict[str, About]:
        """The names of what is in the folder ``name``, without those that lead out of it. Raises
        `FileNotFoundError`."""
        place = self._place(name)

        def ls() -> dict[str, About]:
            self._fs.invalidate_cache()
            found = {i["name"].rstrip("/"): i for i in self._fs.ls(place, detail=True)}
            found.pop(place, None)  # some stores have an empty object for each folder
            names = {path: path.rpartition("/")[2] for path in found}
            return {n: _about(found[path]) for path, n in names.items() if n not in _ODD}

        return self._call(f"list {self._url(name)}", ls)

    def exists(self, name: str) -> bool:
        """Whether there is an object ``name``."""
        with contextlib.suppress(FileNotFoundError):
            return self.size(name) >= 0
        return False

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes of ``name`` from ``start`` to before ``stop``. Raises `FileNotFoundError`."""
        return self._call(
            f"read {self._url(name)}",
            lambda: self._fs.cat_file(self._place(name), start=start, end=stop),
        )

    def write(self, name: str, data: bytes, only_new: bool = False) -> None:
        """Writes ``name`` whole.

        Raises:
            FileExistsError: it is there already, with ``only_new``: by a conditional put where the
                store has it (S3, Google's, Azure's), else by a look before. After a lost answer,
                it may be this one's.
        """
        mode = {"mode": "create"} if only_new else {}

        def put() -> None:
            self._make_parent(name)
            self._fs.pipe_file(self._place(name), data, **mode)

        self._call(f"write {self._url(name)}", put)

    def upload(self, name: str, path: Path | int) -> None:
        """Writes the file at ``path`` (or of the descriptor) as ``name``, in parts of 8 MiB, of
        which one is in memory. The object appears whole with the last part, except on ``file://``.
        """
        # A descriptor of a deleted file can still be read, by a path of its own.
        path = Path(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        size = path.stat().st_size
        if size <= _PART:
            return self.write(name, path.read_bytes())
        part = max(_PART, -(-size // _MOST_PARTS >> 20) << 20)

        def put() -> None:
            # Each request has its own limit: `within` of the whole would be a bound on the size.
            self._make_parent(name)
            target = self._fs.open(self._place(name), "wb", block_size=part)
            try:
                with open(path, "rb") as source:
                    while data := source.read(part):
                        _within(_SECONDS, target.write, data)
                _within(_SECONDS, target.close)
            except BaseException:
                with contextlib.suppress(Exception):
                    _within(_SECONDS, target.discard)
                with contextlib.suppress(AttributeError):
                    target.closed = True  # else its end would make an object of what is there
                raise

        self._call(f"write {self._url(name)}", put, bounded=False)

    def download(self, name: str, path: Path) -> None:
        """Reads ``name`` into the file ``path``, which is replaced when all is there. Raises
        `FileNotFoundError` if there is none, `OSError` if the file cannot be written."""
        size = self.size(name)
        unfinished = durable.scratch(path.parent, path.name)
        starts = range(0, size, _PART)

        def fetch(start: int) -> None:
            data = self.read(name, start, min(start + _PART, size))
            if len(data) != min(_PART, size - start):
                raise StoreError(f"cannot read {self._url(name)}: it has changed meanwhile")
            rest = memoryview(data)
            while rest:  # a disk that fills up takes a part first
                rest = rest[os.pwrite(descriptor, rest, start + len(data) - len(rest)) :]

        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if len(starts) < 2:
                for start in starts:
                    fetch(start)
            else:
                with ThreadPoolExecutor(_DOWNLOADS, "ctl-download") as threads:
                    for _ in threads.map(fetch, starts):
                        pass
            os.replace(unfinished, path)
        finally:
            os.close(descriptor)
            unfinished.unlink(missing_ok=True)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes the objects ``names``, in their order. What is not there is deleted already."""
        for name in names:
            remove = functools.partial(self._fs.rm_file, self._place(name))
            with contextlib.suppress(FileNotFoundError):
                self._call(f"delete {self._url(name)}", remove)

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/") if name else self._root

    def _url(self, name: str) -> str:
        return join(self.url, name) if name else self.url

    def _make_parent(self, name: str) -> None:
        """Local disks, and others that have directories, need it. Object stores need nothing."""
        if not getattr(self._fs, "async_impl", False):
            self._fs.makedirs(self._place(name).rpartition("/")[0], exist_ok=True)

    def _call(self, doing: str, request: Callable[[], T], bounded: bool = True) -> T:
        """Returns what ``request`` returns, in one of some tries."""
        for pause in _pauses():
            self.requests += 1
            try:
                return _within(_SECONDS, request) if bounded else request()
            except Exception as error:
                if _is_taken(error):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
                if isinstance(error, FileNotFoundError) and not _is_bucket(error):
                    raise
                if not _is_of_the_store(error):
                    raise
                lasting = not _is_transient(error)
                if lasting or pause is None:
                    raise StoreError(f"cannot {doing}: {_reason(error)}", lasting) from error
                time.sleep(pause)
        raise AssertionError("the last pause is None")


def _about(info: dict[str, Any]) -> About:
    """The parts of what fsspec says."""
    if info["type"] == "directory":
        return About(0, "", True)
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    if isinstance(version, datetime):  # where a list has a number
        version = version.timestamp()
    if isinstance(version, float):
        version = f"{version:.3f}"
    return About(int(info["size"] or 0), str(version), False)


def _pauses() -> Iterator[float | None]:
    """Seconds before each next try; None after the last."""
    for number in range(_TRIES - 1):
        yield _jitter.uniform(0, min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE))
    yield None


def _within(seconds: float, work: Callable[..., T], *arguments: Any) -> T:
    """Returns what ``work`` returns. Raises `TimeoutError` after ``seconds``: the thread that does
    it is left, since nothing can stop it, and does not keep the process."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ctl-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer in {seconds:g} s")
    return results[0]


def _codes(error: BaseException | None) -> list[str]:
    """What stores say of ``error`` and of what caused it: codes of S3, or of HTTP."""
    codes = []
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            codes.append(str(response.get("Error", {}).get("Code")))
        for name in ("code", "status", "status_code"):
            if isinstance(code := getattr(error, name, None), int | str):
                codes.append(str(code))
        error = error.__cause__
    return codes


def _is_taken(error: Exception) -> bool:
    taken = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
    kind = type(error).__name__
    return (
        isinstance(error, FileExistsError)
        or kind == "ResourceExistsError"
        or bool(taken.intersection(_codes(error)))
    )


def _is_bucket(error: Exception) -> bool:
    missing = "bucket does not exist", "container does not exist"
    return "NoSuchBucket" in _codes(error) or any(said in str(error) for said in missing)


def _is_of_the_store(error: Exception) -> bool:
    kind = type(error)
    return isinstance(error, OSError | TimeoutError) or kind.__module__.split(".")[0] in _CLIENTS


def _is_transient(error: Exception) -> bool:
    if isinstance(error, PermissionError | FileNotFoundError) or _about_credentials(error):
        return False
    if isinstance(error, OSError) and error.errno in _LASTING:
        return False
    statuses = [int(code) for code in _codes(error) if code.isdecimal()]
    return all(not 400 <= status < 500 or status in (408, 409, 429) for status in statuses)


def _about_credentials(error: Exception) -> bool:
    text = f"{type(error).__name__} {_codes(error)} {error}"
    return any(word in text for word in _CREDENTIALS)


def _reason(error: Exception) -> str:
    """Why, and what to do."""
    text = _first_line(error)
    if _is_bucket(error):
        return _no_bucket(text)
    if isinstance(error, PermissionError) or _about_credentials(error):
        return f"{text}; check or renew the credentials of the store"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{text}; delete something there, or choose another place"
    return f"{text}; see whether the store and the way there are up"


def _no_bucket(said: str) -> str:
    return f"there is no such bucket ({said}); make it, or choose another"


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return (str(text).strip().partition("\n")[0] or type(error).__name__)[:200]


# What a reader of a run does not need: weights, and what is large and only for people.
_LARGE = re.compile(r"(.*/)?(variables\.|events\.out\.)|export/|(.*/)?plugins/|owner/")
_LARGEST = 64 << 20  # bytes

_ODD = {"", ".", ".."}  # parts of names that may lead elsewhere

# What the system says of the name of an object that cannot be that of a file.
_NO_NAMES = errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST

_local: dict[tuple[int, str], Path] = {}  # by process (a forked one has its own) and URL


def local(path: str | os.PathLike[str], *, again: bool = False, whole: bool = False) -> Path:
    """Where the files at ``path`` are on this machine: ``path`` itself, if it is no URL. Else they
    are copied to a temporary directory of this process, which is deleted at its end: what is small,
    or all with ``whole``. A later call gives the same files, unless it copies ``again``.

    Raises:
        NothingThere: at the URL, a `UsageError`; or one that names a missing package.
        StoreError: it cannot be read.
    """
    if not is_url(path):
        return Path(path)
    url = os.fspath(path).rstrip("/")
    key = os.getpid(), url
    if key in _local and not again:
        return _local[key]
    store = open_store(url)
    names = {name: size for name, size in store.list().items() if name}
    target = _local[key] if key in _local else temporary(url)
    if not names:
        parent, _, last = url.rpartition("/")
        found = []
        if not parent.endswith("/"):  # else it is a whole bucket
            beside = open_store(parent)
            starts = last + ".index", last + ".data-"  # of the checkpoint of another program
            found = [n for n in beside.list(deep=False) if n == last or n.startswith(starts)]
        if not found:
            raise NothingThere(f"{url}: there is nothing")
        copy(beside, found, target.parent)
    else:
        wanted = [name for name, size in names.items() if whole or is_small(name, size)]
        copy(store, wanted, target)
    return _local.setdefault(key, target)


def send(url: str | os.PathLike[str], name: str) -> str:
    """Writes the file ``name`` of the directory ``local(url)`` to ``url``, if it is a URL. Returns
    where the file is."""
    if is_url(url):
        open_store(url).upload(name, local(url) / name)
    return join(os.fspath(url), name)


def is_small(name: str, size: int) -> bool:
    """Whether readers of runs need the object ``name`` of ``size`` bytes, other than weights."""
    return size <= _LARGEST and not _LARGE.match(name)


def use(url: str, directory: Path | None) -> None:
    """From now on, `local` gives ``directory`` for ``url``; with None, it copies again."""
    _local.pop((os.getpid(), url.rstrip("/")), None)
    if directory:
        _local[os.getpid(), url.rstrip("/")] = directory


def temporary(url: str) -> Path:
    """A path of the name of ``url`` in a new directory, which is deleted with this process."""
    folder = Path(tempfile.mkdtemp(prefix="ctl-store-"))
    atexit.register(_delete, folder, os.getpid())
    return folder / (url.rstrip("/").rpartition("/")[2] or "store")


def _delete(folder: Path, process: int) -> None:
    if process == os.getpid():  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def copy(store: Store, names: Iterable[str], directory: Path) -> None:
    """Downloads the objects ``names`` to ``directory``, some at once. Passes over those that were
    deleted meanwhile, over names that would leave the directory, and over those that no file can
    have: too long ones, and ``a/b`` beside ``a``."""

    def one(name: str) -> None:
        try:
            store.download(name, directory / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in _NO_NAMES:
                raise

    directory.mkdir(parents=True, exist_ok=True)
    safe = [n for n in names if "\0" not in n and not _ODD.intersection(n.split("/"))]
    with ThreadPoolExecutor(_DOWNLOADS, "ctl-copy") as threads:
        for _ in threads.map(one, safe):
            pass
