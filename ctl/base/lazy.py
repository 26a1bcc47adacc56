"""Packages whose names load on first use, so that ``import ctl`` does not wait for TensorFlow."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def load_lazily(
    package: str, names: list[str], where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the ``__getattr__`` and ``__dir__`` of a package whose names load on first use.

    Args:
        package: ``__name__`` of the package.
        names: ``__all__`` of the package.
        where: the module that defines each name, or is that name: ``ctl.base.actions`` of
            ``actions``. A name without an entry is a submodule.
    """

    def get(name: str) -> Any:
        if name not in names:
            from ctl.base.foreign_names import missing_name  # which most programs never need

            raise missing_name(package, name)
        path = where.get(name, f"{package}.{name}")
        module = importlib.import_module(path)
        return module if path.endswith(f".{name}") else getattr(module, name)

    return get, lambda: sorted({*names, *importlib.import_module(package).__dict__})
