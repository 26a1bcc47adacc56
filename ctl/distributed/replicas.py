"""Which variables the replicas of a strategy share, and which differ between replicas."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ctl.base import names
from ctl.base.models import layers_of
from ctl.distributed import local_batch
from ctl.errors import UsageError

# Keras mirrors the seed of Dropout, so all replicas would draw the same mask. The seeds of
# neighbouring replicas therefore differ by this prime number.
_SEED_STRIDE = 7919


def shares_variables(strategy: tf.distribute.Strategy) -> bool:
    """Whether several replicas share one copy of every variable."""
    central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    return central and strategy.num_replicas_in_sync > 1


def is_asynchronous(strategy: tf.distribute.Strategy) -> bool:
    """Whether workers update variables of parameter servers, and do not wait for each other."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def has_one_copy(strategy: tf.distribute.Strategy) -> bool:
    """Whether there is one copy of every variable, which several devices or workers update."""
    return is_asynchronous(strategy) or shares_variables(strategy)


def is_default(strategy: tf.distribute.Strategy) -> bool:
    """Whether ``strategy`` is TensorFlow's default strategy, which has no devices of its own."""
    with strategy.scope():
        return not tf.distribute.has_strategy()


def is_alone(strategy: tf.distribute.Strategy) -> bool:
    """Whether there is one replica and the strategy runs it like a plain function. XLA can then
    compile the whole step as one function."""
    return isinstance(strategy, tf.distribute.OneDeviceStrategy) or is_default(strategy)


def devices_of(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The devices of the replicas of this process; of the default strategy, that of TensorFlow."""
    if is_default(strategy):
        return (tf.zeros([]).device,)
    return tuple(strategy.extended.worker_devices)


def has_one_device(strategy: tf.distribute.Strategy) -> bool:
    """Whether one replica runs in this process."""
    return len(devices_of(strategy)) == 1


def number() -> int:
    """The number of this replica, in replica context."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return int(tf.get_static_value(number))  # a tensor if there is one replica


def own_copy(variable: tf.Variable) -> tf.Variable:
    """This replica's copy of ``variable``, in replica context."""
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return copies[number() % len(copies)]


def assign_alike(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns ``value`` outside of ``strategy.run``, like ``variable.assign``, but without a
    collective: ``assign`` reads a variable that is synchronized on read from all workers."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    if not on_read or not isinstance(variable, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    strategy = variable.distribute_strategy
    if variable.aggregation == tf.VariableAggregation.SUM:  # each replica holds a share of the sum
        value /= strategy.num_replicas_in_sync
    for copy in strategy.experimental_local_results(variable):
        copy.assign(tf.cast(value, copy.dtype))


def check_reads(strategy: tf.distribute.Strategy, variables: Iterable[tf.Variable]) -> None:
    """Raises `UsageError` if, with several workers, TensorFlow reduces one of ``variables`` over
    all workers when it is read. The chief alone reads it, to save it."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    reduced = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
    for variable in variables:
        on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
        if on_read and variable.aggregation in reduced:
            raise UsageError(
                f"variable {variable.name} is synchronized on read: reading it waits for all "
                "workers, but only the chief saves it; create it without synchronization=, or with "
                "step.variable()"
            )


def numbered(parts: Iterable[Any], name: str = "name") -> list[tuple[str, Any]]:
    """Gives each of ``parts`` its attribute ``name`` as it is in every process: without the numbers
    of Keras, which counts layers that a process makes; the second ``dense`` is ``dense#2``."""
    parts = list(parts)
    plain = (re.sub(r"_\d+(?=/|$)", "", getattr(part, name)) for part in parts)
    return list(zip(names.numbered(plain), parts, strict=True))


def check_central_storage(
    strategy: tf.distribute.Strategy, model: keras.Model, accumulate_steps: int, jit_compile: bool
) -> None:
    """Raises `UsageError` if replicas share one copy of every variable and the step needs what
    TensorFlow cannot do then: update variables in the forward pass or in a loop, or read them under
    XLA."""
    if not shares_variables(strategy):
        return
    if accumulate_steps > 1 or jit_compile:
        raise UsageError(
            "central_storage with several replicas supports neither --accumulate_steps nor "
            "--jit_compile: use mirrored"
        )
    for layer in layers_of(model):
        norm = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        if norm or draws(layer):
            raise UsageError(
                f"layer {layer.name} ({type(layer).__name__}) updates variables in the forward "
                "pass, which central_storage with several replicas cannot; use mirrored"
            )


def check_sums(strategy: tf.distribute.Strategy) -> None:
    """Raises `UsageError` if TensorFlow would sum the replicas wrongly: its hierarchical copy cuts
    them into two halves, and counts the middle one of an odd number twice or never."""
    operation = getattr(strategy.extended, "_cross_device_ops", None)
    count = strategy.num_replicas_in_sync
    if count > 1 and count % 2 and isinstance(operation, tf.distribute.HierarchicalCopyAllReduce):
        raise UsageError(
            f"hierarchical_copy sums {count} replicas wrongly, as any odd number: use "
            "reduction_to_one_device, or an even number"
        )


def draws(layer: keras.Layer) -> bool:
    """Whether a layer of Keras draws random numbers in training. Cells of GRU, LSTM and SimpleRNN
    have a seed generator even if they drop nothing."""
    rates = [getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")]
    return hasattr(layer, "seed_generator") and (None in rates or any(rates))


def training_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """BatchNorm layers that update their statistics in the forward pass: those not frozen."""
    kind = keras.layers.BatchNormalization
    return [layer for layer in layers_of(model) if isinstance(layer, kind) and layer.trainable]


def statistics_of(norms: Iterable[keras.layers.BatchNormalization]) -> list[keras.Variable]:
    """Moving statistics of ``norms``, including the statistics of ``renorm``."""
    return [variable for norm in norms for variable in norm.non_trainable_variables]


def average_like(variable: keras.Variable) -> tf.Variable:
    """Returns a variable for the moving average of ``variable``, with its current value, in float32
    at least."""
    value = variable.value
    name = value.name.removesuffix(":0")
    return tf.Variable(local_batch.widened(value), trainable=False, name=name)


def synchronizes(strategy: tf.distribute.Strategy, model: keras.Model) -> bool:
    """Whether there are several replicas, and a BatchNorm layer that trains normalizes over all of
    them."""
    several = strategy.num_replicas_in_sync > 1
    return several and any(norm.synchronized for norm in training_norms(model))


def check_synchronized(
    strategy: tf.distribute.Strategy, model: keras.Model, accumulate_steps: int, jit_compile: bool
) -> None:
    """Raises `UsageError` if replicas must exchange statistics in the forward pass, and the pass
    runs in a loop or under XLA, where TensorFlow has no collectives between replicas."""
    in_graph = accumulate_steps > 1 or jit_compile
    if in_graph and synchronizes(strategy, model):
        raise UsageError(
            "a synchronized BatchNormalization on several replicas supports neither "
            "--accumulate_steps nor --jit_compile: use synchronized=False, or one replica"
        )


def dropout_seeds(model: keras.Model) -> list[tf.Variable]:
    """States of the model's seed generators, integers [2]: the seed and the number of masks drawn
    so far."""
    variables = {id(v): v for v in model.non_trainable_variables}.values()
    return [v.value for v in variables if v.path.endswith("seed_generator_state")]


def other_state(model: keras.Model) -> list[keras.Variable]:
    """Non-trainable variables whose purpose ctl does not know: neither statistics of
    `training_norms` nor seeds."""
    statistics = [variable.value for variable in statistics_of(training_norms(model))]
    known = {id(variable) for variable in [*statistics, *dropout_seeds(model)]}
    return [v for v in model.non_trainable_variables if id(v.value) not in known]


@contextlib.contextmanager
def drawing_alike(model: keras.Model, parts: int | tf.Tensor, most: int) -> Iterator[None]:
    """Keeps the Dropout seeds of all replicas in step while each calls ``model`` ``parts`` times.

    ``parts`` may differ between replicas, up to ``most``; the seeds end as if ``model`` had been
    called ``most`` times. After a restore, `offset_dropout_seeds` can therefore derive every seed
    from the seed of replica 0.
    """
    always_most = isinstance(parts, int) and parts == most
    seeds = [] if always_most else dropout_seeds(model)
    before = [seed.read_value() for seed in seeds]
    yield
    for seed, old in zip(seeds, before, strict=True):
        drawn = (seed.read_value() - old) // tf.cast(parts, seed.dtype)
        seed.assign(old + drawn * tf.cast(most, seed.dtype))


def seed_offset(replica: int | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """By what the seed of ``replica`` differs from that of replica 0, of ``dtype`` [2]."""
    return tf.cast([_SEED_STRIDE, 0], dtype) * tf.cast(replica, dtype)


def offset_dropout_seeds(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Gives each replica its own Dropout seeds, derived from those of replica 0. A second call
    changes nothing."""
    seeds = dropout_seeds(model)

    def shift() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for seed in seeds:
            seed.assign_add(seed_offset(replica, seed.dtype))

    if seeds and strategy.num_replicas_in_sync > 1:
        for seed in seeds:
            seed.assign(seed.read_value())  # copies the seed of replica 0 to all replicas
        # TensorFlow warns about an eager `run`.
        tf.function(lambda: strategy.run(shift), autograph=False)()
