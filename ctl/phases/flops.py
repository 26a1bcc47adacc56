"""Counts the floating point operations of a forward and backward pass, from its graph.

It counts the multiplications and additions of matrix products, ``einsum`` and convolutions, as is
usual for device utilization (PaLM: Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Other
operations, such as activations and the optimizer, are a small part of most models.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ctl.distributed import local_batch

# What the names of counted operations begin with.
KINDS = "MatMul", "BatchMatMul", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative"

# The body of a call is another graph. A loop runs its body an unknown number of times.
_OPAQUE = frozenset(
    ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
    + ("PartitionedCall", "StatefulPartitionedCall")
)


@contextlib.contextmanager
def counted(step: Any, batch: Any) -> Iterator[None]:
    """Sets ``step.flops`` to the operations that are traced inside, per example of ``batch``; None
    if their number or the size of ``batch`` is unknown while tracing."""
    if not tf.inside_function():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    rows = local_batch.rows(batch)
    total = count(graph.get_operations()[before:])
    step.flops = None if total is None or not isinstance(rows, int) else total / rows


def count(operations: Iterable[tf.Operation]) -> int | None:
    """Returns the number of multiplications and additions in ``operations``; None if unknown."""
    try:
        return sum(map(_of, operations))
    except ValueError:  # a shape is unknown
        return None


def _of(operation: tf.Operation) -> int:
    if operation.type in _OPAQUE:
        raise ValueError(operation.type)
    if not operation.type.startswith(KINDS):
        return 0
    inputs, output = [tensor.shape for tensor in operation.inputs], operation.outputs[0].shape
    return of_kind(operation.type, operation.get_attr, inputs, output, _known)


def _known(shape: Any) -> list[int]:
    sizes = list(shape)  # raises ValueError if the rank is unknown
    if None in sizes:
        raise ValueError(shape)
    return sizes


def of_kind(
    kind: str,
    attribute: Callable[[str], Any],
    inputs: Sequence[Any],
    output: Any,
    known: Callable[[Any], Sequence[int]],
) -> int:
    """Returns the multiplications and additions of one operation.

    Args:
        kind: type of the operation, one of `KINDS`.
        attribute: returns an attribute of the operation by its name.
        inputs, output: shapes.
        known: returns a part of a shape without unknown sizes.

    Raises:
        ValueError: an ``einsum`` has an ellipsis, or an operand of another rank than its term.
    """
    if "MatMul" in kind:
        adjoint = attribute("transpose_a" if kind == "MatMul" else "adj_x")
        inner = inputs[0][-2:][:1] if adjoint else inputs[0][-1:]
        return 2 * math.prod(known(output)) * math.prod(known(inner))
    if kind == "Einsum":
        return _of_einsum(attribute("equation").decode(), map(known, inputs))
    # Each element of the result of the forward pass needs a product with a filter. The gradients
    # of the input and of the filter cost as much.
    result = inputs[2] if "Backprop" in kind else output
    kernel = output if "BackpropFilter" in kind else inputs[1]
    used = kernel[:2] if kind.startswith("Depthwise") else kernel[:-1]
    return 2 * math.prod(known(result)) * math.prod(known(used))


def _of_einsum(equation: str, operands: Iterable[Sequence[int]]) -> int:
    """Counts one product and one addition for each combination of the indices."""
    terms = equation.partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        if "." in term:
            raise ValueError(term)
        sizes.update(zip(term, operand, strict=True))
    return 2 * math.prod(sizes.values()) if len(terms) > 1 else 0
