"""The only place for the short names that flags and builders share, and for what a wrong one says.

Imports no TensorFlow: flags are checked before it is loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from ctl.errors import UsageError

MODELS = ("convnet", "dense", "resnet20", "tiny_transformer")
SCHEDULES = ("constant", "piecewise", "cosine", "polynomial", "exponential", "inverse_sqrt")
SCALING_RULES = ("none", "linear", "sqrt")

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_name(what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
    """Raises `UsageError` with the closest known name unless ``name`` is one of ``known``.

    ``otherwise`` is what else the user may write, appended to the list of names.
    """
    known = tuple(known)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UsageError(
        f"unknown {what} {name!r}: {hint}the choices are {', '.join(known)}{otherwise}"
    )


def is_function_name(name: str) -> bool:
    """Whether ``name`` has the form ``package.module:function``."""
    return _FUNCTION.fullmatch(name) is not None


def check_model_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` is one of `MODELS` or has the form
    ``package.module:function``. Whether that function exists is seen when it is imported."""
    if not is_function_name(name):
        check_name("model", name, MODELS, ", or package.module:function for your own")
