"""The only place that touches private or undocumented names of TensorFlow.

Each has a question that says, in one line for the user, what cannot be shown without it; None when
all is well. A TensorFlow that loses one of them costs a part of a report, never a run.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

_MANAGER = "experimental_acd_manager"
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
    try:
        return importlib.import_module(_XPLANE)
    except ImportError:
        return None
