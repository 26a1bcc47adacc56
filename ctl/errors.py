"""Errors that are meant for the user: one line that names the thing and the remedy.

The command lines print ``str(error)`` without a traceback and exit with ``error.exit_code``.
Anything that is not a `CtlError` is a bug: it keeps its traceback and exits with 1.
"""


class CtlError(Exception):
    """Base class. ``exit_code`` is what a command line exits with."""

    exit_code = 1

    def __str__(self) -> str:
        """The one line, without the stack that AutoGraph puts before it while it traces."""
        return super().__str__().rstrip().rpartition(f"\n    {type(self).__name__}: ")[2]


class UsageError(CtlError):
    """The request cannot work: a bad flag, missing data, a wrong argument."""

    exit_code = 2


class DivergedError(CtlError):
    """The loss or the weights are no longer finite."""

    exit_code = 3


class CheckpointError(CtlError):
    """State cannot be written or read: a full disk, no intact checkpoint, other variables."""

    exit_code = 4


class PeerError(CtlError):
    """Another worker died, froze or never came."""

    exit_code = 5


class Preempted(CtlError):
    """SIGTERM or SIGINT arrived and the state was saved: the same command resumes (42 as in
    ``tf.distribute.experimental.PreemptionCheckpointHandler``)."""

    exit_code = 42
