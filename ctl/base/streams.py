"""Standard output and standard error that may fail without an end to the command.

A disk may be full, a terminal gone or a stream closed. A training goes on without its output, and
`ctl.flags.parsing.exit_codes` says at the end that some of it was lost.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging


class Descriptor(io.FileIO):
    """A standard stream whose failed writes are noted in ``lost`` and raise nothing.

    Standard output raises `BrokenPipeError` once, as in ``| head``: then nobody wants the rest.
    """

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # another program made it non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            reader_ended = isinstance(error, BrokenPipeError)
            first = reader_ended and not isinstance(self.lost, BrokenPipeError)
            if first or not self.lost:
                self.lost = error
            if first and self.name == "<stdout>":
                raise
            return len(data)


def guard() -> None:
    """Makes ``sys.stdout`` and ``sys.stderr`` streams that note failed writes.

    Call it before files are opened: those would get the numbers of closed streams, and TensorFlow
    would write its errors into them. A stream that was replaced stays. A second call does nothing.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed, as in `>&-`
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(1, "<stdout>", sys.stdout)
    if sys.stderr is sys.__stderr__:
        _set_stderr(_guarded(2, "<stderr>", sys.stderr))


def _guarded(number: int, name: str, before: Any) -> io.TextIOWrapper:
    """``before`` is None if the stream was closed."""
    descriptor = Descriptor(number, "w", closefd=False)
    descriptor.name = name
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(descriptor))
    before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        encoding=before.encoding,
        # A character that the encoding lacks must not end the command.
        errors="backslashreplace" if before.errors == "strict" else before.errors,
        line_buffering=before.line_buffering or before.write_through,  # `python -u`
    )


def _set_stderr(stream: Any) -> None:
    sys.stderr = stream
    # absl keeps its first stream, and writes each line twice if that is not `sys.stderr`.
    logging.get_absl_handler().python_handler.setStream(stream)


def lost_output() -> OSError | None:
    """Flushes standard output. Returns an error if some of it was lost; `BrokenPipeError` if its
    reader ended."""
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        return error
    descriptor = _descriptor(sys.stdout)
    return descriptor.lost if descriptor else None


def _descriptor(stream: Any) -> Descriptor | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, Descriptor) else None


@contextlib.contextmanager
def native_stderr_held() -> Iterator[None]:
    """Holds what C++ code writes to standard error inside; shows it only if an exception ends the
    context. Python's lines appear at once, after `guard`."""
    before = sys.stderr
    before.flush()
    kept = os.dup(2)
    guarded = _descriptor(before) is not None
    with os.fdopen(os.memfd_create("stderr"), "w+b") as held:
        if guarded:
            _set_stderr(_guarded(kept, "<stderr>", before))
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            with os.fdopen(os.dup(kept), "wb") as stderr:
                shutil.copyfileobj(held, stderr)
            raise
        finally:
            os.dup2(kept, 2)
            if guarded:
                sys.stderr.flush()
                _set_stderr(before)
            os.close(kept)
