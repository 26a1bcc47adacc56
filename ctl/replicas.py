"""The only place that knows which variables replicas share, and which each keeps for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from ctl.errors import UsageError

# Dropout in Keras draws the same mask on every replica: its seed is mirrored. A prime step between
# the seeds of neighbouring replicas keeps them apart.
_SEED_STRIDE = 7919


def shares_variables(strategy: tf.distribute.Strategy) -> bool:
    """Whether several replicas have one copy of every variable."""
    central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    return central and strategy.num_replicas_in_sync > 1


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Whether it is TensorFlow's own strategy, which knows no devices."""
    with strategy.scope():
        return not tf.distribute.has_strategy()


def is_alone(strategy: tf.distribute.Strategy) -> bool:
    """Whether there is one replica, in a strategy that runs it like any other function: it can be
    one compiled function then, from the batch to the update."""
    return isinstance(strategy, tf.distribute.OneDeviceStrategy) or is_default(strategy)


def has_one_device(strategy: tf.distribute.Strategy) -> bool:
    """Whether one replica runs in this process."""
    return is_default(strategy) or len(strategy.extended.worker_devices) == 1


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Its layers, nested ones too."""
    return list(model._flatten_layers())  # Keras has no public way into nested layers


def check_central_storage(
    strategy: tf.distribute.Strategy, model: keras.Model, accumulate_steps: int, jit_compile: bool
) -> None:
    """Raises `UsageError` where replicas share one copy of every variable, for what TensorFlow
    cannot do then: update variables in the forward pass, in a loop, or read them under XLA."""
    if not shares_variables(strategy):
        return
    if accumulate_steps > 1 or jit_compile:
        raise UsageError(
            "central_storage with several replicas has neither --accumulate_steps nor "
            "--jit_compile; use mirrored"
        )
    for layer in layers_of(model):
        norm = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        if norm or hasattr(layer, "seed_generator"):
            raise UsageError(
                f"layer {layer.name} ({type(layer).__name__}) updates variables in the forward "
                "pass, which central_storage with several replicas cannot; use mirrored"
            )


def _training_norms(model: keras.Model, synchronized: bool) -> list[keras.Layer]:
    return [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and layer.synchronized == synchronized
    ]


def batch_norm_statistics(model: keras.Model) -> list[tf.Variable]:
    """The moving statistics that each replica updates with its own part of the batch: those of
    BatchNorm layers that train and are not synchronized."""
    return [
        statistic.value
        for layer in _training_norms(model, synchronized=False)
        for statistic in (layer.moving_mean, layer.moving_variance)
    ]


def synchronizes(model: keras.Model) -> bool:
    """Whether a BatchNorm layer that trains normalizes over the batches of all replicas."""
    return bool(_training_norms(model, synchronized=True))


def dropout_seeds(model: keras.Model) -> list[tf.Variable]:
    """The states of the model's seed generators, integers [2]: the seed, and the number of masks
    that were drawn."""
    variables = model.non_trainable_variables
    return [v.value for v in variables if v.path.endswith("seed_generator_state")]


@contextlib.contextmanager
def drawing_alike(model: keras.Model, parts: int | tf.Tensor, most: int) -> Iterator[None]:
    """Inside, call ``model`` ``parts`` times, which must be at most ``most``. Afterwards its seeds
    are as if it had been called ``most`` times. So the seeds of all replicas stay in step, and
    after a restore `offset_dropout_seeds` can tell them from those of replica 0."""
    seeds = [] if isinstance(parts, int) else dropout_seeds(model)
    before = [seed.read_value() for seed in seeds]
    yield
    for seed, old in zip(seeds, before, strict=True):
        drawn = (seed.read_value() - old) // tf.cast(parts, seed.dtype)
        seed.assign(old + drawn * tf.cast(most, seed.dtype))


def offset_dropout_seeds(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Gives each replica seeds of its own, out of replica 0's."""
    seeds = dropout_seeds(model)

    def shift() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for seed in seeds:
            seed.assign_add(tf.cast([_SEED_STRIDE, 0], seed.dtype) * tf.cast(replica, seed.dtype))

    if seeds and strategy.num_replicas_in_sync > 1:
        for seed in seeds:
            seed.assign(seed.read_value())  # replica 0's, on all
        tf.function(lambda: strategy.run(shift))()  # eager, TensorFlow would warn
