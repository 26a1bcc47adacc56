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
import tensorflow as tf
from absl import logging

from ctl.data.dataset import Dataset
from ctl.data.in_memory import InMemory
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
_MOST_VARIABLES = 64  # the time to compile grows with them,
_MOST_OPERATIONS = 600  # and with these of the forward pass

# Of a matrix product in a loop, as that of an LSTM: XLA was twice as fast up to 0.4 million, level
# with TensorFlow at 0.5 million, and slower from 1 million on.
_MOST_PRODUCTS_IN_LOOP = 1 << 19
# Of a tensor. On a CPU, XLA was faster up to 2 million, level at 4 million, and slower at 8
# million. On a GPU, it was faster at 5 million.
_MOST_ELEMENTS = {"CPU": 1 << 21, "GPU": 1 << 23}
_MOST_RANDOM = 1 << 17  # numbers in a step, as of Dropout: XLA draws them more slowly

_CONVOLUTIONS = keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Operations of the forward pass that XLA is known to compile, with their gradients.
_ON_ALL = _words(
    # of each element
    "Abs AddN AddV2 Cast Cos Div DivNoNan Elu Equal Erf Erfc Exp Expm1 FloorMod Greater",
    "GreaterEqual LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum",
    "Minimum Mul Neg NotEqual Pow RealDiv Reciprocal Relu Relu6 Rsqrt Select SelectV2 Selu Sigmoid",
    "Sign Sin Softplus Softsign Sqrt Square SquaredDifference Sub Tanh",
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
    "CPU": _ON_ALL
    | _words(
        "BatchMatMulV2 Cumsum Einsum GatherV2 MatrixBandPart StatelessRandomGetKeyCounter",
        "StatelessRandomUniformV2 TensorListFromTensor TensorListGetItem TensorListReserve",
        "TensorListSetItem TensorListStack While",
    ),
    "GPU": _ON_ALL | _words("Conv2D MaxPool"),
}

# Inputs that XLA must know when it compiles, and two that TensorFlow checks, and XLA does not: where
# a Slice begins, and a divisor of integers.
_STATIC = {
    **dict.fromkeys(_words("All Any Cumsum FloorMod Mean Prod ReverseV2 Sum"), slice(1, 2)),
    **dict.fromkeys(_words("BroadcastTo ExpandDims Pad PadV2 Reshape Tile Transpose"), slice(1, 2)),
    **dict.fromkeys(_words("Fill Split StatelessRandomUniformV2"), slice(0, 1)),
    **{"ConcatV2": slice(-1, None), "GatherV2": slice(2, 3), "Range": slice(0, 3)},
    **{"Slice": slice(1, 3), "SplitV": slice(1, 3), "StridedSlice": slice(1, 4)},
    **{"TensorListReserve": slice(0, 2), "While": slice(1, 2)},
}
# From the features to ids, whose values are then those of the data. These are checked before.
_OF_IDS = _words(
    "AddV2 Cast ConcatV2 Const ExpandDims Fill Identity Less Pack Placeholder Range Reshape",
    "SelectV2 Split Squeeze StridedSlice Transpose",
)

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
    reason = why_not(step, dataset)
    step.jit_compile = step.jit_by_rule = reason is None
    if step.jit_compile != before:
        on = f"one replica on a {_device(step)}, and small layers that XLA makes faster"
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
    if type(data) is not InMemory or not data.training:
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


# For each step, the version of its Python values and what `_operations` found for it.
_found: weakref.WeakKeyDictionary[TrainStep, tuple[int, str | None]] = weakref.WeakKeyDictionary()


def _model(step: TrainStep, dataset: Dataset) -> str | None:
    if _device(step) == "CPU":  # a ResNet is traced in 0.2 s
        for layer in replicas.layers_of(step.model):
            if isinstance(layer, _CONVOLUTIONS):
                return f"TensorFlow is faster with convolutions ({layer.name})"
    version, reason = _found.get(step, (None, None))
    if version != step.trace_guards.version:
        version, reason = _found[step] = step.trace_guards.version, _operations(step, dataset)
        step.trace_guards.snapshot(step)  # a layer may count its calls
    return reason


def _operations(step: TrainStep, dataset: Any) -> str | None:
    """Traces the forward pass of the model alone, and looks at its operations."""
    size = dataset.global_batch_size
    spec = tf.nest.map_structure(
        lambda array: tf.TensorSpec([size, *array.shape[1:]], array.dtype), dataset.arrays
    )
    if not local_batch.has_parts(spec):
        return "batches are not (features, labels)"

    def forward(features: Any) -> Any:
        with keras.StatelessScope(collect_losses=True) as scope:  # the layers keep no losses
            outputs = step.model(step.preprocess(features), training=True)
        weights = [v for v in step.model.trainable_variables if v.regularizer]
        return outputs, scope.losses, [v.regularizer(v.value) for v in weights]

    try:
        traced = tf.function(forward).get_concrete_function(spec[0])
    except Exception as error:  # that of the step is shown when it is traced
        return f"the model alone cannot be traced: {type(error).__name__}"
    graph = Graph(traced.graph.as_graph_def(add_shapes=True))
    if len(graph.nodes) > _MOST_OPERATIONS:
        return f"{len(graph.nodes)} operations take long to compile"
    device, tables = _device(step), _tables(step, traced, graph)
    for node in graph.nodes:
        if reason := _operation(node, device) or _lookup(node, tables):
            return f"operation {node.op} ({node.name}) {reason}"
    drawn = sum(_elements(n) for n in graph.nodes if n.op.startswith("StatelessRandomUniform"))
    return None if drawn <= _MOST_RANDOM else f"TensorFlow draws {drawn} random numbers faster"


def _tables(step: TrainStep, traced: Any, graph: Graph) -> set[Node]:
    """The tables whose rows become NaN under XLA where an id is wrong."""
    layers = labels.embeddings(step.tracked.layer)
    handles = {id(layer.embeddings.value.handle) for layer in layers}
    captures = traced.graph.captures
    return {graph.main[inner.op.name] for outer, inner in captures if id(outer) in handles}


def _lookup(node: Node, tables: set[Node]) -> str | None:
    if node.op != "GatherV2":
        return None
    table, ids = (tensor.node for tensor in node.inputs[:2])
    while table.op in ("Identity", "ReadVariableOp"):
        table = table.inputs[0].node
    if table not in tables:
        return "is no lookup of an Embedding, and XLA checks no index"
    if any(one.op not in _OF_IDS for one in _before(ids)):
        return "looks up ids that the model computes, and XLA checks no id"
    return None


def _operation(node: Node, device: str) -> str | None:
    if node.op not in _OPERATIONS[device]:
        return "was not found to gain"
    if any(shape is None or -1 in shape for shape in node.shapes):
        return "has a shape that is not known"
    types = [tf.as_dtype(a.type) for a in node.attr.values() if a.WhichOneof("value") == "type"]
    if other := [t.name for t in types if t.is_floating and t != tf.float32]:
        return f"is of {other[0]}"
    if _elements(node) > _MOST_ELEMENTS[device]:
        return f"has {_elements(node)} elements, which TensorFlow computes faster"
    if not all(map(_is_static, node.inputs[_STATIC.get(node.op, slice(0))])):
        return "depends on values where XLA needs a constant"
    if node.op == "While" and constant(node.inputs[1]) == -1:
        return "has no greatest length"
    if node.op in ("Max", "Min") and not all(map(_is_static, node.inputs)):
        return "loses a NaN under XLA"
    if node.attr["resize_if_index_out_of_bounds"].b:
        return "makes a TensorArray longer, which XLA cannot"
    if node.in_loop and flops(node) // 2 > _MOST_PRODUCTS_IN_LOOP:
        return "is in a loop, and TensorFlow multiplies matrices of this size faster"
    return None


def _is_static(tensor: Tensor) -> bool:
    """Whether XLA knows the value of ``tensor`` when it compiles."""
    if constant(tensor) is not None:
        return True
    nodes = _before(tensor.node)
    # What a loop changes has its first value, from outside of the loop, as an input here.
    ends = [node for node in nodes if not node.inputs or node.op == "Shape"]
    return all(n.op in ("Const", "Shape") and n.in_loop == tensor.node.in_loop for n in ends) and (
        not any(node.op == "While" for node in nodes)
    )


def _before(node: Node) -> set[Node]:
    """``node``, and all that its value is computed from; only the shape of a tensor, if that is
    what is taken."""

    def inputs(one: Node) -> list[Node]:
        return [] if one.op == "Shape" else [tensor.node for tensor in one.inputs]

    return {node} | reach([node], inputs)


def _elements(node: Node) -> int:
    return max((math.prod(shape or ()) for shape in node.shapes), default=0)


def _size(step: TrainStep, dataset: Dataset) -> str | None:
    if len(step.trainable_variables) > _MOST_VARIABLES:
        return f"{len(step.trainable_variables)} variables take long to compile"
    weights = sum(v.shape.num_elements() for v in step.trainable_variables)
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
