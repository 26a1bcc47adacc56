"""Small models, data, references and comparisons that the tests of the hot path share."""

from __future__ import annotations

import contextlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from ctl.checkpoint import CheckpointManager
from ctl.control.evaluator import Evaluator
from ctl.data import InMemory
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep

BATCH = 16
CLASSES = 5
FEATURES = 12
STEPS = 20
# 19 batches of 16 and one of 5: on 4 replicas 2, 2, 1 and no examples.
PARTIAL = (STEPS - 1) * BATCH + 5


def examples(count: int = 20 * BATCH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, FEATURES)).astype(np.float32)
    return features, random.integers(0, CLASSES, count)


def batches_of_files(directory: Path, size: int) -> tf.data.Dataset:
    """The `examples` from two files, which TensorFlow would give to one worker each."""
    paths = [directory / f"{number}.records" for number in range(2)]
    if not all(path.exists() for path in paths):
        for path, part in zip(paths, np.array_split(np.c_[examples()], 2), strict=True):
            with tf.io.TFRecordWriter(str(path)) as writer:
                for row in part.astype("float32"):
                    writer.write(row.tobytes())

    def parsed(record):
        row = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [FEATURES + 1])
        return row[:-1], tf.cast(row[-1], tf.int64)

    return tf.data.TFRecordDataset([str(path) for path in paths]).map(parsed).batch(size)


def batches_of(batches, size: int | None = None) -> tf.data.Dataset:
    """A dataset of these batches of arrays, each of ``size`` examples, or of any number."""
    signature = tuple(tf.TensorSpec([size, *a.shape[1:]], a.dtype) for a in batches[0])
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


def network(*layers: keras.Layer) -> keras.Model:
    """From the features through ``layers`` to logits."""
    return keras.Sequential([keras.Input([FEATURES]), *layers, keras.layers.Dense(CLASSES)])


def mlp(**kwargs) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(8, activation="tanh", **kwargs),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )


class Words(keras.layers.Layer):
    """Adds to the features what a table of 103 rows has for four words, which they stand for."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(103, 4)

    def call(self, features):
        words = tf.cast(tf.abs(features[:, :4]) * 40.0, tf.int32) % self.table.input_dim
        return tf.concat([features, tf.reduce_mean(self.table(words), 1)], 1)


def words_and_features() -> keras.Model:
    layers = keras.layers
    return network(Words(), layers.Dense(8, activation="tanh"), layers.BatchNormalization())


def convolutions() -> keras.Model:
    """With no examples, a convolution gives a tensor of a wrong shape, and its gradient aborts the
    process."""
    layers = keras.layers
    image = layers.Reshape([2, 2, 3])
    return network(image, layers.Conv2D(4, 2, activation="tanh"), layers.Flatten())


def normalized(**options):
    return lambda: network(keras.layers.BatchNormalization(**options))


def adam(**kwargs):
    return lambda: keras.optimizers.Adam(0.01, **kwargs)


def sgd(rate: float = 0.1, **kwargs):
    return lambda: keras.optimizers.SGD(rate, **kwargs)


def accuracy() -> keras.metrics.Metric:
    return keras.metrics.SparseCategoricalAccuracy("accuracy")


OF_LOOP = {"actions", "checkpoints", "eval_actions", "evaluator", "schedule", "steps_per_loop"}


def make_loop(
    strategy=None,
    *,
    model=mlp,
    optimizer=None,
    step_class=TrainStep,
    data=None,
    evaluate=0,
    directory=None,
    seed=None,
    **options,
) -> Loop:
    """A loop over small data.

    Args:
        strategy: by default one device.
        model, optimizer: make them; by default `mlp` and Adam.
        data: by default `examples`, in memory.
        evaluate: examples to evaluate on.
        directory: of the checkpoints.
        seed: of the weights; by default whatever comes next.
        options: of the loop (`OF_LOOP`) and of the step (all others).
    """
    strategy = strategy or tf.distribute.OneDeviceStrategy("/cpu:0")
    of_loop = {name: options.pop(name) for name in OF_LOOP & options.keys()}
    if seed is not None:
        keras.utils.set_random_seed(seed)
    with strategy.scope():
        trained = model()
        step = step_class(trained, (optimizer or adam())(), metrics=[accuracy()], **options)
        eval_step = EvalStep(trained, metrics=[accuracy()])
    if data is None:
        data = InMemory(examples(100), global_batch_size=BATCH)
    if evaluate:
        held_out = InMemory(examples(evaluate, seed=9), global_batch_size=BATCH, training=False)
        of_loop["evaluator"] = Evaluator(eval_step, held_out, strategy=strategy)
    if directory:
        of_loop["checkpoints"] = CheckpointManager(directory)
    return Loop(step, data, strategy=strategy, **of_loop)


class CountsItself(TrainStep):
    """With a variable of each replica, which changes with every step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left = self.variable("left", [], per_replica=True)

    def sum_gradients(self, gradients):
        self.left.assign_add(1.0)
        return super().sum_gradients(gradients)


def counts(loop: Loop) -> list[float]:
    """What each replica of a loop of `CountsItself` has counted."""
    return [float(part) for part in loop.strategy.experimental_local_results(loop.step.left)]


def largest_difference(ours, theirs) -> float:
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(ours, theirs, strict=True)
    )


def assert_replicas_agree(strategy, variables) -> None:
    for variable in variables:
        values = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        for value in values[1:]:
            np.testing.assert_array_equal(values[0], value, err_msg=variable.path)


@contextlib.contextmanager
def precision(name: str):
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy(before)


def keras_loss(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def plain_keras(model, optimizer, batches, *, schedule=None) -> None:
    """The reference: one device, no strategy, Keras's own optimizer.apply of the mean loss."""
    variables = model.trainable_variables
    optimizer.build(variables)  # within a graph, ScheduleFreeAdamW would begin with weights of 0

    @tf.function(reduce_retracing=True)
    def step(features, labels, weights):
        with tf.GradientTape() as tape:
            losses = keras_loss(labels, model(features, training=True)) * weights
            loss = tf.reduce_sum(losses) / tf.reduce_sum(weights)
            loss += tf.add_n(model.losses) if model.losses else 0.0
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in variables])
        # Densified: Keras does not sum duplicate rows of sparse gradients.
        optimizer.apply([tf.convert_to_tensor(g) for g in gradients], variables)

    for number, (features, labels, *weights) in enumerate(batches):
        if schedule:
            optimizer.learning_rate = float(schedule(number))
        weights = weights[0] if weights else np.ones(len(labels), np.float32)
        step(tf.constant(features), tf.constant(labels), tf.constant(weights))


def cut(arrays, size: int = BATCH) -> list[tuple]:
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]), size)]


def train(
    strategy,
    make_model,
    make_optimizer,
    arrays,
    *,
    weights=None,
    full=True,
    schedule=None,
    steps=STEPS,
    step_class=TrainStep,
    **options,
):
    """Trains with ctl on batches of ``arrays``; full batches of a static shape unless told."""
    with strategy.scope():
        model = make_model()
        if weights is not None:
            model.set_weights(weights)
        step = step_class(model, make_optimizer(), **options)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=full)
    loop = Loop(step, dataset.repeat(), strategy=strategy, schedule=schedule)
    loop.train(steps)
    assert loop.global_step == steps
    assert loop.steps.run.experimental_get_tracing_count() == 1
    return loop


_references: dict[tuple, tuple] = {}  # of `both`, by what they are made of


def both(strategy, make_optimizer, arrays=None, *, make_model=mlp, reference=None, **options):
    """Trains the reference and ours from the same weights; returns both models, the loop and the
    optimizer of the reference. Tests that give the same objects share the reference."""
    arrays, reference = examples() if arrays is None else arrays, reference or make_optimizer
    schedule, policy = options.get("schedule"), keras.mixed_precision.dtype_policy().name
    key = make_model, reference, schedule, policy, *(a.tobytes() for a in arrays)
    if key not in _references:
        theirs, optimizer = make_model(), reference()
        weights = [w.copy() for w in theirs.get_weights()]
        plain_keras(theirs, optimizer, cut(arrays), schedule=schedule)
        _references[key] = theirs, weights, optimizer
    theirs, weights, optimizer = _references[key]
    loop = train(strategy, make_model, make_optimizer, arrays, weights=weights, **options)
    ours = loop.step.model
    assert_replicas_agree(strategy, ours.trainable_variables)
    moved = largest_difference(ours.get_weights(), weights)
    assert moved > 5e-3, f"20 steps moved the weights by {moved} only"
    return ours, theirs, loop, optimizer
