"""What every child of a zygote would do again, done once: importing this does it.

Nothing here runs an operation: TensorFlow would start threads, which a fork does not survive.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from types import FunctionType, ModuleType

import tensorflow_datasets as tfds
from tensorflow.python.autograph.core import converter
from tensorflow.python.autograph.impl import api

TRACED = [
    "apply",
    "base_step",
    "control.pace",
    "evaluator",
    "loop",
    "reduce",
    "replicas",
    "step",
    "schedule.schedules",
]
TRACED += ["data.dataset", "data.feed", "data.in_memory", "data.streaming", "data.tfds_source"]


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


def convert() -> None:
    """AutoGraph keeps what it made of a function: a third of the time of a short training."""
    for name in TRACED:
        for function, requested in functions(importlib.import_module(f"ctl.{name}")):
            options = converter.ConversionOptions(
                recursive=True, user_requested=requested, optional_features=()
            )
            with contextlib.suppress(Exception):  # what it cannot convert is in no graph
                api._TRANSPILER.transform(function, converter.ProgramContext(options))


convert()
tfds.list_builders(with_community_datasets=False)  # imports hundreds of modules
gc.collect()
gc.freeze()  # a collection in a child would otherwise copy every page that it looks at
