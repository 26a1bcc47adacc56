"""What the replicas of a step draw with ``tf.random.stateless_normal`` and `ctl.TrainStep.seed`."""

from __future__ import annotations

import tensorflow as tf

from ctl.seeds import Seeds


def replica_noise(
    random_seed: int, salt: str, step: int, replicas: int, batch_size: int, size: int
) -> tf.Tensor:
    """float32 [batch_size, size], in the order of the examples of a global batch."""
    seeds, parts = Seeds(random_seed), []
    for replica in range(replicas):
        with seeds.inside(tf.constant([replica, 0])):
            seed = seeds.make(salt, tf.constant(step, tf.int64), True)
        parts.append(tf.random.stateless_normal([batch_size // replicas, size], seed))
    return tf.concat(parts, axis=0)
