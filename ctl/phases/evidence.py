"""What the traces of a user's step show of its mistakes, for `ctl.testing`."""

from __future__ import annotations

import collections
import contextlib
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.distributed import local_batch, replicas
from ctl.phases.base_step import BaseStep
from ctl.phases.checks import names_in
from ctl.phases.options import options
from ctl.phases.seeds import Seeds
from ctl.reduce import gather_context

# Operations that draw from a state of TensorFlow's own, which no checkpoint has.
_DRAWS = re.compile(
    r"Random(StandardNormal|Uniform(Int)?|Shuffle|Gamma|Poisson(V2)?)|Multinomial"
    r"|(Parameterized)?TruncatedNormal"
)
# Operations that may draw random numbers, and functions of Python.
_MAY_DRAW = re.compile(r"Random|Rng|Multinomial|TruncatedNormal|Stateful|Stateless|PyFunc")
_HALF = tf.float16, tf.bfloat16


class Evidence:
    """Collects what happens while a step is traced, see `recording`.

    Attributes:
        optimizers: names of optimizers whose `apply` was called, which ctl never does.
        draws: whether the step asked for a seed.
        draws_by_replica: whether it asked for one that differs between replicas.
        half_losses: whether a loss had a type of 16 bits.
        cuts: whether a batch was cut into micro-batches.
        stale: names of functions of the user with a trace that another call would not have made.
    """

    def __init__(self) -> None:
        self.optimizers: set[str] = set()
        self.draws = self.draws_by_replica = self.half_losses = self.cuts = False
        self.stale: set[str] = set()
        self._calls: dict[int, tuple[keras.Layer, set[Any]]] = {}  # with values of `training`
        self._unscaled: dict[int, keras.Layer] = {}  # called with uint8
        self._inside = threading.local()  # TensorFlow traces each replica in a separate thread

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While inside, notes what any step does."""
        replaced = (
            (keras.Layer, "__call__", self._layer_called),
            (keras.optimizers.Optimizer, "apply", self._applied),
            (type(tf.function(lambda: None)), "__call__", self._function_called),
            (BaseStep, "sum_of", self._summed),
            (Seeds, "make", self._seeded),
            (local_batch, "micro_batches", self._cut),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, note in replaced:
                stack.enter_context(_replaced(owner, name, note))
            yield

    def mistake(self, step: Any) -> str | None:
        """One line about the first mistake in the traces of ``step``, a built `ctl.TrainStep`."""
        kind = type(step).__name__
        if self.stale:
            return (
                f"{min(self.stale)} is a tf.function, and keeps what it traced in another pass, on "
                "another replica or with other values: leave @tf.function out, ctl traces the step"
            )
        if step.accumulate_steps > 1 and not self.cuts:
            return (
                f"accumulate_steps={step.accumulate_steps} has no effect: "
                f"{kind}.forward_backward() must cut the batch, as TrainStep.forward_backward does"
            )
        if self.half_losses:
            return (
                f"{kind}.loss() computes losses in 16 bits, which round and overflow: cast the "
                "outputs of the model to float32 before the loss"
            )
        trained = {id(v) for v in step.trainable_variables}
        for layer, passed in self._calls.values():
            differs = _differs_in_training(layer)
            trains = any(id(v.value) in trained for v in layer.trainable_variables)
            if trains and differs and passed == {None}:
                return (
                    f"{kind} calls {layer.name} without training=True, so its layer "
                    f"{differs} works as in an evaluation: call it with training=self.training"
                )
        evaluation = step.eval_step
        scales = evaluation.preprocess is BaseStep.preprocess and evaluation.loss is BaseStep.loss
        if self._unscaled and scales:
            return (
                f"{kind} calls {next(iter(self._unscaled.values())).name} with features in uint8, "
                "and the evaluation scales them to [0, 1]: call self.preprocess(features) first"
            )
        return None

    def _layer_called(self, original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(self._inside, "depth", 0)
        if not depth and tf.inside_function():
            passed = next((a for a in args[1:] if isinstance(a, bool)), kwargs.get("training"))
            self._calls.setdefault(id(layer), (layer, set()))[1].add(passed)
            if any(getattr(t, "dtype", None) == tf.uint8 for t in tf.nest.flatten(args)):
                self._unscaled[id(layer)] = layer
        self._inside.depth = depth + 1
        try:
            return original(layer, *args, **kwargs)
        finally:
            self._inside.depth = depth

    def _applied(self, original: Callable, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.optimizers.add(optimizer.name)
        return original(optimizer, *args, **kwargs)

    def _function_called(self, original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
        python = function.python_function
        module = (getattr(python, "__module__", None) or "").split(".")[0]
        if module in ("ctl", "keras", "tensorflow") or not tf.inside_function():
            return original(function, *args, **kwargs)
        traces = function.experimental_get_tracing_count()
        result = original(function, *args, **kwargs)
        if traces and traces == function.experimental_get_tracing_count():
            old, new = (
                f.get_concrete_function(*args, **kwargs) for f in (function, tf.function(python))
            )
            captured = ([id(outer) for outer, _ in g.graph.captures] for g in (old, new))
            if fingerprint(old) != fingerprint(new) or next(captured) != next(captured):
                self.stale.add(getattr(python, "__name__", "a function"))
        return result

    def _summed(self, original: Callable, step: Any, losses: Any, batch: Any) -> Any:
        of = losses[0] if isinstance(losses, tuple) else losses
        dtypes = (getattr(one, "dtype", None) for one in tf.nest.flatten(of))
        self.half_losses |= any(dtype in _HALF for dtype in dtypes)
        return original(step, losses, batch)

    def _seeded(self, original: Callable, seeds: Any, salt: Any, step: Any, own: bool) -> Any:
        self.draws = True
        self.draws_by_replica |= own
        return original(seeds, salt, step, own)

    def _cut(self, original: Callable, batch: Any, parts: int) -> Any:
        self.cuts = True
        return original(batch, parts)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, note: Callable) -> Iterator[None]:
    original = getattr(owner, name)

    @tf.autograph.experimental.do_not_convert
    def noted(*args: Any, **kwargs: Any) -> Any:
        return note(original, *args, **kwargs)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _differs_in_training(layer: keras.Layer) -> str | None:
    """The name of a layer in ``layer`` that an evaluation calls in another way, or None."""
    for one in replicas.layers_of(layer):
        norm = isinstance(one, keras.layers.BatchNormalization) and one.trainable
        if norm or replicas.draws(one):
            return one.name
    return None


def unread_option(step: Any) -> str | None:
    """The first option that no code of the classes of ``step`` names, or None."""
    kinds = (kind for kind in type(step).__mro__ if not kind.__module__.startswith("ctl.phases"))
    named = set().union(*(names_in(value) for kind in kinds for value in vars(kind).values()))
    return next((name for name in options(type(step)) if name not in named), None)


def unsaved_draw(graph: Any) -> str | None:
    """The first operation of ``graph``, a concrete function, that draws random numbers from a state
    of TensorFlow's own; None if there is none."""
    return next((node.op for node in _nodes(graph) if _DRAWS.fullmatch(node.op)), None)


def draws(graph: Any) -> bool:
    """Whether ``graph``, a concrete function, may draw random numbers."""
    calls = {"StatefulPartitionedCall", "StatelessIf", "StatelessWhile"}
    return any(_MAY_DRAW.search(node.op) and node.op not in calls for node in _nodes(graph))


def fingerprint(graph: Any) -> list[tuple]:
    """What ``graph``, a concrete function, computes: operations and constants, without names."""
    return [
        (node.op, *(value.SerializeToString() for value in _values(node))) for node in _nodes(graph)
    ]


def difference(one: Any, two: Any) -> str:
    """What differs between two graphs with other `fingerprint`s, for people."""
    for first, second in zip(_nodes(one), _nodes(two), strict=False):
        if first.op != second.op:
            break
        pair = [node.attr["value"].tensor for node in (first, second)]
        if first.op == "Const" and pair[0] != pair[1]:
            values = [tf.make_ndarray(tensor) for tensor in pair]
            if all(value.size == 1 and value.dtype.kind in "fiub" for value in values):
                old, new = (value.item() for value in values)
                return f"a constant is {old:.6g} in one trace, and {new:.6g} in the next"
            return "a constant array is another in the next trace"
    return "the next trace has other operations"


def _nodes(graph: Any) -> Iterator[Any]:
    """The operations of ``graph`` and of the functions that it calls, each function once."""
    definition = graph.graph.as_graph_def()
    library = {
        function.signature.name: function.node_def for function in definition.library.function
    }
    left = collections.deque([definition.node])
    while left:
        for node in left.popleft():
            yield node
            for name in sorted(node.attr):
                value = node.attr[name]
                for function in (value.func, *value.list.func):
                    if nodes := library.pop(function.name, None):
                        left.append(nodes)


def _values(node: Any) -> Iterator[Any]:
    """Attributes of an operation but for names, such as those of functions."""
    for name in sorted(node.attr):
        value = node.attr[name]
        if value.WhichOneof("value") not in ("func", "s") and not (value.list.func or value.list.s):
            yield value


def depends_on_others(step: Any, batches: Iterable[Any], parts: int) -> bool:
    """Whether ``step``, on one replica, gives examples other losses if each batch is cut into
    ``parts``."""

    def losses(batch: Any) -> list[tf.Tensor]:
        with gather_context(1, None):
            result = step.loss(batch)
        return tf.nest.flatten(result[0] if isinstance(result, tuple) else result)

    @tf.function
    def together_and_alone(batch: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        rows = local_batch.rows(batch) // parts
        cut = [
            tf.nest.map_structure(lambda t, i=i: t[i * rows : (i + 1) * rows], batch)
            for i in range(parts)
        ]
        alone = zip(*step.strategy.run(lambda: [losses(part) for part in cut]), strict=True)
        return step.strategy.run(losses, args=(batch,)), [tf.concat(one, axis=0) for one in alone]

    try:
        return not all(
            np.allclose(one[: len(other)], other, 1e-3, 1e-5)
            for batch in batches
            for one, other in zip(*together_and_alone(batch), strict=True)
        )
    except Exception:  # the user's, for a batch of another size
        return False


def random_states() -> tuple[Any, ...]:
    """Comparable states of the random numbers of NumPy and of Python."""
    state: Any = np.random.get_state(legacy=True)
    return state[1].tobytes(), state[2:], random.getstate()


def plain_attributes(step: Any) -> dict[str, Any]:
    """Attributes of ``step`` that are plain values."""
    return {n: v for n, v in vars(step).items() if isinstance(v, bool | int | float | str)}


def kept_tensor(step: Any) -> str | None:
    """The first attribute of ``step`` that is, or has, a tensor of a trace; None without one."""
    for name, value in vars(step).items():
        if any(tf.is_symbolic_tensor(leaf) for leaf in tf.nest.flatten(value)):
            return name
    return None
