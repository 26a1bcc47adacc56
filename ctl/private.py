"""Private and undocumented names of TensorFlow; `tests/test_layout.py` finds them elsewhere.

Each has a question that says, in one line for the user, what cannot be shown without it; None when
all is well. A TensorFlow that loses one of them costs a part of a report, never a run.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_MANAGER = "experimental_acd_manager"
_CONTEXT = "tensorflow.python.eager.context"
_DEFINITIONS = "tensorflow.python.framework.op_def_registry"
_ITERATORS = "tensorflow.python.data.ops.multi_device_iterator_ops"
_XPLANE = "tensorflow.tsl.profiler.protobuf.xplane_pb2"


def no_marks() -> str | None:
    """Why operations cannot be taken out of the automatic control dependencies, if so."""
    if hasattr(tf.Graph(), _MANAGER):
        return None
    return (
        f"this TensorFlow ({tf.__version__}) has no Graph.{_MANAGER}: time stamps inside the step "
        "would wait for each other, so phases, packs and late workers cannot be shown"
    )


def run_independently(operation: tf.Operation) -> None:
    """Takes a stateful operation out of the automatic control dependencies: it runs as soon as its
    inputs are there, whatever other stateful operations come before it in the program."""
    manager = getattr(operation.graph, _MANAGER)
    if manager is not None:  # the graph is not made by a tf.function: nothing orders it
        manager.run_independently(operation)


def no_profile() -> str | None:
    """Why a profile cannot be read, if so."""
    if _xplane():
        return None
    return (
        f"this TensorFlow ({tf.__version__}) has no {_XPLANE}: the time of a pack cannot be split "
        "into packing, collective and unpacking"
    )


def parse_xspace(data: bytes) -> Any:
    """An ``XSpace`` message from the content of a ``*.xplane.pb`` file; ask `no_profile` first."""
    space = _xplane().XSpace()
    space.ParseFromString(data)
    return space


def _xplane() -> Any:
    return _import(_XPLANE)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def no_definitions() -> str | None:
    """Why it cannot be told which outputs an operation has, if so."""
    if _definitions():
        return None
    return (
        f"this TensorFlow ({tf.__version__}) has no {_DEFINITIONS}: the shapes of operations with "
        "several outputs are not known, so some sizes may be missing"
    )


def output_offset(node: Any, output: str) -> int:
    """The number of the first tensor of ``output`` among all outputs of a `NodeDef`, which in the
    body of a function is named ``node:output:index``; 0 when `no_definitions`."""
    definitions = _definitions()
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
    """Why functions of another process cannot be defined here, if so."""
    if hasattr(_import(_CONTEXT), "context"):
        return None
    return (
        f"this TensorFlow ({tf.__version__}) has no {_CONTEXT}.context: what XLA makes of the step "
        "cannot be shown"
    )


def define_function(function: Any) -> None:
    """Makes a `FunctionDef` known, so that XLA finds it; ask `no_functions` first."""
    _import(_CONTEXT).context().add_function_def(function)


def _definitions() -> Any:
    return _import(_DEFINITIONS)


@contextlib.contextmanager
def devices_without_autotuning() -> Iterator[None]:
    """Inside, iterators of a strategy get no autotuning for their part on each device either, see
    `ctl.data.dataset.distribution_options`. That part has one parameter, fixed, but no options of
    its own; where the private function that makes it has another name, an iterator may be slow to
    be freed."""
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
