"""AutoGraph for the user's code alone: it lets Python's `if`, `for` and `while` depend on tensors.

AutoGraph takes 20 to 90 ms to read a function, at every start. In a training, no function of ctl
needs that but two, each a `tf.function` with a loop over steps. So `leave_to_python` lets
AutoGraph call the others as they are, as it does with TensorFlow and Keras. The recipes stay as
they would be in a user's file. Where ctl calls code that may be the user's, it calls
`with_autograph` of it; `AutographMethods` does so for the methods of a class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ctl.base import tf_internals

tf_internals.leave_to_python("ctl", but="ctl.recipes")


def with_autograph(function: Callable) -> Callable:
    """``function`` for a call in the graph that is being traced: AutoGraph converts it, unless it
    is one of ctl's, Keras's or TensorFlow's. In eager mode, it is ``function`` itself."""
    return function if tf.executing_eagerly() else tf_internals.convert(function)


def graph_function(function: Callable, **options: Any) -> Any:
    """`tf.function` of a function of ctl's, for a call in the graph that is being traced. With
    ``autograph=True``, TensorFlow would convert it; with False alone, not the user's in it either.
    """
    return tf.function(with_autograph(function), autograph=False, **options)


class AutographMethods:
    """Base of classes whose methods users override, in a subclass, a mixin, or an object:
    ``step.clip = my_clip``. In a graph, each method is `with_autograph` when it is read. Python
    does not read `__call__` of an object in ``step(batch)``, so ctl calls
    ``step.__call__(batch)``."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not callable(value) or tf.executing_eagerly():
            return value
        is_method = any(inspect.isfunction(vars(kind).get(name)) for kind in type(self).__mro__)
        return with_autograph(value) if is_method else value  # not a metric, which is callable, too
