"""Private and undocumented names of TensorFlow; `tests/test_layout.py` keeps them in this module.

For each name, a function ``no_...`` returns None if this TensorFlow has the name, else one line for
the user that says what cannot be shown. Without the name, a report loses a part; training runs.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_CALLBACKS = "tensorflow.python.framework.op_callbacks"
_AUTOGRAPH = "tensorflow.python.autograph.core.config"
_MANAGER = "experimental_acd_manager"
_CONTEXT = "tensorflow.python.eager.context"
_DEFINITIONS = "tensorflow.python.framework.op_def_registry"
_ITERATORS = "tensorflow.python.data.ops.multi_device_iterator_ops"
_OBJECTS = "tensorflow.core.protobuf.trackable_object_graph_pb2"
_XPLANE = "tensorflow.tsl.profiler.protobuf.xplane_pb2"


def no_rules() -> str | None:
    """Says why AutoGraph reads all functions of ctl; None if it reads those of the user alone."""
    lost = "AutoGraph converts all functions of ctl, so each start takes longer"
    return _without(_AUTOGRAPH, lost, "CONVERSION_RULES", "DoNotConvert")


def leave_to_python(package: str, but: str) -> None:
    """Lets AutoGraph call the functions of ``package`` as they are, as it does with TensorFlow's;
    those of its subpackage ``but`` it converts. Without `no_rules`, it converts all."""
    if no_rules() is None:
        config = _import(_AUTOGRAPH)
        rules = (config.Convert(but), config.DoNotConvert(package))
        config.CONVERSION_RULES = (*rules, *config.CONVERSION_RULES)


def convert(function: Callable) -> Callable:
    """``function`` as AutoGraph converts it, if it is on here, by an API for libraries."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def missing_key(error: Exception) -> str:
    """The key that there is not, as Python shows it; empty if ``error`` is neither a `KeyError` nor
    what AutoGraph, which may raise an error of another type, has made of one."""
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata and metadata.cause_message.startswith("KeyError: "):
        return metadata.cause_message.partition(": ")[2]
    return repr(error.args[0]) if isinstance(error, KeyError) and error.args else ""


def set_message(error: Exception, message: str) -> None:
    """Gives an ``error`` with a `missing_key` another ``message``, also in those that AutoGraph
    raises in its place."""
    if isinstance(error, KeyError):
        error.args = (message,)
    if metadata := getattr(error, "ag_error_metadata", None):
        metadata.cause_message = f"KeyError: {message}"


class QuietMethod:
    """`tf.function` of a method, each object of whose class has a trace of its own, of which there
    may be many: without TensorFlow's warning that there are several."""

    def __init__(self, method: Callable):
        self._function = tf.function(method)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        of_owner = self._function.__get__(owner, kind)
        of_owner._omit_frequent_tracing_warning = True
        return of_owner


def why_no_timestamps() -> str | None:
    """Says why time stamps are impossible (see `run_independently`); None if they are possible."""
    lost = "time stamps inside the step would wait for each other, so phases, packs and late "
    has_manager = hasattr(tf.Graph(), _MANAGER)
    return None if has_manager else _lacks(f"Graph.{_MANAGER}", lost + "workers cannot be shown")


def run_independently(operation: tf.Operation) -> None:
    """Excludes a stateful operation from the automatic control dependencies. It then runs as soon
    as its inputs are computed, regardless of earlier stateful operations. Check `why_no_timestamps`
    first.
    """
    manager = getattr(operation.graph, _MANAGER)
    if manager is not None:  # None in a graph that no tf.function made, where nothing is ordered
        manager.run_independently(operation)


def no_operations_seen() -> str | None:
    """Says why operations cannot be watched, see `seeing_operations`; None if they can."""
    lost = "a training without graphs cannot name the operation that makes a NaN"
    return _without(_CALLBACKS, lost, "add_op_callback", "remove_op_callback")


@contextlib.contextmanager
def seeing_operations(see: Callable[[str, Sequence[Any], Sequence[Any]], None]) -> Iterator[None]:
    """While inside, ``see`` gets the kind, the inputs and the outputs of each operation that runs
    without a graph, in this thread and in those of its replicas. Does nothing without
    `no_operations_seen`."""
    callbacks = None if no_operations_seen() else _import(_CALLBACKS)

    def called(
        kind: str,
        inputs: Sequence[Any],
        attributes: Any,
        outputs: Sequence[Any],
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        if graph is None:
            see(kind, inputs, outputs)

    if callbacks:
        callbacks.add_op_callback(called)
    try:
        yield
    finally:
        if callbacks:
            callbacks.remove_op_callback(called)


def copy_here(variable: tf.Variable) -> tf.Variable:
    """Returns the copy of ``variable`` of this replica, or of the replica that is being updated. A
    distributed variable has no method that reads some of its rows."""
    return variable._get() if isinstance(variable, tf.distribute.DistributedValues) else variable


def count_of_servers(strategy: tf.distribute.ParameterServerStrategy) -> int:
    """The number of parameter servers. The strategy does not tell its cluster."""
    return strategy.extended._num_ps


def no_profile() -> str | None:
    """Says why a profile cannot be read; None if it can."""
    lost = "the time of a pack cannot be split into packing, collective and unpacking"
    return _without(_XPLANE, lost)


def parse_xspace(data: bytes) -> Any:
    """Parses the bytes of a ``*.xplane.pb`` file to an ``XSpace``. Check `no_profile` first."""
    return _import(_XPLANE).XSpace.FromString(data)


def _without(module: str, lost: str, *names: str) -> str | None:
    """What is ``lost`` if there is no such module, or it lacks one of ``names``; else None."""
    found = _import(module)
    if found is not None and all(hasattr(found, name) for name in names):
        return None
    return _lacks(".".join((module, *names[:1])), lost)


def _lacks(name: str, lost: str) -> str:
    return f"this TensorFlow ({tf.__version__}) has no {name}: {lost}"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def no_definitions() -> str | None:
    """Says why the outputs of an operation cannot be looked up; None if they can."""
    lost = "the shapes of operations with several outputs are unknown, so some sizes may be "
    return _without(_DEFINITIONS, lost + "missing")


def output_offset(node: Any, output: str) -> int:
    """Index of the first tensor of ``output`` among all outputs of a `NodeDef`.

    In the body of a function, tensors are named ``node:output:index``, relative to ``output``.
    Returns 0 if the definitions are missing (see `no_definitions`).
    """
    definitions = _import(_DEFINITIONS)
    definition = definitions.get(node.op) if definitions else None
    offset = 0
    for argument in definition.output_arg if definition else ():
        if argument.name == output:
            break
        if argument.number_attr:
            offset += node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            offset += len(node.attr[argument.type_list_attr].list.type)
        else:
            offset += 1
    return offset


def no_functions() -> str | None:
    """Says why functions of another process cannot be defined here; None if they can."""
    return _without(_CONTEXT, "what XLA makes of the step cannot be shown", "context")


def define_function(function: Any) -> None:
    """Registers a `FunctionDef` so that XLA finds it. Check `no_functions` first."""
    _import(_CONTEXT).context().add_function_def(function)


def abort_collectives(why: str) -> None:
    """Makes all collectives of this process fail, now and later, with `UnavailableError`. For any
    thread. Raises AttributeError if this TensorFlow cannot."""
    _import(_CONTEXT).context().abort_collective_ops(tf.errors.UNAVAILABLE, why)


def no_object_graph() -> str | None:
    """Says what a checkpoint without `object_graph` lacks; None if there is one."""
    lost = "`tf.train.Checkpoint` cannot read the checkpoints; ctl and `tf.train.load_checkpoint` "
    return _without(_OBJECTS, lost + "can")


def objects_of(graph: bytes) -> list[Any]:
    """The nodes of a stored object graph: their children, attributes and slots. Without
    `no_object_graph`, there are none, so variables are found by name."""
    module = _import(_OBJECTS)
    return [*module.TrackableObjectGraph.FromString(graph).nodes] if module else []


def object_graph(lengths: Mapping[str, int], name: Callable[[str, int], str]) -> bytes:
    """Returns what ``tf.train.Checkpoint(key=[...], ...)`` stores beside its variables: ``lengths``
    is their number in the list of each key, ``name`` maps ``(key, index)`` to the name under which
    one is stored. Check `no_object_graph` first."""
    graph = _import(_OBJECTS).TrackableObjectGraph()
    root = graph.nodes.add()
    for key, length in lengths.items():
        root.children.add(node_id=len(graph.nodes), local_name=key)
        group = graph.nodes.add()
        for index in range(length):
            group.children.add(node_id=len(graph.nodes), local_name=str(index))
            graph.nodes.add().attributes.add(name="VARIABLE_VALUE", checkpoint_key=name(key, index))
    for node in graph.nodes:
        node.has_checkpoint_values.value = True
    return graph.SerializeToString()


class Pipeline(NamedTuple):
    """What is known of a ``tf.data.Dataset`` that nobody has read, see `pipeline`.

    Attributes:
        may_call_python: whether a function of it may call Python.
        fixed: its largest parts that give the same elements whenever they are read.
        seeds: name, buffer and two seeds of each transformation with random numbers of its own.
        unseeded: what draws random numbers without a seed: "shuffle", "random" (the choice of
            ``sample_from_datasets``), or the name of a transformation whose function does.
        batch: examples in its batches, of which the last may have fewer; None if that is not known.
    """

    may_call_python: bool
    fixed: tuple[tf.data.Dataset, ...] = ()
    seeds: tuple[tuple[str, int, int, int], ...] = ()
    unseeded: tuple[str, ...] = ()
    batch: int | None = None


# What leaves the elements of its input as they are.
_SAME_BATCHES = frozenset(
    ("assertcardinality", "cache", "filter", "options", "prefetch", "repeat", "shard", "shuffle")
    + ("skip", "take")
)


def pipeline(dataset: tf.data.Dataset) -> Pipeline:
    """Looks through a dataset. A part of which this TensorFlow does not tell may call Python, and
    is not fixed.

    A shuffle takes new seeds each time it is read. To read it once more changes its later epochs,
    so it is not fixed, whatever its seed. Neither is a cache, which notes what was read.
    """
    kind = type(dataset).__name__
    name = re.sub(r"^_?(Parallel)?|Dataset(V\d)?$", "", kind).lower()
    try:
        inputs, functions = dataset._inputs(), [each.function for each in dataset._functions()]
    except (AttributeError, NotImplementedError):
        return Pipeline(True)
    if kind == "_VariantDataset":
        return Pipeline(True)
    parts = [pipeline(each) for each in inputs]
    python = any(part.may_call_python for part in parts)
    fixed = all(part.fixed == (each,) for part, each in zip(parts, inputs, strict=True))
    fixed &= not name.endswith(("cache", "snapshot", "save"))
    seeds = [each for part in parts for each in part.seeds]
    unseeded = [each for part in parts for each in part.unseeded]
    if hasattr(dataset, "_seed2"):  # a shuffle, or the choice of sample_from_datasets
        fixed, own = False, (int(dataset._seed), int(dataset._seed2))
        seeds.append((name, int(getattr(dataset, "_buffer_size", 0)), *own))
        unseeded += [] if any(own) else [name]
    for function in functions:
        graph, captured = function.graph.as_graph_def(), function.captured_inputs
        drawn = [each for part in (graph, *graph.library.function) for each in _drawn(part)]
        python |= any(tensor.dtype == tf.variant for tensor in captured)
        python |= b"PyFunc" in graph.SerializeToString()
        fixed &= not drawn and all(tensor.dtype != tf.resource for tensor in captured)
        unseeded += [what or name for what, seeded in drawn if not seeded]
    fixed_parts = (each for part in parts for each in part.fixed)
    batch = parts[0].batch if name in _SAME_BATCHES else None
    if name == "batch":
        batch = tf.get_static_value(getattr(dataset, "_batch_size", None))
    return Pipeline(
        python,
        (dataset,) if fixed else tuple(fixed_parts),
        tuple(seeds),
        tuple(dict.fromkeys(unseeded)),
        batch,
    )


def _drawn(graph: Any) -> Iterator[tuple[str, bool]]:
    """For each operation of a graph or function that draws random numbers: "shuffle" or "random" if
    it makes a dataset, else ""; and whether it has a seed."""
    nodes = {node.name: node for node in getattr(graph, "node", None) or graph.node_def}
    for node in nodes.values():
        if "seed2" in node.attr:
            yield "", bool(node.attr["seed"].i or node.attr["seed2"].i)
        for what, first in (("shuffle", 2), ("random", 0)) if "Dataset" in node.op else ():
            if node.op.lower().startswith(what):  # its seeds are inputs
                seeds = [nodes.get(name.partition(":")[0]) for name in node.input[first:][:2]]
                values = [each.attr["value"].tensor.int64_val if each else [1] for each in seeds]
                constant = all(each is not None and each.op == "Const" for each in seeds)
                yield what, not constant or any(map(any, values))


@contextlib.contextmanager
def devices_without_autotuning() -> Iterator[None]:
    """While inside, iterators of a strategy are made without autotuning on each device, too.

    `ctl.data.dataset.distribution_options` says why. The dataset on each device has only a fixed
    parameter to tune, but does not inherit the options. If this TensorFlow lacks the private
    function that makes it, freeing an iterator may take long.
    """
    module = _import(_ITERATORS)
    create = getattr(module, "_create_device_dataset", None)
    options = tf.data.Options()
    options.autotune.enabled = False
    if create:
        module._create_device_dataset = lambda *args: create(*args).with_options(options)
    try:
        yield
    finally:
        if create:
            module._create_device_dataset = create


def gpu_memory_limits() -> list[int]:
    """Bytes that TensorFlow may take of each GPU."""
    from tensorflow.python.client import device_lib

    return [d.memory_limit for d in device_lib.list_local_devices() if d.device_type == "GPU"]
