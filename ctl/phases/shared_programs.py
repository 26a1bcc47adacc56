"""Updates that are alike share one function, which TensorFlow traces and XLA compiles once.

A network has many variables and few kinds of them, and a program of XLA depends on the kinds only.
So variables are put into parts whose kinds are the same, and the function of the first such part is
called with the variables of the others. The order of the updates does not matter: each variable has
its own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf


def make_parts(kinds: Sequence[Hashable], most: int) -> list[list[int]]:
    """Cuts variables into parts of which many are alike.

    Args:
        kinds: of each variable, equal for variables that are updated alike.
        most: maximum number of variables per part.

    Returns:
        For each part, the indices of its variables. First come parts with the same kinds in the
        same order, as many variables of a kind in each; then parts of what is left.
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
    """Calls functions that assign to variables, compiled by XLA; those that are alike as one.

    Make it anew for each trace of what calls it.
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
        """Calls ``function(*args)``, or one that is alike with ``variables`` instead of its own.

        Args:
            function: returns nothing. If it uses a tensor or a variable that is neither in ``args``
                nor in ``variables`` nor in ``common``, no other call uses its trace.
            kind: equal for functions that differ only in ``variables``, which have the same meaning
                at the same place.
            variables: each with a handle in this context.
            common: variables that functions of this ``kind`` share.
            args: tensors, None, or lists of them.
        """
        handles = [variable.handle for variable in variables]
        given = [None if a is None else tf.type_spec_from_value(a) for a in tf.nest.flatten(args)]
        specs = [
            (tuple(v.shape), v.dtype, h.device) for v, h in zip(variables, handles, strict=True)
        ]
        key = (kind, *given, *specs)
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
