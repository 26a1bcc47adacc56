"""The traceback of an error in code of the user's: its frames, without those of the libraries."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_CTL = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# A frame as AutoGraph lists it in a message that begins with "in user code:".
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+).*\n(?: *(.*)\n)?', re.MULTILINE)
_LAST = re.compile(r"^    (\w+): (.*)\Z", re.MULTILINE | re.DOTALL)


def of_the_user(error: BaseException) -> str | None:
    """The traceback of ``error`` with the frames of the user's files alone, as Python prints it;
    None if it was not raised in a file of the user's, as a bug of ctl."""
    frames = [
        (frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    message = str(error)
    said = [""]
    if message.startswith("in user code:"):
        traced = [(f[1], int(f[2]), f[3], f[4] or "") for f in _FRAME.finditer(message)]
        frames += traced
        if last := _LAST.search(message):
            said = [f"{last[1]}: {last[2].strip()}".replace("\n    ", "\n")]  # AutoGraph indents
    if not said[0]:
        said = [line.rstrip() for line in traceback.format_exception_only(type(error), error)]
    mine = [frame for frame in dict.fromkeys(frames) if _is_of_the_user(frame[0])]
    # What ctl does wrong with a user's object is a bug: the innermost frame but for TensorFlow and
    # Keras is its own then.
    inner = next((name for name, *_ in reversed(frames) if not name.startswith(_LIBRARIES)), "")
    if not mine or not _is_of_the_user(inner):
        return None
    lines = ["Traceback of your code (the frames of ctl, Keras and TensorFlow are left out):"]
    for name, number, function, line in mine:
        lines.append(f'  File "{name}", line {number}, in {function}')
        lines += [f"    {line}"] if line else []
    return "\n".join([*lines, *said])


def _is_of_the_user(name: str) -> bool:
    generated = name.startswith("<") or "__autograph_generated_file" in name
    return bool(name) and not generated and not name.startswith((f"{_CTL}/", *_LIBRARIES))
