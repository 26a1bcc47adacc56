"""The guard of `ctl.launch`: a process that leaves none of the job behind when the launcher is
killed."""

from __future__ import annotations

import contextlib
import os
import signal


class Guard:
    """Kills the watched process groups when this process is gone, a context manager."""

    def __enter__(self) -> Guard:
        read, write = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(write)
            _guard(read)
        os.close(read)
        self._pipe = write
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)
        os.waitpid(self._process, 0)

    def watch(self, group: int) -> None:
        """Adds a process group."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Removes a process group, which has ended."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a killed guard does not end the job
            os.write(self._pipe, line.encode())


def _guard(read: int) -> None:
    """The guard process. Does not return."""
    os.setsid()  # apart from the group of the launcher, which may get Ctrl-C or be killed
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(read) as lines:
        for line in lines:  # until the launcher's end of the pipe is closed
            change = groups.add if line[0] == "+" else groups.discard
            change(int(line[1:]))
    for group_id in groups:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.killpg(group_id, signal.SIGKILL)
    os._exit(0)
