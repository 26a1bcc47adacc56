"""Gathers of tensors of all replicas, and how many steps a call with them may run."""

from __future__ import annotations

import weakref

import tensorflow as tf

_ON_ONE_DEVICE = (
    tf.distribute.ReductionToOneDevice,
    tf.distribute.NcclAllReduce,
    tf.distribute.HierarchicalCopyAllReduce,
)

_gathering: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def gather(
    part: tf.Tensor, options: tf.distribute.experimental.CommunicationOptions | None
) -> tf.Tensor:
    """Returns the ``part`` of every replica, [n, ...], one after the other. n may differ. Call it
    in replica context."""
    context = tf.distribute.get_replica_context()
    _gathering.add(context.strategy)
    return context.all_gather(part, axis=0, options=options)


def by_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Whether TensorFlow's collectives gather tensors of the replicas of ``strategy``."""
    operation = getattr(strategy.extended, "_cross_device_ops", None)
    return strategy.num_replicas_in_sync > 1 and not isinstance(operation, _ON_ONE_DEVICE)


def one_step_per_call(strategy: tf.distribute.Strategy) -> bool:
    """Whether a call from Python may run one step only: a step on ``strategy`` was traced, and it
    gathers by TensorFlow's collectives, each of which keeps the shape of its first run in a call.
    """
    return strategy in _gathering and by_collectives(strategy)
