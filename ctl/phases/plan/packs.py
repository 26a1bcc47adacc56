"""The contents of packs: which variable each tensor of an all-reduce belongs to.

Follows a payload back to the tensors that it joins, and its sum on to the variables.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from ctl.phases import passes
from ctl.phases.plan.graph import Graph, Node, Tensor
from ctl.phases.plan.plan import Member

# Operations that pass a value on unchanged.
UNPACK = {"Reshape", "Identity"}
SPLITS = {"Split", "SplitV"}
ASSIGN = re.compile(r"(Assign\w*VariableOp|ResourceApply\w+|ResourceScatter\w+)$")
_QUOTIENTS = {"RealDiv", "Div", "DivNoNan"}


def bytes_of(dtype: tf.DType, shape: tuple[int, ...] | None) -> int | None:
    """The size of a tensor in bytes; None if its shape is not fully known."""
    return None if shape is None or min(shape, default=0) < 0 else dtype.size * math.prod(shape)


def payload_of(root: Node, nodes: Collection[Node]) -> Tensor:
    """The tensor that one replica contributes to the sum that ends in ``root``. Its operations are
    ``nodes``; a hierarchical copy sums sums."""
    tensor = root.inputs[0]
    while tensor.node in nodes or (tensor.node.op == "Identity" and _behind(tensor) in nodes):
        tensor = tensor.node.inputs[0]
    return tensor


def _behind(tensor: Tensor) -> Node:
    while tensor.node.op in UNPACK:
        tensor = tensor.node.inputs[0]
    return tensor.node


@dataclasses.dataclass
class Packs:
    """Maps the tensors of a sum to variables.

    Attributes:
        graph: the graph to search.
        handles: the node of a variable's handle -> the path of that variable of the model.
        shapes: path -> shape of these variables.
        trainable: the paths of the variables that have gradients.
        communicates: whether a node moves data between replicas.
    """

    graph: Graph
    handles: Mapping[Node, str]
    shapes: Mapping[str, tuple[int, ...]]
    trainable: Collection[str]
    communicates: Callable[[Node], bool]

    def members(self, root: Node, nodes: Collection[Node]) -> tuple[list[Member], set[Node]]:
        """The tensors that a sum reduces (see `payload_of`), in the order of the payload; and the
        nodes that sum one of them over the replicas again."""
        payload = payload_of(root, nodes)
        packed, begin, end = _packed(payload)
        split = self._split_after(root, len(packed))
        if split is None and len(packed) > 1:  # one gradient that is itself a concatenation
            packed, begin, end = [payload], 0, None
            split = self._split_after(root, 1)
        dtype = tf.as_dtype(root.attr["T"].type)
        members: list[Member] = []
        again: set[Node] = set()
        offset = 0
        for index, tensor in enumerate(packed):
            out = Tensor(split, index) if split else Tensor(root, 0)
            for shape in _shapes(tensor):
                paths, more = self._lands(out, shape)
                if paths:
                    break
            else:
                shape, paths = _shapes(tensor)[:2][-1], ()
            size = bytes_of(dtype, shape)
            if size is None or end is None or (offset + size > begin and offset < end):
                members.append(Member(paths, shape, size))
                again |= more
            offset += size or 0
        return members, again

    def _split_after(self, root: Node, count: int) -> Node | None:
        """The operation that splits the sum ``root`` into ``count`` tensors, if there is one."""
        left, seen = [root], {root}
        while left:
            for node, _ in self.graph.consumers(Tensor(left.pop(), 0)):
                if node.op in SPLITS and node.outputs == count:
                    return node
                if node.op in {*UNPACK, *SPLITS, "ConcatV2"} and node not in seen:
                    seen.add(node)
                    left.append(node)
        return None

    def _lands(
        self, tensor: Tensor, shape: tuple[int, ...] | None
    ) -> tuple[tuple[str, ...], set[Node]]:
        """The variables that ``tensor`` ends up in, and the nodes that sum it again on the way."""
        # Only values of ``shape`` are followed: a factor, such as a norm, has another shape.
        found: set[str] = set()
        again: set[Node] = set()
        left, seen = [(tensor, False)], {tensor}

        def go(to: Tensor, through_slot: bool) -> None:
            if to not in seen:
                seen.add(to)
                left.append((to, through_slot))

        while left:
            here, through_slot = left.pop()
            for node, index in self.graph.consumers(here):
                if f"{passes.SCOPE}/" in node.name:  # moves the weights, which are returned
                    continue
                if node.op in _QUOTIENTS and index == 1:  # such as the number of examples
                    continue
                if ASSIGN.match(node.op):
                    handle = node.inputs[0]
                    path = self.handles.get(handle.node)
                    if index and path is None:  # a slot of the optimizer: go on at its reads
                        for reader, _ in self.graph.consumers(handle):
                            if reader.op == "ReadVariableOp":
                                go(Tensor(reader, 0), True)
                    elif index and path is not None and self.shapes[path] == shape:
                        found.add(path)
                elif self.communicates(node):
                    if not through_slot:
                        again.add(node)
                        go(Tensor(node, 0), False)
                elif node.op == "ConcatV2" and not through_slot:
                    for total, _ in self.graph.consumers(Tensor(node, 0)):
                        split = self._split_after(total, len(node.inputs) - 1)
                        if split and self.communicates(total):
                            again.add(total)
                            go(Tensor(split, index), False)
                elif (same := self.graph.becomes(node, index)) is not None:
                    for tensor in same:
                        go(tensor, through_slot)
                else:
                    for port in range(node.outputs):
                        if node.op in UNPACK or node.shape(port) == shape:
                            go(Tensor(node, port), through_slot)
        return tuple(sorted(found, key=lambda path: (path not in self.trainable, path))), again


def _packed(payload: Tensor) -> tuple[list[Tensor], int, int | None]:
    """The tensors that ``payload`` concatenates; begin and end, if known, of its bytes in them."""
    # A pack of a hierarchical copy is a part of a concatenation.
    begin: int = 0
    end: int | None = None
    tensor = payload
    while tensor.node.op in {*UNPACK, *SPLITS}:
        node = tensor.node
        if node.op in SPLITS:
            dtype = tf.as_dtype(node.attr["T"].type)
            sizes = [bytes_of(dtype, node.shape(port)) for port in range(tensor.port + 1)]
            known = [size for size in sizes if size is not None]
            if len(known) == len(sizes):
                begin, end = sum(known[:-1]), sum(known)
        tensor = node.inputs[node.op == "Split"]
    if tensor.node.op == "ConcatV2":
        return tensor.node.inputs[:-1], begin, end
    return [payload], 0, None


def _shapes(tensor: Tensor) -> list[tuple[int, ...] | None]:
    """The shape of ``tensor``, and its shapes before it was flattened and cut."""
    shapes = [tensor.node.shape(tensor.port)]
    while tensor.node.op in {*UNPACK, *SPLITS}:
        tensor = tensor.node.inputs[tensor.node.op == "Split"]
        shapes.append(tensor.node.shape(tensor.port))
    return shapes
