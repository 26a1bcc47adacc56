"""Several forward and backward passes in one step: gradients without a trace, weights moved and
returned.

For methods that look before they step, such as SAM (Foret et al. 2021, arXiv:2010.01412)::

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
N replicas then do not equal one. The passes may be accumulated or compiled by XLA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ctl.distributed import local_batch, replicas
from ctl.errors import UsageError
from ctl.reduce import all_reduce

# `ctl.phases.plan` knows by this scope that a gradient is not applied.
SCOPE = "ctl_passes"


@contextlib.contextmanager
def state_kept(step: Any) -> Iterator[None]:
    """While inside, in replica context, a pass leaves no trace: metrics, scalars, statistics, seeds
    and what else the step has of its own end with the bits that they began with. A second pass
    draws the same Dropout masks as the first.

    Use it around `TrainStep.forward_backward`, not within what that compiles or repeats.

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
    """While inside, in replica context, this replica's trainable weights are moved. They end with
    the bits that they began with. Use it like `state_kept`.

    Args:
        step: a built `ctl.TrainStep`.
        moves: what to add, one tensor or None for each gradient of the step.

    Raises:
        UsageError: replicas share one copy of every variable, or there is not one move for each.
    """
    count = len(step.trainable_variables)
    if len(moves) != count:
        raise UsageError(
            f"perturbed() was given {len(moves)} moves for {count} trainable variables: "
            "give one for each, None where there is none"
        )
    with _returned(step, step.trainable_variables) as mine:
        with tf.name_scope(SCOPE):
            for variable, move in zip(mine, moves, strict=True):
                if move is not None:
                    variable.assign(variable.read_value() + tf.cast(move, variable.dtype))
        yield


def reduced(step: Any, gradients: Sequence[tf.Tensor | None], count: Any) -> list:
    """Gradients of the mean loss of the global batch, equal on all replicas; None stays None.

    It has a collective of its own, which is not `TrainStep.sum_gradients`.

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
    """Returns this replica's copies of ``variables`` to their values when the context ends. Their
    sums and differences would round; the values themselves do not."""
    if replicas.has_one_copy(step.strategy):
        raise UsageError(
            "replicas that share one copy of every variable, as with central_storage or "
            "parameter_server, cannot make two passes: use mirrored"
        )
    # Not the variables themselves: some combine over replicas what is assigned to them.
    mine = [replicas.own_copy(variable) for variable in variables]
    before = [variable.read_value() for variable in mine]
    yield mine
    for variable, old in zip(mine, before, strict=True):
        variable.assign(old)
