"""Finds the communication in a traced graph and describes what it moves."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl.base import tf_internals
from ctl.base.names import numbered
from ctl.distributed.watch import watchdog
from ctl.distributed.workers import cluster_of, is_multi_worker
from ctl.errors import UsageError
from ctl.phases.plan import lints, xla
from ctl.phases.plan.graph import Graph, Node, Tensor, constant, flops
from ctl.phases.plan.packs import ASSIGN, UNPACK, Packs, bytes_of, payload_of
from ctl.phases.plan.plan import GATHERS, Collective, Member, Plan
from ctl.reduce import BESIDE, GRADIENTS

# Collective operations of TensorFlow and of NCCL.
_COLLECTIVE = re.compile(r"_?(Collective|Nccl)\w+|XlaAllReduce|CrossReplicaSum|AllToAll")
# These communicate if their inputs come from several devices.
_JOINS = {"AddN", "ConcatV2"}
_PACK = re.compile(rf"(?:^|/)(((?:{GRADIENTS}|{BESIDE})(?:_\d+)?)/(pack\d+(?:_\d+)?))(?=/|$)")
_REPLICA = re.compile(r"(^|/)replica_\d+/")
_REDUCES = {"CollectiveReduce", "CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce"}
_PADS = {"Pad", "PadV2", "Transpose", "Identity"}


def plan_of_step(
    step: Any,
    graph: tf.types.experimental.ConcreteFunction,
    one_step: Callable[[], tf.types.experimental.ConcreteFunction] | None = None,
) -> Plan:
    """The plan of a built `ctl.TrainStep`, with lints; see `ctl.Loop.plan`.

    Args:
        step: no step is run.
        graph: that was traced of it.
        one_step: traces one step, to ask XLA how it would combine the all-reduces. If it cannot
            tell, the plan has a note that says why. None does not ask.
    """
    trained = {id(v.value) for v in step.updater.trainable_variables}
    variables = _by_path([*step.model.variables, *step.updater.trainable_variables])
    plan = plan_of(
        graph,
        step.strategy,
        variables,
        [path for path, variable in variables.items() if id(variable) in trained],
        len(cluster_of(step.strategy).workers) if is_multi_worker(step.strategy) else 1,
    )
    if one_step:
        try:
            if len({device for c in plan.collectives for device in c.devices}) > 1:
                raise UsageError("XLA cannot compile a step that runs on several devices")
            plan = dataclasses.replace(plan, xla=xla.compile_step(one_step()))
        except UsageError as error:
            plan = dataclasses.replace(plan, notes=(*plan.notes, str(error)))
    # The gradients leave the loop over micro-batches, or what XLA compiles, all at once.
    splits = not (step.accumulate_steps > 1 or step.jit_compile)
    found = lints.check(plan, watchdog.running(), splits=splits)
    return dataclasses.replace(plan, lints=found, tables=step.table_plan)


def _by_path(variables: Iterable[keras.Variable]) -> dict[str, tf.Variable]:
    """Path -> variable. Keras allows equal paths: the second is ``path#2``."""
    different = {id(v.value): v for v in variables}.values()
    paths = numbered(v.path for v in different)
    return dict(zip(paths, (v.value for v in different), strict=True))


def plan_of(
    concrete: Any,
    strategy: tf.distribute.Strategy,
    variables: Mapping[str, tf.Variable],
    trainable: Iterable[str],
    workers: int = 1,
) -> Plan:
    """The plan, without lints, of the traced function ``concrete``.

    Args:
        concrete: a `tf.types.experimental.ConcreteFunction`.
        strategy: the strategy under which ``concrete`` was traced.
        variables: path -> variable; members of a pack are named by these paths.
        trainable: the paths of the variables that have gradients.
        workers: the number of processes of the job.
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
    shapes = {path: tuple(variable.shape) for path, variable in variables.items()}
    found = _Search(graph, handles, shapes, set(trainable)).collectives()
    return Plan(
        strategy=type(strategy).__name__,
        replicas=strategy.num_replicas_in_sync,
        workers=workers,
        collectives=tuple(c for c in found if c.purpose == "gradients"),
        other=tuple(c for c in found if c.purpose != "gradients"),
        notes=tuple(filter(None, [tf_internals.no_definitions()])),
    )


class _Search:
    """Finds the communication of one graph and orders it by dependency."""

    def __init__(
        self,
        graph: Graph,
        handles: Mapping[Node, str],
        shapes: Mapping[str, tuple[int, ...]],
        trainable: Collection[str],
    ):
        self.graph = graph
        self.trainable = trainable
        self.packs = Packs(graph, handles, shapes, trainable, _communicates)
        ends = [n for n in graph.nodes if ASSIGN.match(n.op) or _communicates(n)]
        # Autodiff also makes gradients that nothing uses; TensorFlow removes them later.
        self.backward = [n for n in graph.ancestors(ends) if n.backward]
        self.flops = {n: flops(n) for n in self.backward}
        self.share_by = "flops" if any(self.flops.values()) else "ops"
        self.groups = _groups(graph)
        self.name_of = {node: name for name, nodes in self.groups.items() for node in nodes}
        self.before = {node: graph.ancestors([node]) for node in self.name_of}

    def collectives(self) -> list[Collective]:
        behind = {
            name: {
                self.name_of[n] for node in nodes for n in self.before[node] & self.name_of.keys()
            }
            - {name}
            for name, nodes in self.groups.items()
        }
        order = sorted(self.groups, key=lambda name: len(behind[name]))
        found = []
        for name in order:
            # Direct dependencies only, without those that another dependency implies.
            after = behind[name] - set().union(*(behind[n] for n in behind[name]))
            found.append(self._collective(name, [n for n in order if n in after]))
        return found

    def _collective(self, name: str, after: Sequence[str]) -> Collective:
        nodes = self.groups[name]
        # A hierarchical copy sums sums; only the last sums hold the results.
        roots = [n for n in nodes if not any(n in self.before[other] for other in nodes)]
        roots = [n for n in roots if n.device == roots[0].device]
        first = roots[0]
        gathers = first.op in GATHERS
        members, again = [], set()
        for root in () if gathers else roots:
            found, more = self.packs.members(root, nodes)
            members += found
            again |= {self.name_of[n] for n in more}
        dtype = tf.as_dtype(first.attr["T"].type)
        if gathers:
            payloads = [_before_padding(first.inputs[0])]
        else:
            payloads = [payload_of(root, nodes) for root in roots]
        shape = _joined([p.node.shape(p.port) for p in payloads])
        devices = {n.device for n in nodes}
        if first.op in _JOINS:
            devices |= {t.node.device for n in nodes for t in n.inputs}
        devices -= {""}
        group_size = len(devices) if first.op in _JOINS else _group_size(first)
        size = bytes_of(dtype, shape)
        purpose = self._purpose(nodes, members, gathers)
        start, full = self._shares(nodes) if purpose == "gradients" else (None, None)
        return Collective(
            name=name,
            purpose=purpose,
            kind=first.op,
            ops=len(nodes),
            dtype=dtype.name,
            shape=shape,
            bytes=size,
            group_size=group_size,
            group_key=_constant_input(first, 2),
            hint=first.attr["communication_hint"].s.decode(),
            timeout=first.attr["timeout_seconds"].f if "timeout_seconds" in first.attr else None,
            devices=tuple(sorted(map(_short, devices))),
            in_loop=first.in_loop,
            after=tuple(after),
            members=tuple(members),
            again=tuple(sorted(again - {name})) if purpose == "gradients" else (),
            start_share=start,
            full_share=full,
            share_by=self.share_by,
            wire_bytes=self._wire(roots, nodes, size, group_size),
        )

    def _purpose(self, nodes: list[Node], members: Sequence[Member], gathers: bool) -> str:
        upstream = any(n.backward for node in nodes for n in self.before[node])
        # For data that may end, TensorFlow sums int64 flags before every batch.
        if nodes[0].attr["T"].type == tf.int64.as_datatype_enum and any(
            n.op == "OptionalHasValue" for n in self.before[nodes[0]]
        ):
            return "has data"
        if any(n.backward for n in self.graph.descendants(nodes)):
            return "backward" if upstream else "forward"
        lands = any(path in self.trainable for m in members for path in m.variables)
        # A step of one's own may cut or compress its gradients, which then land in no weight.
        pack = _PACK.search(nodes[0].name)
        tensors = any(m.shape != () for m in members)
        carries = pack and pack[2].startswith(GRADIENTS) and tensors
        if nodes[0].in_loop and upstream and (lands or gathers or carries):
            return "gradients"
        return "other" if nodes[0].in_loop else "loss"

    def _shares(self, nodes: list[Node]) -> tuple[float, float]:
        """Shares of the backward pass: before the earliest of ``nodes``, and before all of them."""
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
        """Bytes that the busiest replica sends; see `Collective.wire_bytes`."""
        if size is None:
            return None
        if roots[0].op in _REDUCES:
            return 2 * (group - 1) * size // group
        if roots[0].op in GATHERS - _JOINS:
            return (group - 1) * size
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
                if node.op in UNPACK:
                    left.append(Tensor(node, 0))
        dtype = tf.as_dtype(roots[0].attr["T"].type)
        sent: collections.Counter[str] = collections.Counter()
        for tensor, _ in crossing:
            sent[tensor.node.device] += bytes_of(dtype, tensor.node.shape(tensor.port)) or 0
        return max(sent.values(), default=0)


def _groups(graph: Graph) -> dict[str, list[Node]]:
    """Name -> operations, over all devices, of each communication."""
    groups: dict[str, list[Node]] = {}
    seen: collections.Counter[tuple] = collections.Counter()
    for node in filter(_communicates, graph.nodes):
        scope = _REPLICA.sub(r"\1", node.name)
        pack = _PACK.search(scope)
        if pack:
            name = pack[3] if pack[2] == GRADIENTS else pack[1]
            name += "/gathers" if node.op in GATHERS else ""
        else:
            # The k-th operation of a kind on every device belongs to one communication.
            base = re.sub(r"_\d+$", "", scope.removeprefix("while/"))
            number = seen[base, node.op, node.device]
            seen[base, node.op, node.device] += 1
            name = f"{base}_{number}" if number else base
        groups.setdefault(name, []).append(node)
    return groups


def _communicates(node: Node) -> bool:
    if node.op in _JOINS:
        return len({t.node.device for t in node.inputs if t.node.device}) > 1
    return bool(_COLLECTIVE.fullmatch(node.op))


def _before_padding(part: Tensor) -> Tensor:
    """What a replica gives to a gather: TensorFlow pads it to the size of the largest part."""
    while part.node.op in _PADS and -1 in (part.node.shape(part.port) or (-1,)):
        part = part.node.inputs[0]
    return part


def _group_size(node: Node) -> int:
    size = _constant_input(node, 1)
    return size if size is not None else node.attr["group_size"].i or node.attr["num_devices"].i


def _joined(shapes: list[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """The shape of one payload; for several, one dimension that holds all their elements."""
    if len(shapes) == 1:
        return shapes[0]
    known = [s for s in shapes if s is not None and min(s, default=0) >= 0]
    if len(known) < len(shapes):
        return None
    return (sum(math.prod(s) for s in known),)


def _constant_input(node: Node, index: int) -> int | None:
    """The constant at input ``index`` of a V2 collective, which takes its group as inputs."""
    if (
        not node.op.startswith("Collective")
        or not node.op.endswith("V2")
        or len(node.inputs) <= index
    ):
        return None
    value = constant(node.inputs[index])
    return None if value is None else int(value)


def _short(device: str) -> str:
    """``/job:worker/task:0/device:CPU:0`` as ``CPU:0``."""
    return device.rpartition("device:")[2].strip("/").upper()
