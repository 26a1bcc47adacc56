"""Scalars that the phases of a step log, combined over replicas in the reduction of the losses.

Each replica adds up what it logs in rows of one small variable. At the end of a call of the loop,
the rows are summed over replicas together with the losses, so `ctl.TrainStep.log` adds no
collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from ctl.base.actions import CONTEXT
from ctl.distributed import replicas
from ctl.errors import UsageError
from ctl.reduce import SUM

KINDS = ("mean", "sum", "max", "last")

Rows = dict[str, tuple[float, float]]  # value and weight of each name

_ROWS = 64
# Names in a log record that ctl writes itself.
TAKEN = (
    *CONTEXT,
    *("schema", "loss", "steps_per_second", "examples_per_second", "tokens_per_second"),
    *("learning_rate", *(f"learning_rate_{group}" for group in range(2, 100))),
    *("gradient_norm", "weight_norm", "update_ratio"),
    *("skipped_steps", "loss_scale", "mfu", "peak_memory_mib"),
)


class Logged:
    """The scalars that one step logs.

    Attributes:
        variables: one variable, float32 [64, 2], with separate values on each replica. A row has
            the value and the weight of one name since the end of the last call. A weight of 0 means
            that nothing was logged. Empty before `create`.
        rows: value and weight of what was collected since `reset`, by name.
    """

    def __init__(self) -> None:
        self.variables: list[tf.Variable] = []
        self._kinds: dict[str, str] = {}  # in the order of the rows
        self.rows: Rows = {}

    def create(self, strategy: tf.distribute.Strategy) -> None:
        """Creates the variable, unless replicas of ``strategy`` share one copy of a variable."""
        if self.variables or replicas.has_one_copy(strategy):
            return
        on_read = tf.VariableSynchronization.ON_READ
        with strategy.scope():
            rows = tf.zeros([_ROWS, 2])
            rows = tf.Variable(rows, trainable=False, synchronization=on_read, name="logged")
        self.variables = [rows]

    def add(
        self,
        name: str,
        value: tf.Tensor | float,
        kind: str = "mean",
        taken: Iterable[str] = (),
    ) -> None:
        """Adds to the row of ``name``, on one replica. See `ctl.phases.base_step.BaseStep.log`.

        Args:
            name: name of the scalar.
            value: any shape.
            kind: one of `KINDS`.
            taken: names that are not allowed, such as `TAKEN` and the names of metrics.

        Raises:
            UsageError: the name is taken or has another kind, there are more than 64 names, there
                is no variable, or the call is outside of a replica.
        """
        if not self.variables:
            raise UsageError(
                f"log({name!r}) needs a step in a loop, and does not work with parameter servers "
                "or central_storage: use a metric there"
            )
        if tf.distribute.in_cross_replica_context():
            raise UsageError(f"log({name!r}) was called outside of a replica: call it in a phase")
        if kind not in KINDS:
            raise UsageError(f"log({name!r}, reduce={kind!r}): reduce is one of {', '.join(KINDS)}")
        if name in taken:
            raise UsageError(f"log({name!r}): this name is taken in the log: rename it")
        if self._kinds.setdefault(name, kind) != kind:
            raise UsageError(
                f"log({name!r}) is called with reduce={kind!r} and with "
                f"reduce={self._kinds[name]!r}: use one of them"
            )
        if len(self._kinds) > _ROWS:
            raise UsageError(f"log({name!r}) is the {_ROWS + 1}th name: log at most {_ROWS}")
        row = list(self._kinds).index(name)
        values = tf.stop_gradient(tf.cast(value, tf.float32))
        rows = self.variables[0].read_value()
        before, weight = rows[row, 0], rows[row, 1]
        size = tf.cast(tf.size(values), tf.float32)
        if kind in ("max", "last"):
            new = tf.reduce_max(values) if kind == "max" else tf.reduce_mean(values)
            if kind == "max":
                new = tf.where(weight > 0.0, tf.maximum(before, new), new)
            before = tf.where(size > 0.0, new, before)
            weight = tf.where(size > 0.0, 1.0, weight)
        else:
            before += tf.reduce_sum(values)
            weight += size
        self.variables[0].assign(tf.tensor_scatter_nd_update(rows, [[row]], [[before, weight]]))

    @property
    def names(self) -> list[str]:
        """What the steps log that were traced."""
        return list(self._kinds)

    def terms(self) -> tf.Tensor:
        """Returns one replica's terms for the sum over replicas, float32 [k]; clears its rows. k is
        0 if the traced graph logs nothing."""
        if not self._kinds:
            return tf.zeros([0])
        context = tf.distribute.get_replica_context()
        parts, me = context.num_replicas_in_sync, context.replica_id_in_sync_group
        rows, terms = self.variables[0].read_value(), []
        for row, kind in enumerate(self._kinds.values()):
            if kind in ("mean", "sum"):
                terms.append(rows[row])
                continue
            # A sum cannot carry a maximum, so each replica fills a separate place.
            places = parts if kind == "max" else 1
            mask = tf.equal(tf.range(places), me)[:, None]
            terms.append(tf.reshape(tf.where(mask, rows[row], 0.0), [-1]))
        self.variables[0].assign(tf.zeros_like(rows))
        return tf.concat(terms, axis=0)

    def collect_left(self, strategy: tf.distribute.Strategy, *others: Rows) -> None:
        """Collects what the steps of a failed call logged, see `collect`. All workers must call
        it."""
        if self._kinds:
            rows = tf.function(lambda: strategy.run(self.terms), autograph=False)()
            sums = strategy.reduce(SUM, rows, axis=None).numpy().tolist()
            self.collect(sums, strategy.num_replicas_in_sync, *others)

    def collect(self, sums: Sequence[float], parts: int, *others: Rows) -> None:
        """Adds the sums of `terms` over ``parts`` replicas to `rows`, and to ``others``."""
        sums = list(sums)
        for name, kind in self._kinds.items():
            places = parts if kind == "max" else 1
            if len(sums) < 2 * places:  # that graph did not log this name
                return
            pairs = [(sums.pop(0), sums.pop(0)) for _ in range(places)]
            for value, weight in pairs:
                if weight:
                    for rows in (self.rows, *others):
                        self._keep(rows, name, value, weight)

    def _keep(self, rows: Rows, name: str, value: float, weight: float) -> None:
        if name in rows:
            before, earlier = rows[name]
            if self._kinds[name] in ("mean", "sum"):
                value, weight = value + before, weight + earlier
            elif self._kinds[name] == "max":
                value = float(np.maximum(value, before))  # keeps a NaN
        rows[name] = value, weight

    def values(self, rows: Rows) -> dict[str, float]:
        """Returns the scalars that were logged in ``rows``, by name."""
        return {
            name: value / weight if self._kinds[name] == "mean" else value
            for name, (value, weight) in rows.items()
        }

    def reset(self) -> None:
        """Empties `rows`."""
        self.rows = {}
