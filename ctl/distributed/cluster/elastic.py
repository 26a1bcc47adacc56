"""What a worker of an elastic job tells the launcher that started it."""

from __future__ import annotations

import contextlib
import os

# Set by the launcher: the file descriptor of a pipe to it.
VARIABLE = "CTL_ELASTIC"

TRAINED, LOST = b"t", b"l"  # this worker has finished a call; it has lost another worker

# Seconds that a worker waits, before the workers are connected, for one that is there and does not
# answer: the launcher can start it again. Other jobs wait as long as --startup_timeout says.
FROZEN_SECONDS = 10.0

# Seconds that a worker which begins waits for a lost chief to free its checkpoints. NFS frees those
# of a frozen machine after 90 s.
_LOCK_SECONDS = 120.0


def is_elastic() -> bool:
    """Whether the launcher goes on without a worker that is lost."""
    return VARIABLE in os.environ


def lock_timeout() -> float:
    """For the `ctl.CheckpointManager` of a job: 0 unless it is elastic."""
    return _LOCK_SECONDS if is_elastic() else 0.0


def tell(what: bytes) -> None:
    """Tells the launcher `TRAINED` or `LOST`. Has no effect in other jobs."""
    # The launcher may have been killed, or a program between it and this one has closed the pipe.
    with contextlib.suppress(OSError, ValueError):
        os.write(int(os.environ.get(VARIABLE, "-1")), what)
