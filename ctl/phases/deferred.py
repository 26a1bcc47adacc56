"""Rows of an embedding table that a batch does not look up, brought up to date when they are read.

Most optimizers move a row in every step, also without a gradient: its momentum moves it on, and
weight decay shrinks it. `Deferred` leaves such a row as it is, and makes up for the updates that it
has missed when it is next read. The numbers are those of the dense update, up to rounding.

In an update without a gradient, each slot of a row is multiplied by a factor, and the row moves by
a sum of terms: a coefficient, which depends on the update and on how many the row has missed, times
a tensor that depends on the slots as they were. The coefficients are added up once for all rows
that had their last update together. With Ftrl, a row is a function of its slots and the last rate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ctl.base.tf_internals import copy_here
from ctl.distributed.watch import watchdog
from ctl.errors import CheckpointError, UsageError
from ctl.phases.optimizers import is_decayed, is_plain, read_rows, write_rows

# After this many updates, all rows are brought up to date, which takes the time of a dense update.
HISTORY = 4096
_ROWS_AT_A_TIME = 1 << 16
_ERROR = 1e-8  # relative, of the moves of Adam and of those that are left out


class Rule(NamedTuple):
    """How rows without a gradient move.

    Attributes:
        factors: what a step multiplies each slot by, by the slot's name.
        terms: number of terms.
        coefficients: ``(rate, update, missed) -> [m, terms]``: of the move in ``update`` (1 is the
            first), of rows that have missed ``missed`` [m] updates with it; all float64.
        moved: ``(row, slots, sums) -> row``: adds the terms to a row whose slots are those of its
            last update. ``sums`` are those of the coefficients, a list of ``terms`` tensors.
        fade: factor by which coefficients fall, at least, with each update that is missed.
        decay: ``weight_decay``, 0 for none.
        keeps: whether sums go on from one update to the next.
    """

    factors: Mapping[str, float]
    terms: int
    coefficients: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
    moved: Callable[[tf.Tensor, Mapping[str, tf.Tensor], list[tf.Tensor]], tf.Tensor]
    fade: float
    decay: float = 0.0
    keeps: bool = True


_STILL = Rule({}, 0, lambda rate, update, missed: tf.zeros([0]), lambda row, slots, sums: row, 0.0)


def rule_of(optimizer: keras.optimizers.Optimizer, table: keras.Variable) -> Rule | str | None:
    """Returns how ``optimizer`` moves rows of ``table`` that have no gradient; None if it does not;
    or why these moves cannot be deferred."""
    name, rule = type(optimizer).__name__, _STILL
    if not is_plain(optimizer):
        return f"{name} is not an optimizer of Keras"
    decay = float(optimizer.weight_decay) if is_decayed(optimizer, table) else 0.0
    if name == "SGD" and optimizer.momentum:
        momentum = float(optimizer.momentum)
        rule = _momentum("momentums", momentum, momentum if optimizer.nesterov else 1.0)
    elif name == "RMSprop":
        if optimizer.momentum:
            rule = _momentum("_momentums", float(optimizer.momentum), -1.0)
        averages = ["_velocities", *(["_average_gradients"] if optimizer.centered else [])]
        factors = dict.fromkeys(averages, float(optimizer.rho))
        rule = rule._replace(factors={**rule.factors, **factors})
    elif name in ("Adam", "AdamW"):
        found = _adam(optimizer, tf.as_dtype(table.dtype))
        if isinstance(found, str):
            return found
        rule = found
    elif name == "Ftrl":
        if optimizer.l2_shrinkage_regularization_strength or decay:
            return "its l2_shrinkage or weight_decay takes all rows"
        rule = _ftrl(optimizer)
    elif name not in ("SGD", "Adagrad"):
        return f"{name} moves rows that have no gradient"
    if rule.fade >= 1.0:
        return f"a momentum of {rule.fade:g} does not fade"
    if not rule.factors and not rule.terms and not decay:
        return None
    if table.dtype not in ("float32", "float64"):
        return f"its type is {table.dtype}"
    return rule._replace(decay=decay)


def why_not_lazy(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Why ``optimizer`` cannot leave alone the rows without a gradient, and their slots; None if it
    can."""
    kinds = ("SGD", "Adagrad", "RMSprop", "Adam", "AdamW", "Ftrl")
    if is_plain(optimizer) and type(optimizer).__name__ in kinds:
        return None
    return f"{type(optimizer).__name__} is none of {', '.join(kinds)} of Keras"


_SETTINGS = (
    *("momentum", "nesterov", "centered", "rho", "beta_1", "beta_2", "epsilon", "amsgrad"),
    *("l1_regularization_strength", "l2_regularization_strength", "learning_rate_power", "beta"),
    *("l2_shrinkage_regularization_strength", "weight_decay"),
)


def _settings_of(optimizer: keras.optimizers.Optimizer, table: keras.Variable) -> dict[str, Any]:
    """What a rule depends on and a user may change."""
    found = {name: getattr(optimizer, name) for name in _SETTINGS if hasattr(optimizer, name)}
    return {**found, "decays it": is_decayed(optimizer, table)}


def _momentum(slot: str, momentum: float, sign: float) -> Rule:
    """Each update multiplies ``slot`` by ``momentum``, then adds it, times ``sign``, to the row."""

    def coefficients(rate: tf.Tensor, update: tf.Tensor, missed: tf.Tensor) -> tf.Tensor:
        return sign * tf.pow(tf.constant(momentum, tf.float64), missed)[:, tf.newaxis]

    def moved(row: tf.Tensor, slots: Mapping[str, tf.Tensor], sums: list[tf.Tensor]) -> tf.Tensor:
        return row + sums[0] * slots[slot]

    return Rule({slot: momentum}, 1, coefficients, moved, momentum)


def _ftrl(optimizer: Any) -> Rule:
    """The rule of Ftrl (McMahan et al. 2013, "Ad click prediction: a view from the trenches",
    algorithm 1). Its "sum" is the last rate, or 0 if none was missed."""
    l1 = float(optimizer.l1_regularization_strength)
    l2, beta = float(optimizer.l2_regularization_strength), float(optimizer.beta)
    power = -float(optimizer.learning_rate_power)

    def coefficients(rate: tf.Tensor, update: tf.Tensor, missed: tf.Tensor) -> tf.Tensor:
        return tf.fill([tf.size(missed), 1], rate)

    def moved(row: tf.Tensor, slots: Mapping[str, tf.Tensor], sums: list[tf.Tensor]) -> tf.Tensor:
        total, linear, rate = slots["_accumulators"], slots["_linears"], sums[0]
        short = tf.clip_by_value(linear, -l1, l1) - linear
        return tf.where(rate > 0, short * rate / (total**power + beta + 2.0 * l2 * rate), row)

    return Rule({}, 1, coefficients, moved, 1.0 - 1e-9, keeps=False)


def _adam(optimizer: Any, dtype: tf.DType) -> Rule | str:
    """The rule of Adam (Kingma and Ba 2015, arXiv:1412.6980) as Keras has it, or why it has none.

    In the i-th update that it misses, a row moves by ``-alpha b1^i m / (sqrt(b2^i v) + epsilon)``.
    With ``d = sqrt(v) + epsilon``, ``y = sqrt(v) / d`` and ``e = 1 - sqrt(b2^i)``, this is
    ``-alpha b1^i (m / d) / (1 - e y)``, where ``1 / (1 - e y)`` is the sum of ``(e y)^k`` over all
    k. A few of them are enough, because b1^i is small where e is not.
    """
    b1, b2, epsilon = (float(x) for x in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon))
    if optimizer.amsgrad:
        return "amsgrad keeps a maximum"
    if not 0.0 < b1 < math.sqrt(b2) < 1.0 or epsilon <= 0.0:
        return f"its moves do not fade with beta_1={b1:g}, beta_2={b2:g}, epsilon={epsilon:g}"
    missed = np.arange(1.0, math.log(1e-18) / math.log(b1))
    fading, short = b1**missed, 1.0 - b2 ** (missed / 2.0)
    errors = [(fading * short**k / (1.0 - short)).sum() / fading.sum() for k in range(32)]
    terms = next((k for k, error in enumerate(errors) if error < _ERROR), None)
    if terms is None:
        return f"its moves fade slowly with beta_1={b1:g}, beta_2={b2:g}"

    def coefficients(rate: tf.Tensor, update: tf.Tensor, missed: tf.Tensor) -> tf.Tensor:
        one, two = tf.constant(b1, dtype), tf.constant(b2, dtype)
        rate, update = tf.cast(rate, dtype), tf.cast(update, dtype)
        alpha = rate * tf.sqrt(1.0 - two**update) / (1.0 - one**update)  # rounded as by Keras
        alpha, missed = tf.cast(alpha, tf.float64), missed[:, tf.newaxis]
        one, two = tf.constant(b1, tf.float64), tf.constant(b2, tf.float64)
        powers = (1.0 - two ** (missed / 2.0)) ** tf.range(terms, dtype=tf.float64)
        return -alpha * one**missed * powers

    def moved(row: tf.Tensor, slots: Mapping[str, tf.Tensor], sums: list[tf.Tensor]) -> tf.Tensor:
        root = tf.sqrt(slots["_velocities"])
        ratio, total = root / (root + epsilon), sums[-1]
        for one in reversed(sums[:-1]):
            total = one + ratio * total
        return row + total * slots["_momentums"] / (root + epsilon)

    return Rule({"_momentums": b1, "_velocities": b2}, terms, coefficients, moved, b1)


class Deferred:
    """The updates that each row of a table has missed. Create it in the strategy's scope.

    Args:
        table: [n, d], in float32 or float64.
        optimizer: the table's, which is built.
        rule: how it moves rows without a gradient.
        strategy: that of the scope.

    Attributes:
        table: the table.
        updates: number of updates since all rows were up to date, int32 scalar.
        last: of each row, by which of them it was last brought up to date, int32 [n].
        variables: what a checkpoint holds beside the table and its slots.
    """

    def __init__(
        self,
        table: keras.Variable,
        optimizer: keras.optimizers.Optimizer,
        rule: Rule,
        strategy: tf.distribute.Strategy,
    ):
        self.table, self._optimizer, self._rule = table, optimizer, rule
        self._strategy, self._rows = strategy, table.shape[0]
        self._settings = _settings_of(optimizer, table)
        # Updates since all rows were up to date; of each row, which of them was its last.
        self.updates = self._variable("updates", tf.zeros([], tf.int32))
        self.last = self._variable("last", tf.zeros(table.shape[:1], tf.int32))
        # For rows whose last update was the i-th: what decay has left of the row, and the sums of
        # the coefficients.
        self._history = self._variable("history", self._nothing_missed())
        # Those of the rule, by which a checkpoint of other ones is known.
        constants = [float(value or 0) for value in self._settings.values()]
        self._constants = self._variable("settings", tf.constant(constants, tf.float64))
        self.variables = [self.updates, self.last, self._history, self._constants]

    def check(self) -> None:
        """Raises `UsageError` if the optimizer has other settings than the rule."""
        for name, now in _settings_of(self._optimizer, self.table).items():
            if now != (before := self._settings[name]):
                raise UsageError(
                    f"{type(self._optimizer).__name__}.{name} was changed from {before} to {now}, "
                    f"and {self.table.path} is trained by rows: leave sparse_rows=on out "
                    "(--sparse_rows=on)"
                )

    def check_restored(self) -> None:
        """Raises `CheckpointError` if the checkpoint that was restored is of another rule."""
        saved = self._constants.numpy()
        for (name, now), before in zip(self._settings.items(), saved, strict=True):
            if before != float(now or 0):
                raise CheckpointError(
                    f"the checkpoint was saved with {type(self._optimizer).__name__}({name}="
                    f"{before:g}), which is {now} now, and {self.table.path} is trained by rows: "
                    "resume it with the same optimizer"
                )

    def _variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return tf.Variable(
            value, trainable=False, aggregation=aggregation, name=f"{self.table.name}_{name}"
        )

    def _nothing_missed(self) -> tf.Tensor:
        return tf.one_hot([0] * HISTORY, 1 + self._rule.terms, dtype=tf.float64)

    def read(self, numbers: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns rows ``numbers`` [m] of the table, and of its slots by name, up to date."""
        row, slots = read_rows(self.table, self._optimizer, numbers)
        last = copy_here(self.last).sparse_read(numbers)
        history = tf.cast(copy_here(self._history).sparse_read(last), row.dtype)
        kept, *sums = tf.split(history, 1 + self._rule.terms, axis=1)  # each [m, 1]
        row = self._rule.moved(kept * row, slots, sums)
        missed = tf.cast(self.updates - last, tf.float64)[:, tf.newaxis]
        for name, factor in self._rule.factors.items():
            left = tf.pow(tf.constant(factor, tf.float64), missed)
            slots[name] *= tf.cast(left, row.dtype)
        return row, slots

    def make_room(self) -> int:
        """Brings all rows up to date if the history has no room for another update. Returns for how
        many it has room. Call it outside of a graph."""
        updates = int(self.updates.numpy())
        if updates + 1 < HISTORY:
            return HISTORY - 1 - updates
        self.bring_up_to_date()
        return HISTORY - 1

    def note_update(self, numbers: tf.Tensor, rate: tf.Tensor) -> None:
        """Notes that rows ``numbers``, which were up to date, were updated, and that all others
        have missed it. Call it in an update context.

        Args:
            numbers: int64 [m], none of them twice.
            rate: learning rate of the update, scalar.
        """
        rule, rate = self._rule, tf.cast(rate, tf.float64)
        update = tf.cast(self._optimizer.iterations.value + 1, tf.float64)
        updates, history = self.updates + 1, copy_here(self._history)
        rows = history.read_value()[:updates] * (1.0 - rule.decay * rate)
        rows *= 1.0 if rule.keeps else tf.one_hot(0, 1 + rule.terms, dtype=tf.float64)
        # Coefficients of rows that have missed more are below rounding.
        most = math.log(_ERROR * _ERROR) / math.log(rule.fade) if rule.terms else 0
        most = min(math.ceil(most), HISTORY)
        missed = tf.range(tf.minimum(updates, most), 0, -1)
        if rule.terms:
            more = rule.coefficients(rate, update, tf.cast(missed, tf.float64))
            rows += tf.pad(more, [[updates - tf.size(missed), 0], [1, 0]])
        history.scatter_update(tf.IndexedSlices(rows, tf.range(updates)))
        last = tf.fill(tf.shape(numbers), updates)
        copy_here(self.last).scatter_update(tf.IndexedSlices(last, numbers))
        self.updates.assign(updates)

    def reset(self) -> None:
        """Notes that all rows are up to date."""
        self.last.assign(tf.zeros_like(self.last))
        self._history.assign(self._nothing_missed())
        self.updates.assign(0)

    def _bring_all(self) -> None:
        """Brings all rows up to date, some at a time."""

        def some(first: tf.Tensor) -> tuple[tf.Tensor]:
            numbers = self._numbers(first)
            write_rows(self.table, self._optimizer, numbers, *self.read(numbers))
            return (first + _ROWS_AT_A_TIME,)

        tf.while_loop(
            lambda first: first < self._rows, some, [tf.constant(0)], parallel_iterations=1
        )
        self.reset()

    def _numbers(self, first: Any) -> tf.Tensor:
        return tf.range(first, tf.minimum(first + _ROWS_AT_A_TIME, self._rows))

    def value(self) -> tf.Tensor:
        """Returns the whole table, up to date; writes nothing."""
        if not tf.executing_eagerly():
            return self.read(tf.range(self._rows))[0]
        firsts = range(0, self._rows, _ROWS_AT_A_TIME)
        return tf.concat([self.read(self._numbers(first))[0] for first in firsts], axis=0)

    def bring_up_to_date(self) -> None:
        """Brings all rows up to date. Call it outside of a graph, before another value is assigned
        to the table."""
        if int(self.updates.numpy()):
            with watchdog.host("the rows of an embedding table"), self._strategy.scope():
                self._bring()

    @functools.cached_property
    def _bring(self) -> Callable[[], None]:
        @tf.function(autograph=False)
        def bring() -> None:
            self._strategy.extended.update(
                self.table.value, lambda _: self._bring_all(), group=False
            )

        return bring
