"""Keeps TensorFlow's notices (oneDNN, CPU features, XLA, AutoGraph) out of standard error.

They concern no run, and TensorFlow writes some of them whatever ``TF_CPP_MIN_LOG_LEVEL`` says.
`ctl.logs.console` does this for the commands. Here is what a program needs that imports ctl. Lines
that are not known as notices stay. A program that has set ``TF_CPP_MIN_LOG_LEVEL`` itself sees all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_DRIVER = "/proc/driver/nvidia/version"
_OWN = "CTL_MIN_LOG_LEVEL"  # that ctl has set `LEVEL`; processes that are started inherit both

_NOTICE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:\d\d:|"
    rb"To enable the following instructions: |E\d{4} .*(oneDNN supports DT_|cuInit: .*\(303\))"
)


def set_level(level: str = "2") -> None:
    """Sets what TensorFlow's C++ code logs, by default errors, unless the user has done so."""
    if LEVEL not in os.environ:
        os.environ[LEVEL] = os.environ[_OWN] = level


def spec_of_tensorflow() -> ModuleSpec | None:
    """Returns how to import TensorFlow: as ever, without notices. For `ctl.__init__`."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is not None and spec.loader is not None:
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            with notices_filtered():
                load(module)
                if not os.path.exists(_DRIVER):  # a failing cuInit is no news then
                    module.config.list_physical_devices()
            _filter_autograph()

        loader.exec_module = exec_module
    return spec


def say_once() -> None:
    """Lets TensorFlow say, unheard, what it says once in a process. Needs a strategy: it runs an
    operation."""
    global _said
    if _said:
        return
    _said = True
    import tensorflow as tf

    _filter_autograph()
    with notices_filtered(), tf.device("/cpu:0"):
        tf.transpose(tf.zeros([1, 1], tf.int64))  # oneDNN has no kernel for it


_said = False


@contextlib.contextmanager
def notices_filtered() -> Iterator[None]:
    """Holds what is written to standard error inside, then writes it without notices."""
    if os.environ.get(_OWN) != os.environ.get(LEVEL) or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    with os.fdopen(os.memfd_create("stderr"), "w+b") as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            held.seek(0)
            with os.fdopen(kept, "wb") as stderr, contextlib.suppress(OSError):
                stderr.writelines(line for line in held if not _NOTICE.match(line))


def _filter_autograph() -> None:
    if "AUTOGRAPH_VERBOSITY" not in os.environ:
        logging.getLogger("tensorflow").addFilter(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("AutoGraph could not ")
