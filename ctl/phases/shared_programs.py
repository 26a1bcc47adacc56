"""Equal updates share one function, which TensorFlow traces and XLA compiles once.

A network has many variables but few kinds of them (see `Updater._kind`), and an XLA program depends
only on the kinds. Variables are therefore cut into parts with the same kinds. The function of the
first such part is called with the variables of the other parts. The order of the updates does not
matter, because each assigns to other variables.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf


def make_parts(kinds: Sequence[Hashable], most: int) -> list[list[int]]:
    """Cuts variables into parts, many of which have the same kinds.

    Args:
        kinds: kind of each variable, equal for variables with equal updates.
        most: maximum number of variables per part.

    Returns:
        For each part, the indices of its variables. First come parts with the same kinds in the
        same order, then parts of the variables that are left.
    """
    if len(kinds) <= most:
        return [list(range(len(kinds)))]
    by_kind: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, kind in enumerate(kinds):
        by_kind[kind].append(index)

    def alike(parts: int) -> int:
        return sum(len(indices) // parts for indices in by_kind.values())

    def to_compile(parts: int) -> int:
        return alike(parts) + len(kinds) - parts * alike(parts)

    # A quarter more parts than needed may fit better. Each costs a call in every step.
    fewest = len(kinds) // most
    fitting = [n for n in range(fewest, fewest * 5 // 4 + 2) if alike(n) <= most]
    number = min(fitting, key=to_compile)
    parts: list[list[int]] = [[] for _ in range(number if alike(number) else 0)]
    left = []
    for indices in by_kind.values():
        size = len(indices) // number
        for n, part in enumerate(parts):
            part += indices[n * size : (n + 1) * size]
        left += indices[number * size :]
    return parts + [left[start : start + most] for start in range(0, len(left), most)]


class ProgramCache:
    """Compiles functions that assign to variables with XLA, once per kind, and calls them.

    Make a new cache for each trace of the caller.
    """

    def __init__(self) -> None:
        self._traced: dict[Hashable, tuple[Any, list[int | tf.Tensor]]] = {}

    def call(
        self,
        function: Callable[..., None],
        kind: Hashable,
        variables: Sequence[tf.Variable],
        common: Sequence[tf.Variable],
        *args: Any,
    ) -> None:
        """Calls ``function(*args)``, or an earlier function of this ``kind`` with ``variables``.

        Args:
            function: returns nothing. If it uses a tensor or a variable that is neither in ``args``
                nor in ``variables`` nor in ``common``, no other call uses its trace.
            kind: equal for functions that differ only in ``variables``. Variables at one position
                have the same meaning.
            variables: each with a handle in this context.
            common: variables that functions of this ``kind`` share.
            args: tensors, None, or lists of them.
        """
        handles = [variable.handle for variable in variables]
        leaves = tf.nest.flatten(args)
        arg_specs = [None if a is None else tf.type_spec_from_value(a) for a in leaves]
        specs = [
            (tuple(v.shape), v.dtype, h.device) for v, h in zip(variables, handles, strict=True)
        ]
        key = (kind, *arg_specs, *specs)
        if key in self._traced:
            traced, captures = self._traced[key]
            traced.set_external_captures(
                [handles[c] if isinstance(c, int) else c for c in captures]
            )
        else:
            compiled = tf.function(function, jit_compile=True, autograph=False)
            traced = compiled.get_concrete_function(*args)
            places: dict[int, int | tf.Tensor] = {id(h): n for n, h in enumerate(handles)}
            places |= {id(v.handle): v.handle for v in common}
            if all(id(capture) in places for capture in traced.captured_inputs):
                self._traced[key] = traced, [places[id(c)] for c in traced.captured_inputs]
        traced(*args)
