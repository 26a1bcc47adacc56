"""The only place that decides what the commands let through to standard error.

TensorFlow and TFDS log a page of start-up lines that are not about the user's run; warnings and
errors, and what ctl itself says, stay.
"""

from __future__ import annotations

import contextlib
import gc
import logging as python_logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from absl import logging

_TIME = "%Y-%m-%dT%H:%M:%S"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def log_to_terminal() -> None:
    """Log lines as plain text on stderr: all of ctl's, warnings of everything else."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.set_stderrthreshold(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(_Formatter())
    handler.addFilter(_is_for_the_user)


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Inside, log lines go to the end of ``path``, too, each with its time (UTC); at last the error
    that ends it. A file that cannot be written is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = python_logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        logging.warning("there will be no %s: %s", path, error.strerror)
        yield
        return
    formatter = python_logging.Formatter("%(asctime)s.%(msecs)03dZ %(message)s", _TIME)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(_is_for_the_user)
    handler.handleError = lambda record: None  # of a full disk the checkpoints say more
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
    """Says why the process ends on stderr and in the file of `log_to_file`: for threads."""
    sys.stderr.write(text + "\n")  # at once: `print` writes the end of the line apart
    sys.stderr.flush()
    record = python_logging.makeLogRecord({"msg": text, "levelno": python_logging.ERROR})
    for handler in python_logging.getLogger().handlers:
        if isinstance(handler, python_logging.FileHandler):
            handler.handle(record)


class _Formatter(python_logging.Formatter):
    def format(self, record: python_logging.LogRecord) -> str:
        text = record.getMessage()
        warns = record.levelno >= python_logging.WARNING
        return f"{record.levelname.lower()}: {text}" if warns else text


def _is_for_the_user(record: python_logging.LogRecord) -> bool:
    return record.levelno >= python_logging.WARNING or record.pathname.startswith(_PACKAGE)


def load_tensorflow(errors: bool = True) -> None:
    """Imports TensorFlow and looks for devices. What its C++ code writes to stderr meanwhile, about
    CPU features and GPUs that are not there, is shown only when that fails.

    Without ``errors`` neither its C++ code nor its coordinator of parameter servers writes any: a
    worker that is lost gets hundreds of lines, for what is no error there.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if errors else "3")
    if not errors:
        logging.get_absl_handler().addFilter(lambda r: "cluster_coordinator" not in r.pathname)
    gc.disable()  # modules stay: to look for garbage among them is a tenth of a start
    with _native_stderr_held():
        import keras  # noqa: F401
        import tensorflow as tf

        tf.config.list_physical_devices()
    gc.freeze()
    gc.enable()


def discard_output(stream: TextIO) -> None:
    """What is written to ``stream`` from here on is lost, also what is in its buffer: it cannot be
    written, and would raise again when the process ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def _native_stderr_held() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
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
            os.close(kept)
