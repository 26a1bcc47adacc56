"""What the replicas of a step draw with `ctl.TrainStep.seed`."""

from __future__ import annotations

import tensorflow as tf

from ctl.phases.seeds import Seeds


def replica_seeds(random_seed: int, salt: str, step: int, replicas: int) -> list[tf.Tensor]:
    """The seed of each replica."""
    seeds, made = Seeds(random_seed), []
    for replica in range(replicas):
        with seeds.inside(tf.constant([replica, 0])):
            made.append(seeds.make(salt, tf.constant(step, tf.int64), True))
    return made


def replica_noise(
    random_seed: int, salt: str, step: int, replicas: int, batch_size: int, *shape: int
) -> tf.Tensor:
    """``tf.random.stateless_normal`` of each replica, float32 [batch_size, *shape], in the order of
    the examples of a global batch."""
    seeds = replica_seeds(random_seed, salt, step, replicas)
    each = [batch_size // replicas, *shape]
    return tf.concat([tf.random.stateless_normal(each, seed) for seed in seeds], axis=0)
