"""Filters what the commands write to standard error and to log files.

TensorFlow and TFDS log a page of start-up lines that do not concern the run. Their warnings and
errors stay, and so do all lines of ctl.
"""

from __future__ import annotations

import contextlib
import gc
import logging as python_logging
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from absl import logging

from ctl.base import durable
from ctl.base.streams import native_stderr_held

COLUMNS, INDENT = 80, "    "  # of what is printed, see `columns`

# Limit of flushing the output, whose reader may be stuck.
_FLUSH_SECONDS = 2.0

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

_TIME = "%Y-%m-%dT%H:%M:%S"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def log_to_terminal() -> None:
    """Logs to stderr as plain text: all lines of ctl, warnings and errors of other packages."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.set_stderrthreshold(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(_Formatter())
    handler.addFilter(_is_for_the_user)


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Inside, also appends log lines to ``path``, each with its time (UTC).

    An error that ends the context is appended, too. If the file cannot be opened, a warning is
    logged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        logging.warning("cannot open the log file %s: %s", path, error.strerror)
        yield
        return
    formatter = python_logging.Formatter("%(asctime)s.%(msecs)03dZ %(message)s", _TIME)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(_is_for_the_user)
    logger = python_logging.getLogger()
    logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        what = {"msg": f"{type(error).__name__}: {error}", "levelno": python_logging.ERROR}
        handler.handle(python_logging.makeLogRecord(what))
        raise
    finally:
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


def last_line(text: str) -> None:
    """Writes to stderr and the file of `log_to_file` why the process ends. For any thread."""
    # In one piece: `print` writes the newline separately.
    sys.stderr.write(for_terminal(text) + "\n")
    sys.stderr.flush()
    record = python_logging.makeLogRecord({"msg": text, "levelno": python_logging.ERROR})
    for handler in python_logging.getLogger().handlers:
        if isinstance(handler, python_logging.FileHandler):
            handler.handle(record)


def leave(exit_code: int, line: str = "") -> None:
    """Ends the process at once, after a flush of at most 2 s. Prints ``line`` first, if any.

    Where a collective has failed, TensorFlow's threads are still in it. An orderly end would wait
    for them, or crash with them and exit with another code.
    """
    within(_FLUSH_SECONDS, _flush, line)
    os._exit(exit_code)


def _flush(line: str) -> None:
    if line:
        last_line(line)
    logging.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def within(seconds: float, work: Callable[..., Any], *arguments: Any) -> None:
    """Calls ``work`` in a thread; returns when it is done, or after ``seconds``."""
    thread = threading.Thread(target=work, args=arguments, name="ctl_within", daemon=True)
    with contextlib.suppress(RuntimeError):  # there may be no more threads
        thread.start()
        thread.join(seconds)


class _LogFile(python_logging.FileHandler):
    def handleError(self, record: python_logging.LogRecord) -> None:
        """Nothing: checkpoints report a full disk with more detail."""


class _Formatter(python_logging.Formatter):
    def format(self, record: python_logging.LogRecord) -> str:
        text = record.getMessage()
        warns = record.levelno >= python_logging.WARNING
        return for_terminal(f"{record.levelname.lower()}: {text}" if warns else text)


def columns(stream: TextIO) -> int:
    """Columns of the lines that are written to ``stream``: 80, or those of a narrower terminal."""
    if stream.isatty():
        with contextlib.suppress(OSError, ValueError):
            return min(COLUMNS, os.get_terminal_size(stream.fileno()).columns or COLUMNS)
    return COLUMNS


def filled(pieces: Iterable[str], head: str = "") -> str:
    """Joins ``pieces`` after ``head`` to lines of at most the `columns` of standard output, the
    second and others indented. A piece that is longer than that has a line of its own."""
    lines, line, width = [], head, columns(sys.stdout)
    for piece in pieces:
        gap = "  " if line.strip() and line != head else ""
        if line.strip() and len(line + gap + piece) > width:
            lines.append(line.rstrip())
            line, gap = INDENT, ""
        line += gap + piece
    return "\n".join([*lines, line.rstrip()])


def for_terminal(text: str, stream: TextIO | None = None) -> str:
    """``text`` in lines of at most its `columns`, if ``stream`` (by default standard error) is a
    terminal. In a pipe or a file it stays one line, for programs that search it. Characters that
    would control a terminal, which a file of others may hold, are written as in Python."""
    text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    stream = stream or sys.stderr
    if not stream.isatty():
        return text
    wrap = textwrap.TextWrapper(columns(stream), subsequent_indent=INDENT, break_long_words=False)
    wrap.break_on_hyphens = False
    return "\n".join(wrap.fill(line) for line in text.splitlines())


def python() -> str:
    """The command that runs this interpreter; its virtual environment need not be active."""
    interpreter, here = Path(sys.executable), Path.cwd()
    active = shutil.which("python")
    if active and Path(active).parent == interpreter.parent:
        return "python"
    return str(interpreter.relative_to(here) if interpreter.is_relative_to(here) else interpreter)


def write_file(flag: str, path: str, content: str) -> None:
    """Writes what ``flag`` asks for, and names the file on a line. Makes its folder. A file is
    replaced when the new one is whole; a pipe, a device and what a link leads to are written to.

    Raises:
        CheckpointError: it cannot be written.
    """
    file = Path(path)
    with durable.writing(f"--{flag}={path}"):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            file.write_text(content, encoding="utf-8")
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            durable.write_text(file, content, via=file.parent)
    print(f"{flag}: {path}", file=sys.stderr)


def _is_for_the_user(record: python_logging.LogRecord) -> bool:
    return record.levelno >= python_logging.WARNING or record.pathname.startswith(_PACKAGE)


LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def load_tensorflow(errors: bool = True) -> None:
    """Imports TensorFlow and Keras and lists the devices.

    TensorFlow's C++ code writes to stderr meanwhile, about CPU features, missing GPUs and missing
    kernels. That output is shown only if the import fails. A user who has set
    ``TF_CPP_MIN_LOG_LEVEL`` or ``AUTOGRAPH_VERBOSITY`` sees what these ask for later.

    Args:
        errors: False silences errors of the C++ code and of the coordinator of parameter servers,
            which writes hundreds of lines about a lost worker, a normal event there.
    """
    os.environ[LEVEL] = log_level(os.environ.get(LEVEL), errors)
    if "AUTOGRAPH_VERBOSITY" not in os.environ:
        python_logging.getLogger("tensorflow").addFilter(
            lambda record: not str(record.msg).startswith("AutoGraph could not ")
        )
    if not errors:
        logging.get_absl_handler().addFilter(lambda r: "cluster_coordinator" not in r.pathname)
    with native_stderr_held():
        import_tensorflow()
        import tensorflow as tf

        tf.config.list_physical_devices()


def import_tensorflow() -> None:
    """Imports TensorFlow and Keras, and touches no device."""
    gc.disable()  # collecting garbage among modules, which stay, takes a tenth of the start
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    gc.freeze()
    gc.enable()


def log_level(given: str | None, errors: bool) -> str:
    """The ``TF_CPP_MIN_LOG_LEVEL`` of a command, for the one that is ``given``: without ``errors``,
    2, which many set to see less, is 3."""
    level = given or "2"
    return "3" if level == "2" and not errors else level


def run_first_operation() -> None:
    """Runs an operation that oneDNN has no kernel for, which TensorFlow's C++ code tells once in a
    process, here unseen. Call it once there is a strategy: devices cannot be configured later."""
    import tensorflow as tf

    with native_stderr_held(), tf.device("/cpu:0"):
        tf.transpose(tf.zeros([1, 1], tf.int64))
