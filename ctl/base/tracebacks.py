"""The traceback of an error in code of the user's: its frames, without those of the libraries.

TensorFlow lists the frames of an error in a graph in its message. Here they are frames of the
traceback, so that Python, IPython and the command line show the line that failed as the last one.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ctl.errors import CtlError

_CTL = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_GLUE = f"{_CTL}/base/autograph.py"  # between two frames of the user's
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)', re.MULTILINE)
# What ends a message of AutoGraph that begins with "in user code:".
_LAST = re.compile(r"^    (\w+): (.*)\Z", re.MULTILINE | re.DOTALL)
_OF_ANY = "StagingError"  # what AutoGraph makes of an error that it cannot make again
# Where an operation was made that failed.
_MADE = re.compile(
    r'Detected at node .*\(most recent call last\):\n((?:\s*(?:File "|<stack).*\n*)*)'
)

_PYTHON = "\nTraceback (most recent call last):\n"  # of a `tf.numpy_function` and the like
_DATA = "IteratorGetNext"  # the operation that reads the data
_SEVERAL = re.compile(r"\A\d+ root error.*\n *\(0\) \w+: *(.*?)\s*\n *\(1\) ", re.DOTALL)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Frame = tuple[str, int, str]  # file, line and function


def hides_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns ``function``, whose errors show the user's code alone, see `of_the_user`. After
    ``tf.debugging.disable_traceback_filtering()``, they show all."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            tensorflow = sys.modules.get("tensorflow")
            if tensorflow and not tensorflow.debugging.is_traceback_filtering_enabled():
                raise
            if (shown := of_the_user(error)) is None:
                raise
        raise shown  # without the frames of ctl, Keras and TensorFlow

    return call


def of_the_user(error: BaseException) -> BaseException | None:
    """Returns ``error`` with the frames of the user's files alone, and without the frames in its
    message; an error of its type if TensorFlow's cannot be changed. None if it was not raised in a
    file of the user's, as a bug of ctl. An error of `ctl.errors` is always the user's."""
    ours = isinstance(error, CtlError)
    message = Exception.__str__(error) if ours else str(error)
    listed, said = _listed(message)
    real: list[tuple[_Frame, Any]] = []
    step = error.__traceback__
    while step:
        code = step.tb_frame.f_code
        real.append(((code.co_filename, step.tb_lineno, code.co_name), step))
        step = step.tb_next
    frames = [each for each in real if each[0] not in listed] + [(f, None) for f in listed]
    called = [f[0] for f, _ in frames if not _is_of_libraries(f[0]) and f[0] != _GLUE]
    # What ctl does wrong with a user's object is a bug: the innermost frame is its own then. Of an
    # operation in a function of the data, TensorFlow lists no frame.
    if not (ours or _DATA in message or (called and is_of_the_user(called[-1]))):
        return None
    if said != message and hasattr(error, "node_def"):
        kind: Any = type(error)
        error = kind(error.node_def, getattr(error, "op", None), said)
    elif said != message:
        said = Said(said) if isinstance(error, KeyError) else said
        error.args = (said, *error.args[1:])
    # AutoGraph's KeyError shows its message, not what it has.
    remade = type(error).__name__ == _OF_ANY or isinstance(error, KeyError)
    if remade and (last := _LAST.search(message)):
        kind = getattr(builtins, last[1], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error = kind(Said(said))
    following: TracebackType | None = None
    for frame, step in reversed(frames):
        if is_of_the_user(frame[0]):
            step = step or _made_of(frame)
            following = TracebackType(following, step.tb_frame, step.tb_lasti, frame[1])
    error.__cause__, error.__suppress_context__ = None, True
    return error.with_traceback(following)


class Said(str):
    """A message that a `KeyError`, which shows the key that it has by `repr`, shows as it is."""

    def __repr__(self) -> str:
        return str(self)


def text_of(error: BaseException) -> str:
    """The traceback of what `of_the_user` returns, as Python prints it."""
    lines = ["Traceback of your code (the frames of ctl, Keras and TensorFlow are left out):"]
    for frame in traceback.extract_tb(error.__traceback__):
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        lines += [f"    {frame.line}"] if frame.line else []
    said = traceback.format_exception_only(type(error), error)
    return "\n".join([*lines, *(line.rstrip() for line in said)])


def _listed(message: str) -> tuple[list[_Frame], str]:
    """The frames that TensorFlow lists in ``message``, and the message without them."""
    if message.startswith("in user code:") and (last := _LAST.search(message)):
        listed, said = message, last[2].strip().replace("\n    ", "\n")  # AutoGraph indents
    elif (made := _MADE.search(message)) or _PYTHON in message:
        said = _MADE.sub("", message).replace("Graph execution error:", "").strip()
        if several := _SEVERAL.search(said):
            said = several[1]
        said, python, of_python = said.partition(_PYTHON)
        listed = of_python if python or not made else made[1]
    else:
        return [], message
    frames = [(f[1], int(f[2]), f[3]) for f in _FRAME.finditer(listed)]
    # An operation is made below a call of the loop, maybe an earlier one.
    first = next((n for n, f in enumerate(frames) if f[0].startswith(f"{_CTL}/")), 0)
    frames = list(dict.fromkeys(frames[first:]))
    # AutoGraph makes a function of each block: the last of their frames has failed.
    pairs = itertools.zip_longest(frames, frames[1:])
    return [f for f, then in pairs if not (then and then[::2] == f[::2] and _is_block(f))], said


def _is_block(frame: _Frame) -> bool:
    return bool(re.match(r"\s*(if|elif|for|while)\b", linecache.getline(*frame[:2])))


def _made_of(frame: _Frame) -> Any:
    """A traceback with the file, the line and the function of a frame that is gone."""
    name, line, function = frame
    # As wide as the line, or Python would underline a part of it.
    text = linecache.getline(name, line).rstrip() or "x"
    failing = re.sub(r"\S.*", lambda found: "x" * len(found[0]), text)
    above = "\n" * (line - 1) if failing[0] == "x" else "\n" * (line - 2) + "if 1:\n"
    code = compile(above + failing, name, "exec").replace(co_name=function)
    try:
        exec(code, {})
    except NameError as error:
        assert error.__traceback__
        return error.__traceback__.tb_next


def _is_of_libraries(name: str) -> bool:
    generated = "__autograph_generated_file" in name or name.startswith("<frozen")
    return not name or generated or "/site-packages/" in name or name.startswith(_LIBRARIES)


def is_of_the_user(name: str) -> bool:
    """Whether the file ``name`` is neither of ctl, of Python nor of an installed package."""
    return not (_is_of_libraries(name) or name.startswith(f"{_CTL}/"))
