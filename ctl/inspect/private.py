"""Names of TensorFlow that are not in its public interface: the only place that touches them.

Each is looked for once, and what is lost without it is said by who asks.
"""

from __future__ import annotations

from typing import Any

try:
    from tensorflow.python.framework import op_def_registry
except ImportError:
    op_def_registry = None


def output_offset(node: Any, output: str) -> int | None:
    """The number of the first tensor of ``output`` among all outputs of a `NodeDef`.

    In the body of a function an input is named ``node:output:index``. None when TensorFlow does not
    let us see how its operations are defined: then operations with several named outputs have no
    known shapes.
    """
    definition = op_def_registry.get(node.op) if op_def_registry else None
    if definition is None:
        return None
    offset = 0
    for argument in definition.output_arg:
        if argument.name == output:
            return offset
        if argument.number_attr:
            offset += node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            offset += len(node.attr[argument.type_list_attr].list.type)
        else:
            offset += 1
    return None


def missing() -> list[str]:
    """What a plan cannot show in this version of TensorFlow, one line each."""
    if op_def_registry is None:
        return [
            "shapes of operations with several outputs: TensorFlow does not show how operations "
            "are defined"
        ]
    return []
