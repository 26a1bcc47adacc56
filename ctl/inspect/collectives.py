"""Finds the communication in a traced graph and says what each moves: the only place that knows how
TensorFlow spells an all-reduce.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl.errors import UsageError
from ctl.inspect import lints, private
from ctl.inspect.graph import Graph, Node, Tensor, constant, flops
from ctl.inspect.plan import Collective, Member, Plan
from ctl.workers import cluster_of, is_multi_worker

if TYPE_CHECKING:
    from ctl.step import TrainStep

# Operations that TensorFlow's own collectives and NCCL are made of.
_COLLECTIVE = re.compile(r"_?(Collective|Nccl)\w+|XlaAllReduce|CrossReplicaSum|AllToAll")
# These are the communication where one device sums or joins what comes from several.
_JOINS = {"AddN", "ConcatV2"}
_PACK = re.compile(r"(?:^|/)((ctl_all_reduce(?:_\d+)?)/(pack\d+))(?=/|$)")
_REPLICA = re.compile(r"(^|/)replica_\d+/")
# What a value passes unchanged on its way in and out of a pack.
_UNPACK = {"Reshape", "Identity"}
_SPLITS = {"Split", "SplitV"}
_ASSIGN = re.compile(r"(Assign\w*VariableOp|ResourceApply\w+|ResourceScatter\w+)$")
_REDUCES = {"CollectiveReduce", "CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce"}
_GATHERS = {"CollectiveGather", "CollectiveGatherV2", "ConcatV2"}


def plan_of_step(step: TrainStep) -> Plan:
    """The plan of a step that is in a loop, with its lints; see `TrainStep.plan`."""
    if step.traced is None:
        raise UsageError("the loop knows the batches: make ctl.Loop(step, ...) before step.plan()")
    plan = plan_of(
        step.traced(),
        step.strategy,
        {v.path: v.value for v in step.model.variables},
        [v.path for v in step.model.trainable_variables],
        len(cluster_of(step.strategy).workers) if is_multi_worker(step.strategy) else 1,
    )
    return dataclasses.replace(plan, lints=lints.check(plan))


def plan_of(
    concrete: Any,
    strategy: tf.distribute.Strategy,
    variables: Mapping[str, tf.Variable],
    trainable: Iterable[str],
    workers: int = 1,
) -> Plan:
    """What the traced function ``concrete`` moves between replicas.

    Args:
        concrete: a `tf.types.experimental.ConcreteFunction`.
        strategy: the one that it was traced under.
        variables: by path; those that members of a pack are named after.
        trainable: the paths of those that have gradients.
        workers: processes of the job.
    """
    graph = Graph(concrete.graph.as_graph_def(add_shapes=True))
    paths = {}
    for path, variable in variables.items():
        for copy in strategy.experimental_local_results(variable):
            paths[id(copy.handle)] = path
    handles = {
        graph.main[inner.op.name]: paths[id(outer)]
        for outer, inner in concrete.graph.captures
        if id(outer) in paths
    }
    found = _Search(graph, handles, set(trainable)).collectives()
    notes = private.missing()
    return Plan(
        strategy=type(strategy).__name__,
        replicas=strategy.num_replicas_in_sync,
        workers=workers,
        collectives=tuple(c for c in found if c.purpose == "gradients"),
        other=tuple(c for c in found if c.purpose != "gradients"),
        notes=tuple(notes),
    )


class _Search:
    """The communication of one graph, in the order in which it must run."""

    def __init__(self, graph: Graph, handles: dict[Node, str], trainable: set[str]):
        self.graph = graph
        self.handles = handles
        self.trainable = trainable
        ends = [n for n in graph.nodes if _ASSIGN.match(n.op) or self._communicates(n)]
        # Autodiff also makes gradients that nothing uses, which TensorFlow then takes out again.
        self.backward = [n for n in graph.ancestors(ends) if n.backward]
        self.flops = {n: flops(n) for n in self.backward}
        self.share_by = "flops" if any(self.flops.values()) else "ops"
        self.before: dict[Node, set[Node]] = {}

    def collectives(self) -> list[Collective]:
        groups = self._groups()
        for nodes in groups.values():
            for node in nodes:
                self.before[node] = self.graph.ancestors([node])
        group_of = {node: name for name, nodes in groups.items() for node in nodes}
        behind = {
            name: {
                group_of[n]
                for node in nodes
                for n in self.before[node]
                if n in group_of and group_of[n] != name
            }
            for name, nodes in groups.items()
        }
        order = sorted(groups, key=lambda name: len(behind[name]))
        found = []
        for name in order:
            # Those that no other one, which this waits for too, waits for already.
            after = behind[name] - set().union(*(behind[n] for n in behind[name]))
            found.append(self._collective(name, groups[name], [n for n in order if n in after]))
        return found

    # What belongs together ----------------------------------------------------------------------

    def _groups(self) -> dict[str, list[Node]]:
        """The operations of each communication, over all devices, by a name for it."""
        groups: dict[str, list[Node]] = {}
        seen: collections.Counter[tuple] = collections.Counter()
        for node in self.graph.nodes:
            if not self._communicates(node):
                continue
            scope = _REPLICA.sub(r"\1", node.name)
            pack = _PACK.search(scope)
            if pack:
                name = pack[3] if pack[2] == "ctl_all_reduce" else pack[1]
            else:
                # The k-th of its kind on each device is one communication.
                base = re.sub(r"_\d+$", "", scope.removeprefix("while/"))
                kind = (base, node.op, node.inputs[0].node.shape(node.inputs[0].port))
                number = seen[kind, node.device]
                seen[kind, node.device] += 1
                name = f"{base}_{number}" if number else base
            groups.setdefault(name, []).append(node)
        return groups

    def _communicates(self, node: Node) -> bool:
        if node.op in _JOINS:
            return len({t.node.device for t in node.inputs if t.node.device}) > 1
        return bool(_COLLECTIVE.fullmatch(node.op))

    # What one is --------------------------------------------------------------------------------

    def _collective(self, name: str, nodes: list[Node], after: Sequence[str]) -> Collective:
        # Sums may be of sums, as in a hierarchical copy; the last ones have the results.
        roots = [n for n in nodes if not any(n in self.before[other] for other in nodes)]
        roots = [n for n in roots if n.device == roots[0].device]
        first = roots[0]
        members = [m for root in roots for m in self._members(root, nodes)]
        dtype = tf.as_dtype(first.attr["T"].type)
        payloads = [_payload(root, nodes) for root in roots]
        shape = _joined([p.node.shape(p.port) for p in payloads])
        devices = {n.device for n in nodes}
        group_size, timeout = _group_size(first), None
        if first.op in _JOINS:
            sources = {t.node.device for n in nodes if n.op in _JOINS for t in n.inputs}
            devices = {d for d in devices | sources if d}
            group_size = len(devices)
        elif "timeout_seconds" in first.attr:
            timeout = first.attr["timeout_seconds"].f
        purpose = self._purpose(nodes, members)
        start, full = self._shares(nodes) if purpose == "gradients" else (None, None)
        return Collective(
            name=name,
            purpose=purpose,
            kind=first.op,
            ops=len(nodes),
            dtype=dtype.name,
            shape=shape,
            bytes=_bytes(dtype, shape),
            group_size=group_size,
            group_key=None if first.op in _JOINS else _constant_input(first, 2),
            hint=first.attr["communication_hint"].s.decode(),
            timeout=timeout,
            devices=tuple(sorted(map(_short, devices))),
            in_loop=first.in_loop,
            after=tuple(after),
            members=tuple(members),
            start_share=start,
            full_share=full,
            share_by=self.share_by,
            wire_bytes=self._wire(roots, nodes, _bytes(dtype, shape), group_size),
            sparse=first.op in _GATHERS and any(n.backward for n in self.before[first]),
        )

    def _members(self, root: Node, nodes: list[Node]) -> list[Member]:
        """The tensors that were joined to the payload of ``root``."""
        packed, begin, end = _packed(_payload(root, nodes))
        split = self._split_after(root, len(packed))
        dtype = tf.as_dtype(root.attr["T"].type)
        members, offset = [], 0
        for index, tensor in enumerate(packed):
            whole = _unpacked(tensor)
            shape = whole.node.shape(whole.port)
            size = _bytes(dtype, shape)
            if size is None or end is None or (offset + size > begin and offset < end):
                out = Tensor(split, index) if split else Tensor(root, 0)
                members.append(Member(self._lands(out, shape), shape, size))
            offset += size or 0
        return members

    def _split_after(self, root: Node, count: int) -> Node | None:
        """What cuts the sum of ``root`` into ``count`` tensors again."""
        left, seen = [root], {root}
        while left:
            for node, _ in self.graph.consumers(Tensor(left.pop(), 0)):
                if node.op in _SPLITS and node.outputs == count:
                    return node
                if node.op in {*_UNPACK, *_SPLITS, "ConcatV2"} and node not in seen:
                    seen.add(node)
                    left.append(node)
        return None

    def _lands(self, tensor: Tensor, shape: tuple[int, ...] | None) -> tuple[str, ...]:
        """The variables that ``tensor`` ends up in, along values of its own shape: what scales it,
        such as the norm of all gradients, has another."""
        found: dict[str, None] = {}
        left, seen = [tensor], {tensor}

        def go(to: Tensor) -> None:
            if to not in seen:
                seen.add(to)
                left.append(to)

        while left:
            here = left.pop()
            for node, index in self.graph.consumers(here):
                if _ASSIGN.match(node.op) and index:
                    handle = node.inputs[0]
                    path = self.handles.get(handle.node)
                    if path is not None:
                        found[path] = None
                    if path not in self.trainable:  # an optimizer's slot: on to who reads it
                        for reader, _ in self.graph.consumers(handle):
                            if reader.op == "ReadVariableOp":
                                go(Tensor(reader, 0))
                elif node.op == "IdentityN":
                    go(Tensor(node, index))
                elif not self._communicates(node):
                    for port in range(node.outputs):
                        if node.op in _UNPACK or node.shape(port) == shape:
                            go(Tensor(node, port))
        return tuple(sorted(found, key=lambda path: path not in self.trainable))

    def _purpose(self, nodes: list[Node], members: Sequence[Member]) -> str:
        upstream = any(n.backward for node in nodes for n in self.before[node])
        if any(n.backward for n in self.graph.descendants(nodes)):
            return "backward" if upstream else "forward"
        if upstream and any(path in self.trainable for m in members for path in m.variables):
            return "gradients"
        return "other" if nodes[0].in_loop else "loss"

    def _shares(self, nodes: list[Node]) -> tuple[float, float]:
        """The share of the backward pass before the first and before the last of ``nodes``."""
        each = [self._share(self.before[node]) for node in nodes]
        return min(each), self._share(set().union(*(self.before[node] for node in nodes)))

    def _share(self, before: set[Node]) -> float:
        touched = {n.device for n in before if n.backward}
        total = done = 0
        for node in self.backward:
            if node.device in touched:
                weight = self.flops[node] if self.share_by == "flops" else 1
                total += weight
                done += weight * (node in before)
        return done / total if total else 0.0

    def _wire(
        self, roots: list[Node], nodes: list[Node], size: int | None, group: int
    ) -> int | None:
        """Bytes that the busiest replica sends."""
        if size is None:
            return None
        if roots[0].op in _REDUCES:
            return 2 * (group - 1) * size // group
        if roots[0].op not in _JOINS:
            return None
        crossing = {
            (tensor, node.device)
            for node in nodes
            for tensor in node.inputs
            if tensor.node.device != node.device
        }
        left = [Tensor(root, 0) for root in roots]
        while left:
            tensor = left.pop()
            for node, _ in self.graph.consumers(tensor):
                if node.device != tensor.node.device:
                    crossing.add((tensor, node.device))
                if node.op in _UNPACK:
                    left.append(Tensor(node, 0))
        dtype = tf.as_dtype(roots[0].attr["T"].type)
        sent: collections.Counter[str] = collections.Counter()
        for tensor, _ in crossing:
            sent[tensor.node.device] += _bytes(dtype, tensor.node.shape(tensor.port)) or 0
        return max(sent.values(), default=0)


def _group_size(node: Node) -> int:
    size = _constant_input(node, 1)
    return size if size is not None else node.attr["group_size"].i or node.attr["num_devices"].i


def _payload(root: Node, nodes: list[Node]) -> Tensor:
    """What one replica gives; behind the sums of sums."""
    tensor = root.inputs[0]
    while tensor.node in nodes or (
        tensor.node.op == "Identity" and _unpacked(tensor).node in nodes
    ):
        tensor = tensor.node.inputs[0]
    return tensor


def _packed(tensor: Tensor) -> tuple[list[Tensor], int, int | None]:
    """The tensors that were concatenated, or the one itself; and which bytes of them it is: from,
    to, where that is known. A pack of a hierarchical copy is a part of a concatenation."""
    begin, end = 0, None
    while tensor.node.op in {*_UNPACK, *_SPLITS}:
        node = tensor.node
        if node.op in _SPLITS:
            dtype = tf.as_dtype(node.attr["T"].type)
            sizes = [_bytes(dtype, node.shape(port)) for port in range(tensor.port + 1)]
            if None not in sizes:
                begin, end = sum(sizes[:-1]), sum(sizes)
        tensor = node.inputs[node.op == "Split"]
    if tensor.node.op == "ConcatV2":
        return tensor.node.inputs[:-1], begin, end
    return [tensor], 0, None


def _unpacked(tensor: Tensor) -> Tensor:
    while tensor.node.op in _UNPACK:
        tensor = tensor.node.inputs[0]
    return tensor


def _joined(shapes: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The shape of one payload; of several, their elements in one dimension."""
    if len(shapes) == 1:
        return shapes[0]
    if any(s is None or min(s, default=0) < 0 for s in shapes):
        return None
    return (sum(map(math.prod, shapes)),)


def _bytes(dtype: tf.DType, shape: tuple[int, ...] | None) -> int | None:
    """None for a shape that is not known."""
    return None if shape is None or min(shape, default=0) < 0 else dtype.size * math.prod(shape)


def _constant_input(node: Node, index: int) -> int | None:
    if not node.op.endswith("V2") or len(node.inputs) <= index:
        return None
    value = constant(node.inputs[index])
    return None if value is None else int(value)


def _short(device: str) -> str:
    """``/job:worker/task:0/device:CPU:0`` as ``CPU:0``."""
    return device.rpartition("device:")[2].strip("/").upper()
