"""The only place that decides what the commands let through to standard error.

TensorFlow and TFDS log a page of start-up lines that are not about the user's run; warnings and
errors, and what ctl itself says, stay.
"""

from __future__ import annotations

import contextlib
import logging as python_logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from absl import logging

_PACKAGE = str(Path(__file__).parent) + os.sep


def log_to_terminal() -> None:
    """Log lines as plain text on stderr: all of ctl's, warnings of everything else."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.set_stderrthreshold(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(_Formatter())
    handler.addFilter(_is_for_the_user)


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
    with _native_stderr_held():
        import tensorflow as tf

        tf.config.list_physical_devices()


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
