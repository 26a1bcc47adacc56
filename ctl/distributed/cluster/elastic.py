"""What a worker of an elastic job tells the launcher that started it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

# Set by the launcher: the file descriptor of a pipe to it.
VARIABLE = "CTL_ELASTIC"

TRAINED, LOST = b"t", b"l"  # this worker has finished a call; it has lost another worker

# Seconds that a worker waits, before the workers are connected, for one that is there and does not
# answer: the launcher can start it again. Other jobs wait as long as --startup_timeout says.
FROZEN_SECONDS = 10.0


def is_elastic() -> bool:
    """Whether the launcher goes on without a worker that is lost."""
    return VARIABLE in os.environ


def blame(ranks: Iterable[int]) -> bytes:
    """Names workers that are frozen, for `tell`."""
    return b"".join(b"<%d>" % rank for rank in ranks)


def blamed(told: bytes) -> set[int]:
    """The ranks in what a worker has told."""
    return {int(rank) for rank in re.findall(rb"<(\d+)>", told)}


def tell(what: bytes) -> None:
    """Tells the launcher ``what``: `TRAINED`, `LOST`, or whom to `blame`. Has no effect in other
    jobs."""
    # The launcher may have been killed, or a program between it and this one has closed the pipe.
    with contextlib.suppress(OSError, ValueError):
        os.write(int(os.environ.get(VARIABLE, "-1")), what)
