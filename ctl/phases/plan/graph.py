"""Flattens a TensorFlow graph: a `GraphDef` becomes one list of operations.

The bodies of functions, loops and branches replace their calls, so that one walk covers everything.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from ctl.base import tf_internals
from ctl.phases.flops import KINDS, of_kind

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}

# Scopes of gradient operations (`tf.GradientTape`, `ctl.TrainStep`), and the names of functions of
# gradients (autodiff).
_BACKWARD = re.compile(r"gradient_tape/|ctl_backward")
_BACKWARD_FUNCTION = re.compile(r"__(inference_)?_*backward")


class Tensor(NamedTuple):
    """Output ``port`` of ``node``."""

    node: Node
    port: int


@dataclasses.dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        name: as in TensorFlow; in a function, the names of the calls are put before it.
        op: the type of the operation; ``Merge`` stands for one output of a branch.
        device: such as ``/job:worker/task:0/device:CPU:0``; may be empty.
        attr: the attributes of the `NodeDef`; None for ``Merge``.
        in_loop: whether it is in the condition or the body of a loop.
        backward: whether it belongs to the backward pass.
        inputs: input tensors; the output of a call is replaced by the tensor of its body.
        control: nodes that must run before this one, besides those of ``inputs``.
        stands_for: for a call that was replaced by its body, the tensor behind each output.
    """

    name: str
    op: str
    device: str
    attr: Any
    in_loop: bool
    backward: bool
    inputs: list[Tensor] = dataclasses.field(default_factory=list)
    control: list[Node] = dataclasses.field(default_factory=list)
    stands_for: list[Tensor] | None = None

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The recorded shapes of the outputs: -1 for an unknown dimension, None for an unknown
        rank."""
        shapes = self.attr["_output_shapes"].list.shape if self.attr else ()
        return [None if s.unknown_rank else tuple(d.size for d in s.dim) for s in shapes]

    def shape(self, port: int = 0) -> tuple[int, ...] | None:
        """The shape of output ``port``; None if it is unknown or not recorded."""
        shapes = self.shapes
        return shapes[port] if port < len(shapes) else None

    @property
    def outputs(self) -> int:
        """The number of outputs whose shape is recorded; at least 1."""
        return max(1, len(self.shapes))


class Graph:
    """All operations that a call of ``graph_def`` may run (``nodes``); loops appear as if they ran
    once. It needs shapes: ``graph.as_graph_def(add_shapes=True)``. ``main`` has those outside of
    functions, by name."""

    def __init__(self, graph_def: Any):
        self.nodes: list[Node] = []
        self._functions = {f.signature.name: f for f in graph_def.library.function}
        self.main = self._instantiate(graph_def.node, {}, "", None, in_function=False)
        for node in self.nodes:
            node.inputs = [_real(tensor) for tensor in node.inputs]
        self._consumers: dict[Tensor, list[tuple[Node, int]]] = collections.defaultdict(list)
        self._followers: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in self.nodes:
            for index, tensor in enumerate(node.inputs):
                self._consumers[tensor].append((node, index))
                self._followers[tensor.node].append(node)

    def consumers(self, tensor: Tensor) -> list[tuple[Node, int]]:
        """The nodes that take ``tensor``, each with the index of that input."""
        return self._consumers.get(tensor, [])

    def becomes(self, node: Node, index: int) -> list[Tensor] | None:
        """The outputs of ``node`` that equal its input ``index``: a list, which may be empty, for
        calls, loops, branches, ``Merge`` and ``IdentityN``; None for any other operation."""
        if node.op in ("Merge", "IdentityN"):
            return [Tensor(node, 0 if node.op == "Merge" else index)]
        if node.op in _BRANCHES:
            return []
        if node.op in _CALLS or node.op in _LOOPS:
            # The results of the body follow the arguments; a loop's condition has one result.
            first = len(node.attr["Tin" if node.op in _CALLS else "T"].list.type)
            first += node.op in _LOOPS
            return [Tensor(node, index - first)] if index >= first else []
        return None

    def ancestors(self, nodes: Iterable[Node]) -> set[Node]:
        """All nodes that must run before ``nodes``, by data or control dependencies."""

        def before(node: Node) -> Iterator[Node]:
            yield from (tensor.node for tensor in node.inputs)
            yield from node.control

        return reach(nodes, before)

    def descendants(self, nodes: Iterable[Node]) -> set[Node]:
        """All nodes that use values of ``nodes``, directly or not."""
        return reach(nodes, lambda node: self._followers.get(node, ()))

    def _instantiate(
        self,
        node_defs: Iterable[Any],
        arguments: dict[str, Tensor],
        prefix: str,
        caller: Node | None,
        *,
        in_function: bool,
        in_loop: bool = False,
        backward: bool = False,
    ) -> dict[str, Node]:
        """Adds the nodes of a body and of all it calls; returns its own, by their names in it."""
        definitions = {n.name: n for n in node_defs}
        own: dict[str, Node] = {}
        for name, definition in definitions.items():
            own[name] = Node(
                name=prefix + name,
                op=definition.op,
                device=definition.device or (caller.device if caller else ""),
                attr=definition.attr,
                in_loop=in_loop,
                backward=backward or bool(_BACKWARD.search(name)),
            )
        self.nodes.extend(own.values())
        for name, definition in definitions.items():
            node = own[name]
            for text in definition.input:
                if text.startswith("^"):
                    node.control.append(own[text[1:]])
                else:
                    node.inputs.append(
                        _input(text, own, definitions, arguments, in_function=in_function)
                    )
        for name, definition in definitions.items():
            self._put_bodies(own[name], definition)
        return own

    def _put_bodies(self, node: Node, definition: Any) -> None:
        """Replaces the functions that ``node`` calls by their bodies."""
        attr = definition.attr
        if node.op in _CALLS:
            returned, ran = self._body(node, attr["f"].func.name, list(node.inputs))
            node.control += ran
            if attr["_XlaMustCompile"].b:
                # XLA runs a function as a whole: all outputs are ready when all of it is done.
                node.inputs += returned or []
            elif returned is not None:
                node.control += [tensor.node for tensor in returned]
                node.stands_for = returned
        elif node.op in _BRANCHES:
            names = [attr[key].func.name for key in ("then_branch", "else_branch") if key in attr]
            names += [f.name for f in attr["branches"].list.func]
            bodies = [self._body(node, name, node.inputs[1:]) for name in names]
            if any(returned is None for returned, _ in bodies):
                return
            node.control += [n for _, ran in bodies for n in ran]
            node.stands_for = []
            for port, choices in enumerate(zip(*(r for r, _ in bodies), strict=True)):
                merge = dataclasses.replace(
                    node,
                    name=f"{node.name}/merge_{port}",
                    op="Merge",
                    attr=None,
                    inputs=list(choices),
                    control=[node.inputs[0].node],
                    stands_for=None,
                )
                self.nodes.append(merge)
                node.stands_for.append(Tensor(merge, 0))
        elif node.op in _LOOPS:
            first = list(node.inputs)
            for key in ("cond", "body"):
                returned, ran = self._body(node, attr[key].func.name, first, in_loop=True)
                node.inputs += returned or []
                node.control += ran

    def _body(
        self, caller: Node, name: str, inputs: list[Tensor], in_loop: bool = False
    ) -> tuple[list[Tensor] | None, list[Node]]:
        """Adds a function's body; returns its results (None: unknown) and its control outputs."""
        function = self._functions.get(name)
        if function is None:
            return None, []
        arguments = dict(zip([a.name for a in function.signature.input_arg], inputs, strict=False))
        own = self._instantiate(
            function.node_def,
            arguments,
            # Names in the body of a loop or a branch contain the scope; in a function they do not.
            "" if caller.op not in _CALLS else f"{caller.name}/",
            caller,
            in_function=True,
            in_loop=in_loop or caller.in_loop,
            backward=caller.backward or bool(_BACKWARD_FUNCTION.match(name)),
        )
        passed = set(inputs)
        for node in own.values():
            if passed.issuperset(node.inputs):  # it waits for nothing in the body
                node.control += caller.control
        definitions = {n.name: n for n in function.node_def}
        returned = [
            _input(function.ret[output.name], own, definitions, arguments, in_function=True)
            for output in function.signature.output_arg
        ]
        ran = [own[text] for text in function.control_ret.values() if text in own]
        return returned, ran


def _input(
    text: str,
    own: dict[str, Node],
    definitions: dict[str, Any],
    arguments: dict[str, Tensor],
    *,
    in_function: bool,
) -> Tensor:
    """The tensor that ``text`` names: ``node:port``, in a function ``node:output:index``."""
    name, *rest = text.split(":")
    if name in arguments:
        return arguments[name]
    if not in_function:
        return Tensor(own[name], int(rest[0]) if rest else 0)
    output, index = rest
    return Tensor(own[name], tf_internals.output_offset(definitions[name], output) + int(index))


def _real(tensor: Tensor) -> Tensor:
    """The tensor behind the output of a call."""
    while tensor.node.stands_for is not None:
        tensor = tensor.node.stands_for[tensor.port]
    return tensor


def reach(starts: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes to which ``step`` leads from ``starts``, directly or not."""
    seen: set[Node] = set()
    left = list(starts)
    while left:
        for node in step(left.pop()):
            if node not in seen:
                seen.add(node)
                left.append(node)
    return seen


def constant(tensor: Tensor) -> Any:
    """The value of a constant, also behind Identity and Cast, as a NumPy array; otherwise None."""
    node = tensor.node
    while node.op in ("Identity", "Cast") and node.inputs:
        node = node.inputs[0].node
    return tf.make_ndarray(node.attr["value"].tensor) if node.op == "Const" else None


def flops(node: Node) -> int:
    """Multiplications and additions of a matrix product or a convolution; 0 for other operations.

    An unknown dimension counts as 1: the ratio of two operations does not depend on the batch size.
    """
    out = node.shape()
    if out is None or not node.op.startswith(KINDS):
        return 0
    inputs = [tensor.node.shape(tensor.port) or () for tensor in node.inputs]
    try:
        return of_kind(node.op, functools.partial(_attribute, node), inputs, out, _known)
    except ValueError:
        return 0


def _attribute(node: Node, name: str) -> Any:
    value = node.attr[name]
    return getattr(value, value.WhichOneof("value"))


def _known(shape: tuple[int, ...]) -> list[int]:
    return [max(1, size) for size in shape]
