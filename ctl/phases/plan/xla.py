"""Asks XLA how it would combine the all-reduces of a step if it compiled all of the step.

A child process compiles the graph of one step and runs nothing. It is a child because TensorFlow
aborts (SIGABRT) at the end of a step that was compiled for collectives on a CPU. The child needs no
cluster: variables and zeros of its own replace everything that the graph takes from outside.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctl.base import tf_internals
from ctl.errors import UsageError
from ctl.phases.plan.plan import Fused

if TYPE_CHECKING:
    import tensorflow as tf

_SECONDS = 300.0

_ALL_REDUCE = re.compile(r"= (\(?[^=]*?\)?) all-reduce(?:-start)?\(.*")
_COMMENT = re.compile(r"/\*.*?\*/")  # such as the number of every fifth element of a tuple
_BITS = re.compile(r"\d+")  # in the name of a type, such as bf16 or c64
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def compile_step(concrete: tf.types.experimental.ConcreteFunction) -> tuple[Fused, ...]:
    """The all-reduces of one traced step on one replica, as XLA combines them.

    Raises:
        UsageError: XLA cannot compile the step or takes too long, or the child died.
    """
    graph = concrete.graph
    if tf_internals.no_functions():
        raise UsageError(tf_internals.no_functions())
    variables = {id(v.handle): v for v in graph.variables}
    outside: dict[str, Any] = {}
    for outer, inner in graph.captures:
        variable = variables.get(id(outer))
        like = variable if variable is not None else inner
        outside[inner.op.name] = [variable is not None, like.dtype.name, like.shape.as_list()]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "graph.pb").write_bytes(_portable(graph.as_graph_def()).SerializeToString())
        (directory / "outside.json").write_text(json.dumps(outside))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "ctl.phases.plan.xla", name],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"XLA took longer than {_SECONDS:.0f} s to compile the step") from None
        hlo = directory / "hlo.txt"
        if not hlo.exists():
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise UsageError(
                f"XLA cannot compile the step (exit code {done.returncode}): {lines[-1]}"
            )
        return read_hlo(hlo.read_text())


def _portable(graph_def: Any) -> Any:
    """Removes the devices of a cluster, and asks for the one kind of collective that XLA knows."""
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    for body in bodies:
        for node in body:
            node.device = ""
            if "communication_hint" in node.attr:
                node.attr["communication_hint"].s = b"auto"
    return graph_def


def read_hlo(text: str) -> tuple[Fused, ...]:
    """The all-reduces in the text of an optimized HLO module, in its order."""
    found = []
    for line in text.splitlines():
        match = _ALL_REDUCE.search(_COMMENT.sub("", line))
        if match:
            shapes = _SHAPE.findall(match[1])
            name = _OP_NAME.search(line)
            found.append(Fused(name[1] if name else "", len(shapes), sum(map(_bytes, shapes))))
    return tuple(found)


def _bytes(shape: tuple[str, str]) -> int:
    bits = _BITS.search(shape[0])
    size = int(bits[0]) // 8 if bits else 1  # a pred has a byte
    for dimension in filter(None, shape[1].split(",")):
        size *= int(dimension)
    return size


def _compile(directory: Path) -> None:
    """Writes the optimized HLO of the graph in ``directory``; runs in the child."""
    import tensorflow as tf

    graph_def = tf.compat.v1.GraphDef()
    graph_def.ParseFromString((directory / "graph.pb").read_bytes())
    for function in graph_def.library.function:
        tf_internals.define_function(function)
    outside: Mapping[str, Any] = json.loads((directory / "outside.json").read_text())
    made = {}
    for name, (is_variable, dtype, shape) in outside.items():
        if is_variable or dtype == "resource":
            made[name] = tf.Variable(tf.zeros(shape, dtype if is_variable else "float32"))
    placeholders = [node for node in graph_def.node if node.op == "Placeholder"]
    arguments = [node for node in placeholders if node.name not in made]

    # Remove the nodes of all inputs: XLA knows no Placeholder, and an import keeps replaced nodes.
    given = {*made, *(node.name for node in arguments)}
    kept = [node for node in graph_def.node if node.name not in given]
    for node in kept:
        inputs = [text for text in node.input if text.lstrip("^") not in given or text[0] != "^"]
        del node.input[:]
        node.input.extend(inputs)
    del graph_def.node[:]
    graph_def.node.extend(kept)
    used = {text.split(":")[0] for node in kept for text in node.input}

    @tf.function(jit_compile=True)
    def step(*values: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        inputs = {name: graph.capture(variable.handle) for name, variable in made.items()}
        inputs |= {n.name: value for n, value in zip(arguments, values, strict=True)}
        inputs = {name: tensor for name, tensor in inputs.items() if name in used}
        tf.graph_util.import_graph_def(graph_def, inputs, name="")

    values = []
    for node in arguments:
        shape = tf.TensorShape(node.attr["shape"].shape)
        dtype = tf.as_dtype(node.attr["dtype"].type)
        values.append(tf.zeros([size or 1 for size in shape.as_list()], dtype))
    text = step.experimental_get_compiler_ir(*values)(stage="optimized_hlo")
    (directory / "hlo.txt").write_text(text)


if __name__ == "__main__":
    try:
        _compile(Path(sys.argv[1]))
    except Exception as error:
        print(" ".join(str(error).split())[:250], file=sys.stderr)
        os._exit(1)
    os._exit(0)  # the normal end of a process can crash in TensorFlow here
