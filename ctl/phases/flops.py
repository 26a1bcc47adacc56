"""Counts the floating point operations of a forward and backward pass, from its graph.

Counted are the multiplications and additions of matrix products, ``einsum`` and convolutions, as
usual for the utilization of a device (PaLM: Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
The rest, such as activations and the optimizer, is a small part of most models.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ctl.distributed import local_batch

# What a graph calls has a graph of its own, and a loop runs it an unknown number of times.
_OPAQUE = frozenset(
    ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
    + ("PartitionedCall", "StatefulPartitionedCall")
)


@contextlib.contextmanager
def counted(step: Any, batch: Any) -> Iterator[None]:
    """Sets ``step.flops`` to the operations for each example of ``batch`` that are traced inside;
    None if they or the size of ``batch`` are not known while tracing."""
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
    """Multiplications and additions of ``operations`` of a graph; None if they are not known."""
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
    """Each combination of the indices is a product."""
    terms = operation.get_attr("equation").decode().partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, operation.inputs, strict=True):
        if "." in term:
            raise ValueError(term)
        sizes.update(zip(term, map(_size, ([n] for n in tensor.shape)), strict=True))
    return 2 * math.prod(sizes.values()) if len(terms) > 1 else 0


def _size(shape: Any) -> int:
    sizes = list(shape)  # of an unknown rank: ValueError
    if None in sizes:
        raise ValueError(shape)
    return math.prod(sizes)
