"""What AutoGraph makes of the functions of a module."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType

from tensorflow.python.autograph.core import converter
from tensorflow.python.autograph.impl import api


def functions(module: ModuleType) -> Iterator[tuple[FunctionType, bool]]:
    """Those of a module and the methods of its classes; whether it is one for ``tf.function``."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for owner in [module, *(each for each in classes if each.__module__ == module.__name__)]:
        for value in vars(owner).values():
            requested = hasattr(value, "python_function")
            value = value.python_function if requested else getattr(value, "__func__", value)
            if (
                isinstance(value, FunctionType)
                and value.__module__ == module.__name__
                and not hasattr(value, "__wrapped__")
                and (value.__name__ == "__call__" or not value.__name__.startswith("__"))
            ):
                yield value, requested


def convert(function: FunctionType, requested: bool) -> None:
    """Raises where AutoGraph would warn and run the function as it is."""
    options = converter.ConversionOptions(
        recursive=True, user_requested=requested, optional_features=()
    )
    api._TRANSPILER.transform(function, converter.ProgramContext(options))
