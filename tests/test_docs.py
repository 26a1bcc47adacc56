"""Each public name says what it is. The site of them is built by .ci/run, with the extra `docs`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from paths import ROOT

sys.path.insert(0, str(ROOT / ".docs"))

import public  # noqa: E402


def undocumented(path: str, value: Any) -> Iterator[str]:
    """``path`` if ``value`` has no docstring, and the public methods of a class that have none. An
    override may have that of its base."""
    members = vars(value) if inspect.isclass(value) else {}
    made = members and (value.__doc__ or "").startswith(f"{value.__name__}(")  # by a dataclass
    if made or not inspect.getdoc(value):
        yield path
    for name, member in members.items():
        is_method = inspect.isroutine(member) or isinstance(member, property)
        if is_method and not name.startswith("_") and not inspect.getdoc(getattr(value, name)):
            yield f"{path}.{name}"


def test_public_names_are_documented():
    found = []
    for path, module in public.modules().items():
        found += undocumented(path, module)
        for name, value in public.names(module).items():
            if inspect.isclass(value) or inspect.isroutine(value):
                found += undocumented(f"{path}.{name}", value)
    assert not found
