"""The directory of what runs leave for later runs: programs of XLA, choices of trials, indices.

It holds machine code that is executed, so nobody else may be able to write there. Imports no
TensorFlow.
"""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

from absl import logging


def path() -> Path:
    """``$XDG_CACHE_HOME/ctl``, by default ``~/.cache/ctl``. It may be missing, or anybody's."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "ctl"


def directory() -> Path | None:
    """`path`, of mode 0700, made if it is missing; None, with a warning, if it cannot be made or
    somebody else could write there."""
    found = path()
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        found.mkdir(mode=0o700, exist_ok=True)
        reason = why_not(found)
    except OSError as error:
        reason = f"{error.filename or found}: {error.strerror}"
    if reason:
        logging.warning("no cache for later runs: %s", reason)
        return None
    return found


def why_not(path: Path) -> str | None:
    """Why ``path`` is no directory of this user alone; None if it is. Raises `OSError`."""
    of = os.lstat(path)
    if not stat.S_ISDIR(of.st_mode):
        return f"{path} is not a directory"
    if of.st_uid != os.geteuid() or of.st_mode & 0o077:
        return f"{path} is open to other users: chmod 700 it, or set XDG_CACHE_HOME"
    for parent in path.resolve().parents:  # who can rename a parent can put another there
        of = os.stat(parent)
        others = of.st_mode & 0o022 and not of.st_mode & stat.S_ISVTX
        if others or of.st_uid not in (0, os.geteuid()):
            return f"{parent}, above {path.name}, is open to other users: set XDG_CACHE_HOME"
    return None


@functools.cache
def processor() -> str:
    """The model and the instructions of the processor, as Linux names them; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    wanted = ("model name", "flags", "Features")
    return " ".join(sorted({line for line in lines if line.startswith(wanted)}))
