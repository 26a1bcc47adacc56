"""Errors for the user: one line that names the problem and the remedy.

A command line prints ``str(error)`` without a traceback and exits with ``error.exit_code``. Any
other exception, a bug of ctl or of the user's code, keeps its traceback; the exit code is 1.
"""


class CtlError(Exception):
    """Base class. ``exit_code`` is the exit code of the command line."""

    exit_code = 1

    def __str__(self) -> str:
        """The message, without the stack that AutoGraph prepends while it traces."""
        return super().__str__().rstrip().rpartition(f"\n    {type(self).__name__}: ")[2]


class UsageError(CtlError):
    """The request cannot work: a bad flag, missing data, a wrong argument."""

    exit_code = 2


class DivergedError(CtlError):
    """The loss or the weights are no longer finite, or no longer equal on all replicas."""

    exit_code = 3


class CheckpointError(CtlError):
    """State cannot be written or read: a full disk, no intact checkpoint, variables that differ."""

    exit_code = 4


class PeerError(CtlError):
    """Another worker died, froze or did not start, or the port of this one is taken."""

    exit_code = 5


class Preempted(CtlError, SystemExit):
    """SIGTERM or SIGINT stopped the training, after a save if the loop has checkpoints.

    The same command resumes. A program that does not catch it exits with 42, without a traceback,
    as with `tf.distribute.experimental.PreemptionCheckpointHandler`.
    """

    exit_code = code = 42


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a process that ``error`` ends; 0 for None."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, CtlError | KeyboardInterrupt):
        return getattr(error, "exit_code", 130)
    return int(error is not None)
