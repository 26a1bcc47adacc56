"""A run in an object store: a directory of this machine, and what copies it to the store.

All of ctl works on a local directory. A `Mirror` fills it from the store at the start, and copies
what changes to the store in the background, so that the store has the files of a disk under the
same names. Nothing in a store can be renamed, so a checkpoint is committed by its
``manifest.json``, which is written last, and only if there is none (a conditional put): without
it, its files are no checkpoint. ``latest.json`` follows. What retention deletes loses its manifest
first. The store counts: at the start, what the local directory has besides is deleted. Only where
its writer has ended before all was copied, and nobody has written the run since, the directory
counts: a mark in it names that owner.

One process writes: its number is the name of the highest object ``owner/N.json``. Who creates the
next one (a conditional put) takes over, and may do so if the owner has left, or has not renewed its
object for `LEASE` seconds, measured by the clock of who waits. The owner looks before each commit
whether there is a higher one. So a process that was frozen commits nothing after it lost the run,
but for the one request in which it was frozen.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from ctl.base import cache, durable, stores
from ctl.base.interactive import another_directory
from ctl.base.units import time_text
from ctl.checkpoint import manifest
from ctl.checkpoint.manifest import Saved
from ctl.errors import CheckpointError, CtlError

LEASE = 20.0  # seconds
_OFTEN = 30.0  # seconds between two copies of logs
_LONGEST_PAUSE = 15.0  # seconds between two tries of a store that fails
# A file of a checkpoint of this run. Other runs may be below the URL; nothing of them is touched.
_STEP = re.compile(r"((?:checkpoints/)?)(step-[0-9]{10,})/(.+)")
_IN_STEP = re.compile(r"(.*/)?step-[0-9]{10,}/.*")
_OWNER = re.compile(r"owner/(\d+)\.json")
_NOT_COPIED = re.compile(r"(.*/)?(\.[^/]*|tmp-[\w.-]+-\d+-[0-9a-f]{8}(/.*)?)")
KEEP_TRYING = 600.0  # seconds
_SAID_AFTER = 5.0  # seconds of waiting for a store
_UNSENT = ".unsent"  # the mark of a directory that has what the store lacks: tokens of its owners


# The mirrors of this process (a forked one has others), by process and directory.
_open: weakref.WeakValueDictionary[tuple[int, Path], Mirror] = weakref.WeakValueDictionary()


def mirror_of(path: Path) -> Mirror | None:
    """The open mirror of this process in whose directory ``path`` is; None if there is none."""
    for (process, directory), mirror in _open.items():
        if process == os.getpid() and path.is_relative_to(directory):
            return mirror
    return None


class Mirror:
    """The local directory of what is at ``url``: a run, or a directory of checkpoints.

    Use it as a context manager, or with a final `close`. A reader needs neither.

    Args:
        url: of a store, see `ctl.base.stores`.
        keep_trying: seconds for which training goes on though the store fails.
        writes: whether what changes in the directory is copied to the store. Such a directory is
            in the cache of this user, and stays for the next start on this machine; that of a
            reader is temporary.

    Attributes:
        url: of the store.
        directory: on this machine. It has the files of the run but weights, events and exports;
            the weights of the last checkpoint after `bring_last`, and of others after `fetch`.

    Raises:
        UsageError: the package of the store is missing.
        CheckpointError: the store or the cache cannot be used.
    """

    def __init__(self, url: str, *, keep_trying: float = KEEP_TRYING, writes: bool = True):
        self.url = url.rstrip("/")
        self._store = stores.open_store(self.url)
        self._keep_trying = keep_trying
        self._committed: dict[str, bytes] = {}  # manifests in the store, by the path of their step
        self._leftovers: set[str] = set()  # steps without a manifest: of a writer that was killed
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of what the store has, too
        self._number = 0  # as an owner; 0: it is none
        self._sizes: dict[str, int] = {}  # of what the store had at the start, or got from here
        self._token = secrets.token_hex(8)
        self._error: CtlError | None = None
        self._failing_since: float | None = None
        self._changed = threading.Condition()
        self._asked = self._done = 0  # copies of all that is there
        self._thread: threading.Thread | None = None
        self._lock: durable.Lock | None = None
        self._interrupted = False  # while it waited for the store
        self._unsent = ""  # what the mark said at the start: the directory counts
        self._ends = threading.Event()
        if writes:
            try:
                self.directory, self._lock = _directory(self.url, self._last_owner)
                self._mark = self.directory / _UNSENT
                self._unsent = _content(self._mark).decode()
                self._bring()
            except BaseException as error:
                if self._lock:
                    self._lock.release()
                if isinstance(error, OSError):
                    raise CheckpointError(
                        f"cannot write the files of {self.url} on this machine, to {cache.path()}: "
                        f"{error.strerror}; make room there, or set XDG_CACHE_HOME"
                    ) from error
                raise
            self._thread = threading.Thread(target=self._run, name="ctl-mirror", daemon=True)
            self._thread.start()
        else:
            self.directory = stores.temporary(self.url)
            self.directory.mkdir()
            self.refresh()

        _open[os.getpid(), self.directory] = self

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> None:
        try:
            self.close()
        except CtlError as error:
            if kind is None:
                raise
            logging.error("%s", error)  # the pending exception is the one to report

    def close(self) -> None:
        """Copies what is left, gives the run up, and ends; at once after an interrupted `flush`.
        Raises as `flush` does."""
        if self._ends.is_set() or self._thread is None:
            return
        try:
            if not self._error:
                self.flush()
        finally:
            self._ends.set()
            with self._changed:
                self._changed.notify_all()
            self._thread.join(1.0 if self._interrupted else None)
            if self._failing_since is None and not self._interrupted:  # else it may take long
                self._give_up()
            _open.pop((os.getpid(), self.directory), None)
            if self._lock and not self._thread.is_alive():
                self._lock.release()

    def url_of(self, path: Path) -> str:
        """The URL of ``path``, which is in the directory."""
        return stores.join(self.url, path.relative_to(self.directory).as_posix())

    # Reading.

    def refresh(self) -> None:
        """Brings the manifests, the files beside them and logs, as they are now, to the directory
        of a reader; of files and logs, those that have another size than before."""
        names = self._store.list()
        self._bring_manifests(names)
        sizes = {name: names[name] for name in self._small(names)}
        wanted = [name for name, size in sizes.items() if self._sizes.get(name) != size]
        stores.copy(self._store, wanted, self.directory)
        self._sizes = sizes

    def fetch(self, path: Path) -> None:
        """Brings the files of the checkpoint at ``path``, whose manifest is there, unless they are
        there. What the store has not, or damaged, stays so: who reads it verifies it."""
        with contextlib.suppress(durable.Damaged):
            files = manifest.load(path).files
            with contextlib.suppress(durable.Damaged):
                return durable.verify(path, files)
            place = path.relative_to(self.directory).as_posix()
            for name in files:
                (path / name).unlink(missing_ok=True)
            stores.copy(self._store, [f"{place}/{name}" for name in files], self.directory)
            try:
                durable.verify(path, files)
            except durable.Damaged:  # so it is copied again, if it is written again
                self._committed.pop(place, None)
                self._leftovers.add(place)
                for name in files:
                    (path / name).unlink(missing_ok=True)

    def bring_last(self) -> Saved | None:
        """Brings the weights of the last checkpoint that is intact, and returns it."""

        def read(path: Path) -> Saved:
            self.fetch(path)
            return manifest.verified(path)

        for directory in {path.parent for path in self._steps()}:
            steps = lambda directory=directory: manifest.newest_first(directory)  # noqa: E731
            return manifest.first_intact(directory, steps, read, quiet=True)
        return None

    def _bring(self) -> None:
        """Makes the directory that of the store, but for what is only for people. If it has what
        the store lacks, it gets only what it lacks itself."""
        names = self._store.list()
        if not names:
            self._store.check_bucket()
        self._sizes = {name: names[name] for name in self._small(names)}
        kept = self._bring_manifests(names)
        newer = dict(self._files()) if self._unsent else {}
        if self._unsent:
            logging.warning("goes on with %s, of which %s lacks a part", self.directory, self.url)
        for path in [] if self._unsent else sorted(self.directory.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # it is not empty
                    path.rmdir()
            elif path.parent not in kept and (
                path.relative_to(self.directory).as_posix() not in self._sent
            ):
                path.unlink()
        wanted = [name for name in self._small(names) if name not in newer]
        stores.copy(self._store, wanted, self.directory)
        for name, path in self._files():
            if name not in newer:
                self._sent[name] = _stamp(path)

    def _bring_manifests(self, names: dict[str, int]) -> set[Path]:
        """Returns the directories of the checkpoints. Deletes local ones that the store has not, or
        has with other files."""
        found = {m[1] + m[2] for name in names if (m := _STEP.fullmatch(name))}
        for folder in ("checkpoints/", ""):  # a list may lack what is new
            with contextlib.suppress(FileNotFoundError):
                pointer = self._store.read(f"{folder}latest.json")
                found |= {folder + step for step in _pointed(pointer)}
                path = self.directory / folder
                if self._unsent and (path / "latest.json").exists():
                    continue
                path.mkdir(parents=True, exist_ok=True)
                durable.write_bytes(path / "latest.json", pointer, via=path)
                self._sent[f"{folder}latest.json"] = _stamp(path / "latest.json")
        committed, self._leftovers = {}, set()
        for place in found:
            path = self.directory / place
            try:
                data = self._store.read(f"{place}/manifest.json")
            except FileNotFoundError:
                data = b""
            if not _files_of(data):
                self._leftovers.add(place)
                continue
            committed[place] = data
            here = _content(path / "manifest.json")
            if here != data and not (here and self._unsent):
                if _files_of(here) != _files_of(data):
                    shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True, exist_ok=True)
                durable.write_bytes(path / "manifest.json", data, via=path)
        for path in self._steps():
            if not self._unsent and path.relative_to(self.directory).as_posix() not in committed:
                shutil.rmtree(path)
        self._committed = committed
        return {self.directory / place for place in committed}

    def _small(self, names: dict[str, int]) -> list[str]:
        return [
            name
            for name, size in names.items()
            if not (_IN_STEP.fullmatch(name) or name.endswith("latest.json"))
            and stores.is_small(name, size)
        ]

    def _steps(self) -> list[Path]:
        """The local checkpoints, the last one first."""
        folders = self.directory, self.directory / "checkpoints"
        found = [path for folder in folders for path in manifest.paths(folder).values()]
        return sorted(found, reverse=True)

    # The owner.

    def own(self) -> None:
        """Becomes the one process that writes checkpoints.

        Raises:
            CheckpointError: another one does, or the store does not answer.
        """
        if self._number:
            return
        seen: tuple[int, bytes] | None = None
        since = time.monotonic()
        while True:
            number, data = self._owner()
            left = _has_left(data) or _token(data) == self._token  # a try of this one that failed
            if number and (number, data) != seen:
                if seen and seen[0] == number and not left:
                    raise self._taken(data)  # it has renewed its object
                if seen is None and not left:
                    logging.info("%s: waiting up to %.0f s: %s", self.url, LEASE, _name(data))
                seen, since = (number, data), time.monotonic()
            if not number or left or time.monotonic() - since >= LEASE:
                if self._unsent:
                    if _token(data) not in (*self._unsent.split(), self._token):
                        raise CheckpointError(
                            f"{self.url} was written meanwhile by {_name(data)}: start again. "
                            f"{self.directory} has what was not copied before"
                        )
                    self._mark.write_text(f"{self._unsent} {self._token}")
                try:
                    self._store.write(f"owner/{number + 1:08d}.json", self._says(), only_new=True)
                except FileExistsError:
                    written = self._owner()
                    if _token(written[1]) != self._token:  # else it was this one, a lost answer
                        raise self._taken(written[1]) from None
                break
            time.sleep(min(1.0, LEASE / 10))
        # What another has written since the start is of this run, too.
        names = self._store.list()
        self._bring_manifests(names)
        if not is_later_worker():  # which goes on with no logs
            brought = {n for n in self._small(names) if names[n] != self._sizes.get(n)}
            brought -= {n for n, path in self._files() if self._sent.get(n) != _stamp(path)}
            stores.copy(self._store, brought, self.directory)
            self._sent |= {n: _stamp(path) for n, path in self._files() if n in brought}
        self._number = number + 1  # from now on, the thread copies checkpoints, and deletes
        threading.Thread(target=self._renew, name="ctl-owner", daemon=True).start()

    def _owner(self) -> tuple[int, bytes]:
        """The number of the highest owner, 0 without one; and what it says."""
        numbers = [int(m[1]) for n in self._store.list("owner") if (m := _OWNER.fullmatch(n))]
        number = max(numbers, default=0)
        data = b""
        while True:  # a list may lack what is new
            try:
                data = self._store.read(f"owner/{number or 1:08d}.json")
            except FileNotFoundError:
                return (number - 1, data) if data else (0, b"")
            number = max(number, 1) + 1

    def _last_owner(self) -> object:
        return _token(self._owner()[1])

    def _says(self, left: bool = False) -> bytes:
        return json.dumps(
            {
                "token": self._token,
                "host": socket.gethostname(),
                "process": os.getpid(),
                "started": _started(os.getpid()),
                "boot": _boot(),
                "time": time.time(),
                "left": left,
            }
        ).encode()

    def _renew(self) -> None:
        while not self._ends.wait(LEASE / 5):
            with contextlib.suppress(stores.StoreError, OSError):
                if self._is_owner():
                    self._store.write(f"owner/{self._number:08d}.json", self._says())

    def _is_owner(self) -> bool:
        """Whether no other process has taken the run, and it was not deleted."""
        mine, next_one = (f"owner/{self._number + more:08d}.json" for more in (0, 1))
        return self._store.exists(mine) and not self._store.exists(next_one)

    def _require_owner(self) -> None:
        if not self._is_owner():
            self._number = 0
            raise self._taken(self._owner()[1])

    def _taken(self, data: bytes) -> CheckpointError:
        if not data:
            return _Taken(f"{self.url} was deleted meanwhile; choose {another_directory()}")
        return _Taken(
            f"{self.url} is being written by {_name(data)}; stop that one or choose "
            f"{another_directory()}"
        )

    def _give_up(self) -> None:
        with contextlib.suppress(CtlError, OSError):
            if self._number and self._is_owner():
                self._store.write(f"owner/{self._number:08d}.json", self._says(left=True))
        self._number = 0

    # Writing.

    def changed(self) -> None:
        """Something is to be copied soon. Does not wait."""
        with self._changed:
            self._asked += 1
            if self._number and not self._mark.exists():
                with contextlib.suppress(OSError):  # the disk is full: then this start has it alone
                    self._mark.write_text(self._token)
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error that ends the training: another process has taken the run, or the store
        has failed for ``keep_trying`` seconds."""
        if self._error:
            raise self._error

    def flush(self) -> None:
        """Waits until all that is in the directory now is in the store. Raises as `check` does.
        After a `KeyboardInterrupt`, no later call waits."""
        if self._thread is None or self._interrupted:
            return
        self.changed()
        asked = self._asked
        done = lambda: self._done >= asked or self._error  # noqa: E731
        try:
            with self._changed:
                if not self._changed.wait_for(done, _SAID_AFTER):
                    logging.warning(
                        "waits until %s has all; while it fails, up to %s (--keep_trying). %s has "
                        "all: if this process is killed before, the same command goes on there",
                        self.url,
                        time_text(self._keep_trying),
                        self.directory,
                    )
                    self._changed.wait_for(done)
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        self.check()

    def _run(self) -> None:
        """Copies what changes until the end; in a thread."""
        tries = 0
        while not self._ends.is_set() and not self._error:
            with self._changed:
                if tries:
                    self._changed.wait_for(self._ends.is_set, min(2.0**tries, _LONGEST_PAUSE))
                else:
                    self._changed.wait_for(
                        lambda: self._asked > self._done or self._ends.is_set(), _OFTEN
                    )
                asked, owns = self._asked, self._number
            try:
                self._copy()
            except _Taken as error:
                self._mark.unlink(missing_ok=True)  # what is here is of no run any more
                self._end(error)
            except (stores.StoreError, OSError) as error:
                tries += 1
                self._failed(error)
            except Exception as error:  # a bug: the training must hear of it
                self._end(CheckpointError(f"cannot copy {self.directory} to {self.url}: {error!r}"))
            else:
                if self._failing_since is not None:
                    logging.info("%s can be written again", self.url)
                tries, self._failing_since = 0, None
                with self._changed:
                    self._done = asked
                    if owns and asked == self._asked:
                        self._mark.unlink(missing_ok=True)
                    self._changed.notify_all()

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            logging.warning(
                "%s; the training goes on, and tries again for %s (--keep_trying)",
                error,
                time_text(self._keep_trying),
            )
        if now - self._failing_since >= self._keep_trying:
            self._end(
                CheckpointError(
                    f"{error}; tried for {time_text(self._keep_trying)} (--keep_trying). What the "
                    f"store lacks is in {self.directory}: the same command goes on there, on this "
                    "machine; or give that as --model_dir"
                )
            )

    def _end(self, error: CtlError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _copy(self) -> None:
        """Makes the store that of the directory: settings, without which no run goes on,
        checkpoints, the pointer to the last, retention, then all else."""
        if self._number:
            self._require_owner()
            for name, path in self._files():
                if name.endswith(".json") and not name.endswith("latest.json"):
                    self._send(name, path)
            self._copy_checkpoints()
        here = dict(self._files())
        for name, path in here.items():
            if not name.endswith("latest.json"):
                self._send(name, path)
        if self._number:
            gone = [name for name in self._sent if name not in here]
            self._store.delete(gone)
            for name in gone:
                del self._sent[name]

    def _copy_checkpoints(self) -> None:
        for path in self._steps():
            place = path.relative_to(self.directory).as_posix()
            data = _content(path / "manifest.json")
            if not data or self._committed.get(place) == data:
                continue
            if _files_of(self._committed.get(place)) == _files_of(data):  # with metrics
                self._require_owner()
                self._put(f"{place}/manifest.json", data)
            elif not self._commit(place, path, data):
                continue
            self._committed[place] = data
        here = {path.relative_to(self.directory).as_posix() for path in self._steps()}
        for name, path in self._files():  # before retention deletes what it names now
            if name.endswith("latest.json") and self._may_follow(name, path):
                self._send(name, path)
        if here & self._committed.keys():
            for place in (self._committed.keys() | self._leftovers) - here:
                self._require_owner()
                self._delete(place)

    def _commit(self, place: str, path: Path, data: bytes) -> bool:
        """Copies the checkpoint at ``path``; False if retention has deleted it before it began."""
        files = _files_of(data) or {}
        with contextlib.ExitStack() as stack:
            try:  # retention may delete the files meanwhile, but not what is open
                opened = {n: stack.enter_context(open(path / n, "rb")) for n in files}
            except FileNotFoundError:
                return False
            self._require_owner()
            self._delete(place)  # what a killed writer has left, or another branch of the run
            for name, file in opened.items():
                self._store.upload(f"{place}/{name}", file.fileno())
                if (size := self._store.size(f"{place}/{name}")) != files[name]["size"]:
                    raise stores.StoreError(
                        f"{stores.join(self.url, place)}/{name} has {size} bytes instead of "
                        f"{files[name]['size']}"
                    )
        self._require_owner()
        self._put(f"{place}/manifest.json", data, only_new=True)
        return True

    def _put(self, name: str, data: bytes, only_new: bool = False) -> None:
        """Writes an object that others rely on, and reads it again: it may be cut short; or, if it
        was to be new, it is there already, of another process or because an answer was lost."""
        with contextlib.suppress(FileExistsError):
            self._store.write(name, data, only_new)
        if self._store.read(name) != data:
            if only_new:
                self._require_owner()
                self._store.delete([name])
            raise stores.StoreError(f"{self.url}/{name} has not what was written")

    def _delete(self, place: str) -> None:
        """Deletes a checkpoint, its manifest first: without it, it is none."""
        self._store.delete([f"{place}/manifest.json"])
        self._committed.pop(place, None)
        self._store.delete(f"{place}/{n.rpartition('/')[2]}" for n in self._store.list(place))
        self._leftovers.discard(place)

    def _send(self, name: str, path: Path) -> None:
        """Copies a file, unless the store has it."""
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            stamp = _stamp(path)
            if self._sent.get(name) != stamp:
                if name.endswith("latest.json"):
                    self._require_owner()
                    self._put(name, path.read_bytes())
                else:
                    self._store.upload(name, path)
                self._sent[name], self._sizes[name] = stamp, stamp[0]

    def _may_follow(self, name: str, path: Path) -> bool:
        """Whether the checkpoint that ``latest.json`` names is in the store."""
        folder = name.removesuffix("latest.json")
        return any(folder + step in self._committed for step in _pointed(_content(path)))

    def _files(self) -> Iterator[tuple[str, Path]]:
        """What is not of a checkpoint: names and paths."""
        for folder, folders, names in os.walk(self.directory):
            folders[:] = [one for one in folders if not re.fullmatch(r"step-\d{10,}", one)]
            for name in names:
                path = Path(folder) / name
                place = path.relative_to(self.directory).as_posix()
                if not _NOT_COPIED.fullmatch(place) and path.is_file() and not path.is_symlink():
                    yield place, path


def bring(path: str | os.PathLike[str]) -> Path:
    """Where ``path`` is on this machine: itself, or what is at a URL, copied to a temporary
    directory of this process: of a run or a directory of checkpoints, what is small, and the last
    intact checkpoint; all of anything else.

    Raises:
        UsageError: there is nothing at the URL, or its package is missing.
        CheckpointError: the store cannot be read.
    """
    if not stores.is_url(path):
        return Path(path)
    found = stores.local(path)
    if found.is_file():
        return found
    run = next((one for one in (found / "checkpoints", found) if manifest.paths(one)), None)
    if run is None:
        return stores.local(path, again=True, whole=True)
    with Mirror(os.fspath(path), writes=False) as mirror:
        mirror.bring_last()
        return mirror.directory


class _Taken(CheckpointError):
    """Another process writes the run."""


def _directory(url: str, last_owner: Callable[[], object]) -> tuple[Path, durable.Lock]:
    """The directory for ``url`` in the cache, and the lock that keeps other processes from it. Each
    worker of this machine has its own. One that has what the store lacks is for the chief, if its
    mark names the ``last_owner`` of the run."""
    found = cache.directory()
    if found is None:
        raise CheckpointError(
            f"{url} needs a directory for its files on this machine: set XDG_CACHE_HOME to one of "
            "this user alone"
        )
    last = url.rpartition("/")[2] or "store"
    place = found / "runs" / f"{last}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    for mark in [] if is_later_worker() else sorted(place.glob(f"*/*/{_UNSENT}")):
        with contextlib.suppress(CheckpointError):  # another process has it
            lock = durable.Lock(mark.parents[1] / ".lock")
            if last_owner() in _content(mark).decode(errors="replace").split():
                return mark.parent, lock
            lock.release()
            what = "%s has what was not copied to %s, which was written since: delete it, or give "
            logging.warning(what + "it as --model_dir", mark.parent, url)
    for number in itertools.count():
        directory = place / str(number) / last
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / _UNSENT).exists():
            with contextlib.suppress(CheckpointError):
                return directory, durable.Lock(directory.parent / ".lock")
    raise AssertionError


def is_later_worker() -> bool:
    """Whether ``TF_CONFIG`` says that this process is a worker, and not the first."""
    try:
        config = json.loads(os.environ.get("TF_CONFIG", "{}"))
        task, cluster = config["task"], config.get("cluster", {})
        first = not (cluster.get("chief") or cluster.get("master"))  # as TensorFlow calls it
        return task["type"] == "worker" and (int(task["index"]) > 0 or not first)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _content(path: Path) -> bytes:
    """The bytes of the file; none if it is not there."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _files_of(data: bytes | None) -> Any:
    """What a manifest says of its files."""
    try:
        return json.loads(data or b"{}").get("files")
    except (ValueError, AttributeError):
        return None


def _pointed(data: bytes) -> list[str]:
    """The name of the directory in a ``latest.json``."""
    try:
        name = json.loads(data)["directory"]
    except (ValueError, KeyError, TypeError):
        return []
    return [name] if isinstance(name, str) and re.fullmatch(r"step-\d{10,}", name) else []


def _stamp(path: Path) -> tuple[int, int]:
    of = path.stat()
    return of.st_size, of.st_mtime_ns


def _owner_of(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _token(data: bytes) -> object:
    return _owner_of(data).get("token")


def _has_left(data: bytes) -> bool:
    """Whether the owner says so, or was a process of this machine that has ended."""
    of = _owner_of(data)
    pid, place = of.get("process"), (of.get("boot"), of.get("host"))
    ended = place == (_boot(), socket.gethostname()) and of.get("started") != _started(pid)
    return bool(of.get("left")) or ended


def _name(data: bytes) -> str:
    of = _owner_of(data)
    return f"process {of.get('process')} on {of.get('host')}"


def _started(pid: Any) -> str:
    """When the process ``pid`` of this machine started, by its kernel; empty if it has ended."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _boot() -> str:
    """Which start of which machine this is; in a container, of its host."""
    with contextlib.suppress(OSError):
        names = os.readlink("/proc/self/ns/pid")
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + names
    return ""
