"""The public modules of ctl and their names, for the site and for tests/test_docs.py."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ctl

PROGRAM = "ctl.recipes.tutorial"  # in cells: to import it is to run it


def modules() -> dict[str, ModuleType]:
    """Each public module by the name that users import: ``ctl.actions`` is `ctl.base.actions`."""
    recipes = importlib.import_module("ctl.recipes")
    files = [f"ctl.recipes.{file.name}" for file in pkgutil.iter_modules(recipes.__path__)]
    found = {"ctl": ctl, **dict(_below("ctl", ctl))}
    for name in ("ctl.inspect", *files):
        if name != PROGRAM:
            found[name] = importlib.import_module(name)
    return found


def names(module: ModuleType) -> dict[str, Any]:
    """The public names of ``module`` but its modules: those of ``__all__``, else the classes and
    functions that it defines."""
    listed = getattr(module, "__all__", None)
    values = {name: getattr(module, name) for name in listed or vars(module)}
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, ModuleType)
        and (listed or (not name.startswith("_") and _is_defined_in(module, value)))
    }


def _below(path: str, module: ModuleType) -> Iterator[tuple[str, ModuleType]]:
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield f"{path}.{name}", value
            yield from _below(f"{path}.{name}", value)


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    kind = inspect.isclass(value) or inspect.isroutine(value)
    return kind and value.__module__ == module.__name__
