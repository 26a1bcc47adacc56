"""Checks of the model_dir: it can be written, and its renames are atomic."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ctl.base import console, durable, stores
from ctl.base.units import size_text
from ctl.doctor.report import Finding, fine, not_fine, skipped
from ctl.errors import CheckpointError, UsageError

_SECONDS = 1.0  # of reading a file that is replaced meanwhile
_MOST_SECONDS = 30.0  # for all checks of a model_dir
_LAST_SECONDS = 5.0  # of a write that is under way
_LINES = 4000  # of a file that is replaced: 8 to 20 KB

_REMEDIES = {
    errno.EROFS: "It is mounted for reading. Mount it for writing, or choose another --model_dir.",
    errno.EACCES: "Give this user the right to write there, or choose another --model_dir.",
    errno.EPERM: "Give this user the right to write there, or choose another --model_dir.",
    errno.ENOSPC: "Delete something there, or choose a --model_dir with space.",
    errno.EDQUOT: "Delete something there, or choose a --model_dir with space.",
    errno.ENOTDIR: "A file is in the way. Choose another --model_dir.",
    errno.EEXIST: "A file is in the way. Choose another --model_dir.",
}


def check_model_dir(path: str | None) -> Finding:
    """Checkpoints can be written there: files, their renames, and a lock."""
    if not path:
        return skipped("model_dir", "give --model_dir")
    check = _stored if stores.is_url(path) else _written
    found: list[Finding] = []
    console.within(_MOST_SECONDS, lambda: found.append(check(path)))
    silent = f"{path}: no answer after {_MOST_SECONDS:.0f} s"
    return found[0] if found else not_fine("model_dir", silent, _SILENT)


_SILENT = "Its file system does not answer. See whether its server and the way there are up."


def _written(path: str) -> Finding:
    try:
        with _scratch(Path(path)) as folder:
            durable.write_text(folder / "file", lines(0), via=folder)
            (folder / "unfinished").mkdir()
            durable.publish(folder / "unfinished", folder / "final")
            durable.Lock(folder / ".lock").release()
            reads, torn = replacing(folder / "file", [folder / "file"])
            free = shutil.disk_usage(folder).free
    except (OSError, CheckpointError) as error:
        number = error.errno if isinstance(error, OSError) else None
        remedy = _REMEDIES.get(number or 0, "Choose another --model_dir.")
        return not_fine("model_dir", f"{path}: {durable.reason_of(error)}", remedy)
    if torn:
        return not_fine("model_dir", f"{path}: {torn} of {reads} reads met half a file", _TORN)
    return fine("model_dir", f"{path}: can be written, atomic, {size_text(free)} free")


def _stored(url: str) -> Finding:
    """A run needs of a store: writes, reads of what was just written, and a conditional put."""
    name = f"doctor-{secrets.token_hex(4)}"
    try:
        store = stores.open_store(url)
        started = time.monotonic()
        store.write(name, b"1", only_new=True)
        seconds = time.monotonic() - started
        try:
            with contextlib.suppress(FileExistsError):
                store.write(name, b"2", only_new=True)
                return not_fine("model_dir", f"{url}: two writers can take one name", _NO_PUT)
            if store.read(name) != b"1" or name not in store.list():
                return not_fine("model_dir", f"{url}: what was written is not there", _LATE)
        finally:
            store.delete([name])
    except (CheckpointError, UsageError, FileExistsError, FileNotFoundError) as error:
        return not_fine("model_dir", str(error), "Mend that, or choose another --model_dir.")
    return fine("model_dir", f"{url}: can be written, {seconds * 1e3:.0f} ms for a small object")


_NO_PUT = "Give it a store with conditional puts, or see that only one job writes there."
_LATE = "Choose a store that shows at once what was written."
_TORN = (
    "A rename is not atomic there, so a kill may cost a checkpoint. Choose a --model_dir on a disk "
    "or an NFS."
)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A folder in ``directory`` that is deleted at the end, as is ``directory`` if it is new."""
    new = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    folder = durable.scratch(directory, "doctor")
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may write there already
            for place in new:
                place.rmdir()


def replacing(mine: Path | None, others: Collection[Path]) -> tuple[int, int]:
    """Reads ``others`` for a second, while a thread replaces the file ``mine`` again and again.

    Returns:
        The number of reads, and of those that found no file or a part of one.

    Raises:
        OSError: the file cannot be replaced or read.
    """
    ended, failed = threading.Event(), []

    def write() -> None:
        number = 0
        try:
            while mine and not ended.wait(0.002):
                durable.write_text(mine, lines(number := number + 1), via=mine.parent)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=write, name="replacing", daemon=True)
    thread.start()
    reads, torn, end = 0, 0, time.monotonic() + _SECONDS
    while time.monotonic() < end and not failed:
        for path in others:
            reads, torn = reads + 1, torn + (not _is_whole(path))
        time.sleep(0.001)
    ended.set()
    thread.join(_LAST_SECONDS)
    if failed:
        raise failed[0]
    return reads, torn


def lines(number: int) -> str:
    """The text of a file that is replaced: a part of it, or of two of them, is known as one."""
    return f"{number}\n" * _LINES


def _is_whole(path: Path) -> bool:
    try:
        found = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # of an NFS: the file was replaced after it was opened
            return True
        raise
    return len(found) == _LINES and len(set(found)) == 1
