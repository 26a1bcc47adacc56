"""Counts the floating point operations of a forward and backward pass, from its graph.

It counts the multiplications and additions of matrix products, ``einsum`` and convolutions, as is
usual for device utilization (PaLM: Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Other
operations, such as activations and the optimizer, are a small part of most models.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ctl.distributed import local_batch

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
        return sum(_of(operation) for operation in operations)
    except ValueError:  # a shape is unknown
        return None


def _of(operation: tf.Operation) -> int:
    kind, inputs = operation.type, operation.inputs
    if kind in _OPAQUE:
        raise ValueError(kind)
    if kind == "MatMul" or kind.startswith("BatchMatMul"):
        adjoint = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return (
            2 * _size(operation.outputs[0].shape) * _size([inputs[0].shape[-2 if adjoint else -1]])
        )
    if kind == "Einsum":
        return _of_einsum(operation)
    if not kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2dNative")):
        return 0
    # Each element of the result of the forward pass needs a product with a filter.
    backward, of_filter = "Backprop" in kind, "BackpropFilter" in kind
    result = inputs[2] if backward else operation.outputs[0]
    kernel = (operation.outputs[0] if of_filter else inputs[1]).shape
    used = kernel[:2] if kind.startswith("Depthwise") else kernel[:-1]
    return 2 * _size(result.shape) * _size(used)


def _of_einsum(operation: tf.Operation) -> int:
    """Counts one product and one addition for each combination of the indices."""
    terms = operation.get_attr("equation").decode().partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, operation.inputs, strict=True):
        if "." in term:
            raise ValueError(term)
        sizes.update(zip(term, map(_size, ([n] for n in tensor.shape)), strict=True))
    return 2 * math.prod(sizes.values()) if len(terms) > 1 else 0


def _size(shape: Any) -> int:
    sizes = list(shape)  # raises ValueError if the rank is unknown
    if None in sizes:
        raise ValueError(shape)
    return math.prod(sizes)
