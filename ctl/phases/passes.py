"""Helpers for multi-pass steps: passes without side effects, temporary weight changes.

SAM (Foret et al. 2021, arXiv:2010.01412) is such a step::

    class SAM(ctl.TrainStep):
        def forward_backward(self, batch, count):
            with passes.state_kept(self):
                _, gradients = super().forward_backward(batch, count)
            gradients = passes.reduced(self, gradients, count)
            scale = 0.05 / (global_norm(gradients) + 1e-12)
            moves = [None if g is None else scale * tf.cast(g, scale.dtype) for g in gradients]
            with passes.perturbed(self, moves):
                return super().forward_backward(batch, count)

Without `reduced`, each replica moves its weights along its own gradient (m-sharpness, section 4.1).
N replicas then do not equal one. Passes may accumulate gradients or be compiled by XLA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ctl.distributed import local_batch, replicas
from ctl.errors import UsageError
from ctl.reduce import all_reduce

# By this scope, `ctl.phases.plan` recognizes gradients that are not applied.
SCOPE = "ctl_passes"


@contextlib.contextmanager
def state_kept(step: Any) -> Iterator[None]:
    """Restores, bit for bit, the state that a pass inside changes: metrics, logged scalars,
    statistics, seeds and other state of the step. A second pass therefore draws the same Dropout
    masks. Call it in replica context.

    Use it around `TrainStep.forward_backward`, not inside code that it compiles or repeats.

    Args:
        step: a built `ctl.TrainStep`.

    Raises:
        UsageError: replicas share one copy of every variable.
    """
    changed = [v.value for v in step.model.non_trainable_variables]
    changed += [v.value for m in step.all_metrics() for v in m.variables]
    of_replicas = [*step.per_replica_variables.variables, *step.logged.variables]
    with _returned(step, [*changed, *step.tracked.extra_variables, *of_replicas]):
        yield


@contextlib.contextmanager
def perturbed(step: Any, moves: Sequence[tf.Tensor | None]) -> Iterator[None]:
    """Moves this replica's trainable weights while inside, then restores them bit for bit. Use it
    like `state_kept`.

    Args:
        step: a built `ctl.TrainStep`.
        moves: what to add: one tensor or None per trainable variable.

    Raises:
        UsageError: replicas share one copy of every variable, or the number of moves is wrong.
    """
    count = len(step.trainable_variables)
    if len(moves) != count:
        raise UsageError(
            f"perturbed() was given {len(moves)} moves for {count} trainable variables: "
            "give one for each, None where there is none"
        )
    with _returned(step, step.trainable_variables) as copies:
        with tf.name_scope(SCOPE):
            for variable, move in zip(copies, moves, strict=True):
                if move is not None:
                    variable.assign(variable.read_value() + tf.cast(move, variable.dtype))
        yield


def reduced(step: Any, gradients: Sequence[tf.Tensor | None], count: Any) -> list:
    """Returns gradients of the mean loss of the global batch, equal on all replicas; None stays
    None.

    It uses a separate all-reduce, not `TrainStep.sum_gradients`.

    Args:
        step: a built `ctl.TrainStep`.
        gradients: as returned by `TrainStep.forward_backward` with this ``count``.
        count: as returned by `TrainStep.count`.
    """
    dense = [g for g in gradients if g is not None]
    counted = [] if isinstance(count, int) else [tf.cast(count, tf.float32)]
    sums = all_reduce([*dense, *counted], options=step.options, scope=SCOPE)
    divisor: Any = 1.0
    if counted:
        divisor = local_batch.or_one(sums.pop())
    if step.updater.loss_scale:
        divisor *= step.updater.loss_scale.scale
    left = iter(sums)
    return [None if g is None else (s := next(left)) / tf.cast(divisor, s.dtype) for g in gradients]


@contextlib.contextmanager
def _returned(step: Any, variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Yields this replica's copies of ``variables``, then restores their saved values. Subtracting
    a move would round."""
    if replicas.has_one_copy(step.strategy):
        raise UsageError(
            "replicas that share one copy of every variable, as with central_storage or "
            "parameter_server, cannot make two passes: use mirrored"
        )
    # Not the variables themselves: some combine assigned values over replicas.
    copies = [replicas.own_copy(variable) for variable in variables]
    before = [variable.read_value() for variable in copies]
    yield copies
    for variable, old in zip(copies, before, strict=True):
        variable.assign(old)
