"""In what objects of JSON differ, such as what workers say of themselves; a few of many texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "(absent)"


def differences(objects: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the names under which ``objects`` differ, sorted, each with the value in every
    object, or `ABSENT`. Of a name under which all have objects: ``name: key`` of what differs."""
    found: dict[str, list[Any]] = {}
    for name in sorted(set().union(*objects)):
        values = [one.get(name, ABSENT) for one in objects]
        if all(isinstance(value, dict) for value in values):
            found |= {f"{name}: {key}": each for key, each in differences(values).items()}
        elif any(value != values[0] for value in values):
            found[name] = values
    return found


def names_of(names: Sequence[str]) -> str:
    """The first three of ``names``, and how many more there are: ``a, b, c and 2 more``."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def first_three(texts: Sequence[str]) -> str:
    """The first three of ``texts``, and how many more there are."""
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
