"""Decides by a rule whether XLA compiles a step, so two runs with one seed agree.

The rule uses XLA only for steps that were measured to be faster and that XLA is known to compile.
`ctl.jobs.trials` measures instead.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from ctl.data.dataset import Dataset
from ctl.data.in_memory import InMemory
from ctl.data.mixture import Mixture
from ctl.distributed import local_batch, replicas
from ctl.phases import labels, losses
from ctl.phases.metrics import Accuracy
from ctl.phases.plan.graph import Graph, Node, Tensor, constant, flops, reach
from ctl.schedule import schedules
from ctl.step import TrainStep

# Weights times examples of a batch. On a CPU, XLA multiplies large matrices more slowly than
# TensorFlow: a step took 0.70 of its time with 43 million of these products, and 1.45 with 340
# million. On a GPU, the largest step that was measured had 89 million, and took 0.20
# (benchmarks/README.md).
_MOST_PRODUCTS = {"CPU": 64 << 20, "GPU": 128 << 20}
# The time to compile grows with the variables, and with the operations of the forward pass.
_MOST_VARIABLES, _MOST_OPERATIONS = 64, 600
# Of one matrix product in a loop, as that of an LSTM: XLA was twice as fast up to 0.4 million,
# level with TensorFlow at 0.5 million, and slower from 1 million on.
_MOST_PRODUCTS_IN_LOOP = 1 << 19
# Elements of a tensor. On a CPU, XLA was faster up to 2 million, level at 4 million, and slower at
# 8 million. On a GPU, it was faster at 5 million.
_MOST_ELEMENTS = {"CPU": 1 << 21, "GPU": 1 << 23}

# Layers that were found to lose, or that nobody measured.
_LAYERS_WITHOUT = {
    "CPU": (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    "GPU": (keras.layers.Conv1D,),
}


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Operations of the forward pass that XLA is known to compile, with their gradients. Random numbers
# are none of them: XLA may draw those of a Dropout again for each product that they are in, and a
# step took 4 times as long.
_ON_ALL_DEVICES = _words(
    # of each element
    "Abs AddN AddV2 Cast Cos DivNoNan Elu Equal Erf Erfc Exp Expm1 FloorMod Greater",
    "GreaterEqual IdentityN LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr",
    "Maximum Minimum Mul Neg NotEqual Pow RealDiv Reciprocal Relu Relu6 Rsqrt Select SelectV2 Selu",
    "Sigmoid Sign Sin Softplus Softsign Sqrt Square SquaredDifference Sub Tanh",
    # of matrices, and over an axis
    "All Any BiasAdd L2Loss LogSoftmax MatMul Max Mean Min Prod Softmax Sum",
    # of shapes
    "BroadcastTo ConcatV2 Const ExpandDims Fill Identity NoOp OnesLike Pack Pad PadV2 Placeholder",
    "Range Reshape ReverseV2 Shape Slice Split SplitV Squeeze StopGradient StridedSlice Tile",
    "Transpose Unpack ZerosLike",
    # of variables and functions
    "AssignAddVariableOp AssignSubVariableOp AssignVariableOp PartitionedCall ReadVariableOp",
    "StatefulPartitionedCall",
)
_OPERATIONS = {
    "CPU": _ON_ALL_DEVICES
    | _words(
        "BatchMatMulV2 Cumsum Einsum GatherV2 MatrixBandPart TensorListFromTensor",
        "TensorListGetItem TensorListReserve TensorListSetItem TensorListStack While",
    ),
    "GPU": _ON_ALL_DEVICES | _words("Conv2D MaxPool"),
}

# Inputs that XLA must know when it compiles. That of a Slice is where it begins, too: TensorFlow
# checks that, and XLA does not; nor does it check the exponent and the divisor of integers.
_CONSTANT_INPUTS = {
    **dict.fromkeys(_words("All Any Cumsum Max Mean Min Prod ReverseV2 Sum"), slice(1, 2)),
    **dict.fromkeys(_words("BroadcastTo ExpandDims Pad PadV2 Reshape Tile Transpose"), slice(1, 2)),
    **dict.fromkeys(_words("FloorMod Pow TensorListFromTensor While"), slice(1, 2)),
    **{"ConcatV2": slice(-1, None), "Fill": slice(0, 1), "GatherV2": slice(2, 3)},
    **{"Range": slice(0, 3), "Slice": slice(1, 3), "Split": slice(0, 1), "SplitV": slice(1, 3)},
    **{"StridedSlice": slice(1, 4), "TensorListReserve": slice(0, 2)},
}

# Operations of an Embedding, which makes integers of float ids, see `labels.nan_for_wrong_ids`.
_TAKERS_OF_IDS = _words("AddV2 GatherV2 Less SelectV2")

_LOSSES = (losses.cross_entropy, losses.binary_cross_entropy, losses.mean_squared_error)
_METRICS = (
    *(keras.metrics.SparseCategoricalAccuracy, keras.metrics.CategoricalAccuracy),
    *(keras.metrics.BinaryAccuracy, keras.metrics.Mean, Accuracy),
    *(keras.metrics.MeanSquaredError, keras.metrics.MeanAbsoluteError),
)
_NUMBERS = "uif"  # kinds of NumPy's dtypes


def decide(step: TrainStep, dataset: Dataset) -> None:
    """Sets ``jit_compile`` if it is None; logs the decision and its reason.

    A later call decides again, with changed settings, if the rule had chosen XLA.
    """
    before = step.jit_compile
    if before is not None and not (before and step.jit_by_rule):
        return
    known = _decisions.get(step)
    reason = why_not(step, dataset)
    if _decisions.get(step) is not known:  # the model was traced, and may count its calls
        step.trace_guards.snapshot(step)
    step.jit_compile = step.jit_by_rule = reason is None
    if step.jit_compile != before:
        on = f"one replica on a {_device(step)}, and a small model that XLA makes faster"
        logging.info("jit_compile: %s, by rule: %s", _shown(step), reason or on)


def keep(step: TrainStep, dataset: Dataset, compiled: bool) -> None:
    """Reuses the first run's decision, so a resume is bit-exact. Leaves out XLA where the rule
    forbids it now, for instance on several replicas after one."""
    decided_by_rule = step.jit_compile is step.jit_by_rule
    if decided_by_rule and step.jit_compile is not compiled:
        step.jit_compile = step.jit_by_rule = compiled and why_not(step, dataset) is None
        logging.info("jit_compile: %s, as when the run began", _shown(step))


def _shown(step: TrainStep) -> str:
    return "on" if step.jit_compile else "off"


def why_not(step: TrainStep, dataset: Dataset) -> str | None:
    """Returns why the rule leaves out XLA, for the log; None if XLA compiles the step."""
    for check in (_placement, _settings, _code, _size, _model):  # the last takes longest
        if reason := check(step, dataset):
            return reason
    return None


def _placement(step: TrainStep, dataset: Dataset) -> str | None:
    if not step.single_replica:
        if replicas.is_asynchronous(step.strategy):
            return "the variables are on parameter servers"
        several = step.strategy.num_replicas_in_sync > 1
        return "the strategy has several replicas" if several else "the strategy is mirrored"
    if _device(step) not in _MOST_PRODUCTS:
        return f"the device is a {_device(step)}, neither a CPU nor a GPU"
    return None


def _device(step: TrainStep) -> str:
    """The kind of device that has the weights, such as ``CPU``; several are joined."""
    kinds = {tf.DeviceSpec.from_string(v.device).device_type for v in step.trainable_variables}
    return " and a ".join(sorted(map(str, kinds)))


def _settings(step: TrainStep, dataset: Dataset) -> str | None:
    data: Any = dataset
    if type(data) not in (InMemory, Mixture) or not data.training:
        return f"the data are {type(data).__name__}, not arrays in memory"
    if not all(a.dtype.kind in _NUMBERS for a in keras.tree.flatten(data.arrays)):
        return "the data are not all numbers"
    if step.accumulate_steps > 1:
        return "accumulate_steps is set"
    if step.jit_update is False:
        return "jit_update is off"
    if any(step.tables):
        return "an embedding table is trained by rows"
    if len(step.updater.groups) > 1:
        return "there are several parameter groups"
    return None


def _code(step: TrainStep, dataset: Dataset) -> str | None:
    """Refuses code from outside of ctl and Keras, which XLA may be unable to compile."""
    if type(step) is not TrainStep:
        return f"{type(step).__name__} is a step of its own"
    if changed := [name for name in vars(step) if inspect.isfunction(getattr(TrainStep, name, 0))]:
        return f"{changed[0]} of the step was replaced"
    if _unwrapped(step.loss_fn) not in _LOSSES:
        return f"the loss is {_name(step.loss_fn)}"
    if other := [metric for metric in step.given_metrics if type(metric) not in _METRICS]:
        return f"metric {other[0].name} ({type(other[0]).__name__})"
    optimizer, _, schedule = step.updater.groups[0]
    schedule = schedule or optimizer._learning_rate  # the public name is the current number
    if not _is_of_keras(schedule) and _module(schedule) != schedules.__name__:
        return f"the schedule is {_name(schedule)}"
    if not _is_of_keras(optimizer):
        return f"the optimizer is {type(optimizer).__name__}"
    return None


# For each step, the version of its Python values, and what `_operations` returned for it.
_decisions: weakref.WeakKeyDictionary[TrainStep, tuple[int, str | None]] = (
    weakref.WeakKeyDictionary()
)


def _model(step: TrainStep, dataset: Dataset) -> str | None:
    without = _LAYERS_WITHOUT[_device(step)]
    for layer in replicas.layers_of(step.model):  # to trace a ResNet takes 0.2 s
        if isinstance(layer, without):
            return f"layer {layer.name} ({type(layer).__name__}) is not known to gain from XLA"
    version, reason = _decisions.get(step, (None, None))
    if version != step.trace_guards.version:
        version, reason = step.trace_guards.version, _operations(step, dataset)
        _decisions[step] = version, reason
    return reason


def _operations(step: TrainStep, dataset: Dataset) -> str | None:
    """Traces the forward pass of the model alone, and looks at its operations."""
    batch = labels.batch_spec(dataset)
    if not local_batch.has_parts(batch):
        return "batches are not (features, labels)"
    size = dataset.global_batch_size
    features_spec = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([size, *spec.shape[1:]], spec.dtype), batch[0]
    )

    def forward(features: Any) -> Any:
        with (
            labels.nan_for_wrong_ids(step.tracked.layer, True),
            keras.StatelessScope(collect_losses=True) as scope,  # the layers keep no losses
        ):
            outputs = step.model(step.preprocess(features), training=True)
        weights = [v for v in step.model.trainable_variables if v.regularizer]
        return outputs, scope.losses, [v.regularizer(v.value) for v in weights]

    try:
        traced = tf.function(forward).get_concrete_function(features_spec)
    except Exception as error:  # the trace of the step raises it again
        return f"the model alone cannot be traced: {type(error).__name__}"
    graph = Graph(traced.graph.as_graph_def(add_shapes=True))
    if len(graph.nodes) > _MOST_OPERATIONS:
        return f"{len(graph.nodes)} operations take long to compile"
    device = _device(step)
    for node in graph.nodes:
        reason = _size_of(node, device) or _kind_of(node, device) or _silent_in(graph, node)
        if node.op == "IdentityN" and not _is_all_of_keras(step.model):
            reason = "may have a gradient that XLA cannot compile"
        if reason:
            return f"operation {node.op} ({node.name}) {reason}"
    return None


def _kind_of(node: Node, device: str) -> str | None:
    if node.op not in _OPERATIONS[device]:
        again = "draws random numbers, which XLA may draw several times"
        return again if "Random" in node.op else "is not known to gain from XLA"
    if any(shape is None or -1 in shape for shape in node.shapes):
        return "has a shape that is not known"
    types = [tf.as_dtype(a.type) for a in node.attr.values() if a.WhichOneof("value") == "type"]
    other = [t.name for t in types if t.is_floating and t != tf.float32]
    if other and node.op not in ("Cast", "Placeholder"):  # of the features
        return f"is of {other[0]}"
    known = node.inputs[_CONSTANT_INPUTS.get(node.op, slice(0))]
    if node.op.startswith(("TensorListGet", "TensorListSet")) and not node.in_loop:
        known = node.inputs[1:2]  # where it is read or written: XLA does not check that either
    if not all(_is_constant(tensor, node.in_loop) for tensor in known):
        return "depends on values where XLA needs a constant"
    if node.op == "While" and constant(node.inputs[1]) == -1:
        return "has no greatest length"
    if node.attr["resize_if_index_out_of_bounds"].b:
        return "makes a TensorArray longer, which XLA cannot"
    return None


def _silent_in(graph: Graph, node: Node) -> str | None:
    """What is wrong with the data that XLA would not show."""
    if node.op == "GatherV2" and not _gives_nan(graph, node):
        return "is no lookup of an Embedding, and XLA checks no index"
    return "loses a NaN under XLA" if _loses_nan(graph, node) else None


def _loses_nan(graph: Graph, node: Node) -> bool:
    """Whether XLA takes the other number for a NaN in a maximum, or makes the integer 0 of it."""
    if node.op == "Cast":
        takers = {taker.op for taker, _ in graph.consumers(Tensor(node, 0))}
        return _makes_integers(node) and not takers <= _TAKERS_OF_IDS
    if node.op in ("Max", "Min"):
        return not all(_is_constant(tensor, node.in_loop) for tensor in node.inputs)
    if node.op in ("Maximum", "Minimum"):
        return not any(_is_constant(tensor, node.in_loop) for tensor in node.inputs)
    return False


def _makes_integers(node: Node) -> bool:
    """Whether a Cast does so, of floats."""
    types = [tf.as_dtype(node.attr[name].type) for name in ("SrcT", "DstT") if name in node.attr]
    return len(types) == 2 and types[0].is_floating and types[1].is_integer


def _size_of(node: Node, device: str) -> str | None:
    if _elements(node) > _MOST_ELEMENTS[device]:
        return f"has {_elements(node)} elements, which TensorFlow computes faster"
    most = _MOST_PRODUCTS_IN_LOOP if node.in_loop else _MOST_PRODUCTS[device]
    if not node.op.startswith("Conv") and flops(node) // 2 > most:
        return "multiplies matrices of a size at which TensorFlow is faster"
    return None


def _gives_nan(graph: Graph, lookup: Node) -> bool:
    """Whether the rows of wrong ids become NaN, see `labels.nan_for_wrong_ids`."""
    found = graph.consumers(Tensor(lookup, 0))
    values = [constant(taker.inputs[2]) for taker, _ in found if taker.op == "SelectV2"]
    return len(values) == len(found) and all(v is not None and np.isnan(v).all() for v in values)


def _is_all_of_keras(model: keras.Model) -> bool:
    """Whether each layer of ``model``, and each function that it calls, is Keras's."""
    names = "activation", "recurrent_activation", "function"
    layers = replicas.layers_of(model)
    called = [getattr(layer, name, None) for layer in layers for name in names]
    return all(f is None or _is_of_keras(f) for f in (*layers, *called))


def _is_constant(tensor: Tensor, in_loop: bool) -> bool:
    """Whether XLA knows the value of ``tensor`` when it compiles. ``in_loop``: that of the node
    that takes it."""
    nodes = _sources(tensor.node)
    # A variable of a loop stands for its first value, which is outside of the loop.
    ends = [node for node in nodes if not node.inputs or node.op == "Shape"]
    constants = all(n.op in ("Const", "Shape") and n.in_loop == in_loop for n in ends)
    return constants and not any(node.op == "While" for node in nodes)


def _sources(node: Node) -> set[Node]:
    """``node``, and all nodes that its value depends on. A Shape depends on none."""

    def inputs(one: Node) -> list[Node]:
        return [] if one.op == "Shape" else [tensor.node for tensor in one.inputs]

    return {node} | reach([node], inputs)


def _elements(node: Node) -> int:
    return max((math.prod(shape or ()) for shape in node.shapes), default=0)


def _size(step: TrainStep, dataset: Dataset) -> str | None:
    if len(step.trainable_variables) > _MOST_VARIABLES:
        return f"{len(step.trainable_variables)} variables take long to compile"
    tables = {id(v.value) for one in labels.embeddings(step.model) for v in one.variables}
    multiplied = [v for v in step.trainable_variables if id(v) not in tables]
    weights = sum(v.shape.num_elements() for v in multiplied)
    if weights * dataset.global_batch_size > _MOST_PRODUCTS[_device(step)]:
        return "TensorFlow multiplies matrices of this size faster"
    return None


def _unwrapped(function: Callable) -> Callable:
    return function.func if isinstance(function, functools.partial) else function


def _is_of_keras(value: Any) -> bool:
    return _module(value).partition(".")[0] == "keras"


def _module(value: Any) -> str:
    return (value if inspect.isroutine(value) else type(value)).__module__


def _name(value: Any) -> str:
    return getattr(_unwrapped(value), "__name__", type(value).__name__)
