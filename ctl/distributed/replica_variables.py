"""Per-replica variables of a step: a checkpoint holds the values of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ctl.distributed import replicas, workers
from ctl.errors import UsageError

_ON_RESIZE = ("refuse", "sum", "zero")


class _Part(NamedTuple):
    variable: tf.Variable
    name: str
    on_resize: str


class ReplicaVariables:
    """The per-replica variables of one step: variables from `ctl.TrainStep.variable`, and its
    `unsynchronized_variables`.

    Attributes:
        saved: for each variable, the values of all replicas, [replicas, *shape], on the host; empty
            before `create`. A checkpoint reads and writes these.
    """

    def __init__(self) -> None:
        self._made: list[_Part] = []
        self._all: list[_Part] = []  # `_made`, then unsynchronized variables
        self.saved: list[tf.Variable] = []

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that `make` returned, in order."""
        return [made.variable for made in self._made]

    def make(self, name: str, shape: Sequence[int], dtype: str, on_resize: str) -> tf.Variable:
        """See `ctl.phases.base_step.BaseStep.variable`. Call it in the strategy's scope."""
        if on_resize not in _ON_RESIZE:
            raise UsageError(
                f"variable {name}: on_resize={on_resize!r} is not one of {', '.join(_ON_RESIZE)}"
            )
        if self.saved:
            raise UsageError(f"variable {name}: create the variables of a step before its loop")
        if replicas.has_one_copy(tf.distribute.get_strategy()):
            raise UsageError(
                f"variable {name} cannot differ between replicas: this strategy has one copy for "
                "all; use mirrored"
            )
        variable = tf.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            name=name,
        )
        self._made.append(_Part(variable, name, on_resize))
        return variable

    def create(self, strategy: tf.distribute.Strategy, apart: Sequence[tf.Variable]) -> None:
        """Creates ``saved``: a variable for each result of `make`, then for each of ``apart``, the
        `unsynchronized_variables` of the step."""
        self._all = [*self._made, *(_Part(v, v.name.removesuffix(":0"), "refuse") for v in apart)]
        self._on_replicas = tf.function(
            functools.partial(strategy.run, self._rows), autograph=False
        )
        parts = strategy.num_replicas_in_sync
        for variable, name, on_resize in self._all:
            values = tf.zeros([parts, *variable.shape], variable.dtype)
            rows = parts if on_resize == "refuse" else None
            with tf.device("/cpu:0"):
                shape = [rows, *variable.shape]
                self.saved.append(tf.Variable(values, trainable=False, shape=shape, name=name))

    def collect(self, strategy: tf.distribute.Strategy) -> None:
        """Copies the values of all replicas to ``saved``. With several workers, all must call it.

        Raises:
            PeerError: a worker was lost.
        """
        if not self._all:
            return
        for saved, parts in zip(self.saved, self._on_replicas(), strict=True):
            saved.assign(workers.gather(strategy, parts, "gathering the state of the replicas"))

    def _rows(self) -> list[tf.Tensor]:
        """Returns the values of this replica, each [1, *shape]."""
        return [replicas.own_copy(part.variable)[tf.newaxis] for part in self._all]

    def spread(self, strategy: tf.distribute.Strategy) -> None:
        """Gives each replica its value in ``saved``. If ``saved`` is of another number of replicas,
        replica 0 gets the sum with ``on_resize="sum"``; other values are zeros."""
        if not self._all:
            return
        count = strategy.num_replicas_in_sync
        parts = []
        for saved, part in zip(self.saved, self._all, strict=True):
            value = saved.read_value()
            if value.shape[0] != count:
                total = tf.reduce_sum(value, axis=0, keepdims=True)
                first = total if part.on_resize == "sum" else tf.zeros_like(total)
                value = tf.concat([first, tf.zeros([count - 1, *first.shape[1:]], first.dtype)], 0)
            parts.append(value)

        def assign() -> None:
            me = tf.distribute.get_replica_context().replica_id_in_sync_group
            for part, value in zip(self._all, parts, strict=True):
                replicas.own_copy(part.variable).assign(value[me])

        # TensorFlow warns about an eager `run`.
        tf.function(lambda: strategy.run(assign), autograph=False)()
