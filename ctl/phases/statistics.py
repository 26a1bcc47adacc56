"""Moving statistics of BatchNorm: each replica updates its copy, then all are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ctl.distributed import local_batch, replicas


class StatisticsSnapshot(NamedTuple):
    """Values before the forward pass of a step, on one replica."""

    examples: int | tf.Tensor  # in the replica's part of the batch
    means: list[tf.Tensor]  # moving means, equal on all replicas
    undone: list[tf.Tensor]  # values to return to if the update is skipped


class Statistics:
    """Combines the statistics of the replicas, weighted by their numbers of examples.

    The mean of the variances within the replicas' parts is too small: it lacks the variance between
    the means of these parts. Their sum is the variance of the whole batch (law of total variance).
    Each replica shifts its moving mean by ``(1 - momentum)`` times the distance of its part's mean,
    so the variance between these shifts gives the variance between the means.

    Args:
        model: the model that trains. The moving variance of a BatchNorm layer that is one of
            ``own`` gets the variance between replicas, unless the layer has ``renorm``, which keeps
            standard deviations.
        own: see `ctl.TrainStep.replica_statistics`.
        strategy: the strategy of the step.
        plain: TensorFlow variables of the step.
        micro_batches: whether the forward pass sees a replica's part in pieces. The variance is
            then the one within these pieces, as on one replica.
        undoes: whether updates may be skipped.

    Attributes:
        combined: ``own``; empty if there is one replica.
        undone: variables to return to their values before the step if its update is skipped.
    """

    def __init__(
        self,
        model: keras.Model,
        own: Sequence[tf.Variable],
        strategy: tf.distribute.Strategy,
        *,
        plain: Sequence[tf.Variable],
        micro_batches: bool,
        undoes: bool,
    ):
        norms = replicas.training_norms(model)
        undone: list[tf.Variable] = []
        if undoes and not replicas.has_one_copy(strategy):  # else one replica cannot be undone
            state = [*replicas.statistics_of(norms), *replicas.other_state(model)]
            undone = [*own, *(v.value for v in state), *plain]
        self.undone = [*{id(variable): variable for variable in undone}.values()]
        self.combined = list(own) if strategy.num_replicas_in_sync > 1 else []
        index = {id(variable): i for i, variable in enumerate(self.combined)}
        # Per layer: index of the mean, index of the variance, and the layer.
        self._pairs = [
            (index[id(n.moving_mean.value)], index[id(n.moving_variance.value)], n)
            for n in ([] if micro_batches else norms)
            # Older versions of Keras have no renorm.
            if id(n.moving_variance.value) in index
            and n.momentum < 1.0
            and not getattr(n, "renorm", False)
        ]

    def specs(self) -> list[tf.Variable | tf.TensorSpec]:
        """Shapes and dtypes of `terms`, without the number of examples."""
        squares = [self.combined[variance] for _, variance, _ in self._pairs]
        return [*self.combined, *squares]

    def snapshot(self, batch: Any) -> StatisticsSnapshot:
        """Reads the values before the forward pass that the other methods need."""
        return StatisticsSnapshot(
            local_batch.rows(batch) if self.combined else 0,
            [_wide(self.combined[mean]) for mean, _, _ in self._pairs],
            [replicas.own_copy(variable).read_value() for variable in self.undone],
        )

    def terms(self, snapshot: StatisticsSnapshot) -> list[tf.Tensor]:
        """Returns the terms to sum over replicas after the forward pass: the statistics, with
        shifts in place of moving means; and the squares of these shifts. If the number of examples
        is not an integer, equal on every replica, it weights all terms and is the last of them."""
        if not self.combined:
            return []
        terms = [_wide(variable) for variable in self.combined]
        for (mean, _, _), old in zip(self._pairs, snapshot.means, strict=True):
            terms[mean] -= old
            terms.append(tf.square(terms[mean]))
        examples = snapshot.examples
        if isinstance(examples, int):
            return terms
        # A replica without examples adds 0, even if its statistics are NaN.
        terms = [tf.math.multiply_no_nan(term, tf.cast(examples, term.dtype)) for term in terms]
        return [*terms, tf.cast(examples, tf.float32)]

    def assign(self, sums: Sequence[tf.Tensor], snapshot: StatisticsSnapshot, parts: int) -> None:
        """Assigns the combined statistics. ``sums`` are of `terms` over all ``parts`` replicas."""
        if not self.combined:
            return
        *sums, weight = [*sums, parts] if isinstance(snapshot.examples, int) else sums
        values = [total / tf.cast(weight, total.dtype) for total in sums]
        squares = values[len(self.combined) :]
        for (mean, variance, norm), old, square in zip(
            self._pairs, snapshot.means, squares, strict=True
        ):
            between = tf.maximum(square - tf.square(values[mean]), 0.0)
            values[variance] += tf.cast(between / (1.0 - norm.momentum), values[variance].dtype)
            values[mean] += old
        for variable, value in zip(self.combined, values, strict=False):
            variable.assign(tf.cast(value, variable.dtype))

    def undo_unless(self, finite: tf.Tensor, snapshot: StatisticsSnapshot) -> None:
        """Restores the variables of ``undone`` unless ``finite``, a bool scalar."""
        # Each replica restores its own copy: some variables combine assigned values over replicas.
        copies = [replicas.own_copy(variable) for variable in self.undone]
        for copy, old in zip(copies, snapshot.undone, strict=True):
            copy.assign(tf.where(finite, copy.read_value(), old))


def _wide(variable: tf.Variable) -> tf.Tensor:
    return local_batch.widened(variable.read_value())
