"""N replicas equal one replica equal plain Keras, on the same global batches."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    adam,
    assert_replicas_agree,
    both,
    cut,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    mlp,
    precision,
    train,
)

from ctl.errors import UsageError
from ctl.loop import Evaluator, Loop
from ctl.optimizers import PROVEN
from ctl.replicas import offset_dropout_seeds
from ctl.step import EvalStep, TrainStep, cross_entropy

pytestmark = pytest.mark.compiled_update

REPLICAS = pytest.mark.parametrize("replicas", [1, 2, 4])
# Where nothing depends on their number but that there are several.
FEW_REPLICAS = pytest.mark.parametrize("replicas", [1, 2])

# Rates at which 20 steps move the weights by 0.01 to 1: an update left out would be seen.
RATES = {"Adadelta": 1.0, "Ftrl": 0.05, "SGD": 0.1, "Lion": 1e-3}


@pytest.mark.slow
@FEW_REPLICAS
@pytest.mark.parametrize("kind", PROVEN, ids=lambda kind: kind.__name__)
def test_every_optimizer_equals_plain_keras(mirrored, kind, replicas):
    def optimizer():
        return kind(learning_rate=RATES.get(kind.__name__, 0.01))

    ours, theirs, loop, reference = both(mirrored(replicas), optimizer)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6
    slots = [v.numpy() for v in loop.step.optimizer.variables]
    np.testing.assert_allclose(
        np.concatenate([np.ravel(s) for s in slots]),
        np.concatenate([np.ravel(v.numpy()) for v in reference.variables]),
        rtol=1e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_equals_plain_keras(mirrored, nesterov):
    def optimizer():
        return keras.optimizers.SGD(0.05, momentum=0.9, nesterov=nesterov)

    ours, theirs, *_ = both(mirrored(2), optimizer)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6


class TestEqualsPlainKeras:
    """Each feature, against Keras's own on one device."""

    def check(self, mirrored, replicas, make_optimizer, *args, **options):
        ours, theirs, loop, reference = both(mirrored(replicas), make_optimizer, *args, **options)
        assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6
        return loop, reference

    @REPLICAS
    def test_clipping_by_global_norm_after_the_reduction(self, mirrored, replicas):
        def sgd(**kwargs):
            return lambda: keras.optimizers.SGD(0.5, **kwargs)

        self.check(mirrored, replicas, sgd(), reference=sgd(global_clipnorm=0.05), clip_norm=0.05)

    @pytest.mark.slow
    @pytest.mark.parametrize(("replicas", "parts"), [(1, 3), (2, 2), (4, 3)])
    def test_accumulation(self, mirrored, replicas, parts):
        """3 does not divide a replica's batch: micro-batches of different sizes."""
        self.check(mirrored, replicas, adam(), accumulate_steps=parts)

    @pytest.mark.slow
    @FEW_REPLICAS
    def test_averaged_weights(self, mirrored, replicas):
        loop, reference = self.check(
            mirrored,
            replicas,
            adam(),
            reference=adam(use_ema=True, ema_momentum=0.9),
            ema_decay=0.9,
        )
        theirs = reference._model_variables_moving_average
        assert largest_difference(loop.step.updater.ema, theirs) <= 1e-6
        trained = loop.step.model.get_weights()
        with loop.step.updater.averaged():
            assert largest_difference(loop.step.model.get_weights(), theirs) <= 1e-6
        assert largest_difference(loop.step.model.get_weights(), trained) == 0

    @pytest.mark.slow
    @FEW_REPLICAS
    def test_weight_decay_with_exclusions(self, mirrored, replicas):
        def adamw():
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        self.check(mirrored, replicas, adamw)

    @FEW_REPLICAS
    def test_weight_decay_of_any_optimizer(self, mirrored, replicas):
        self.check(mirrored, replicas, lambda: keras.optimizers.SGD(0.1, weight_decay=0.1))

    @FEW_REPLICAS
    def test_schedule(self, mirrored, replicas):
        self.check(
            mirrored, replicas, adam(), schedule=lambda s: 0.01 * 0.9 ** tf.cast(s, "float32")
        )

    @FEW_REPLICAS
    def test_constraint(self, mirrored, replicas):
        self.check(
            mirrored,
            replicas,
            lambda: keras.optimizers.SGD(0.5),
            make_model=lambda: mlp(kernel_constraint=keras.constraints.MaxNorm(0.5)),
        )

    @FEW_REPLICAS
    def test_regularizer_counts_once(self, mirrored, replicas):
        self.check(
            mirrored,
            replicas,
            lambda: keras.optimizers.SGD(0.1),
            make_model=lambda: mlp(kernel_regularizer=keras.regularizers.L2(0.05)),
        )

    @pytest.mark.slow
    @REPLICAS
    def test_sparse_gradients_with_duplicate_rows(self, mirrored, replicas):
        def model():
            return keras.Sequential(
                [
                    keras.layers.Input([6], dtype="int32"),
                    keras.layers.Embedding(7, 4),
                    keras.layers.Flatten(),
                    keras.layers.Dense(CLASSES),
                ]
            )

        random = np.random.default_rng(1)
        words = random.integers(0, 7, (STEPS * BATCH, 6)).astype(np.int32)
        arrays = (words, random.integers(0, CLASSES, STEPS * BATCH))
        self.check(mirrored, replicas, adam(), arrays, make_model=model)

    @pytest.mark.slow
    @REPLICAS
    def test_partial_batches(self, mirrored, replicas):
        """The last batch of the 20 has 5 examples: on 4 replicas 2, 2, 1 and none."""
        arrays = examples((STEPS - 1) * BATCH + 5)
        self.check(mirrored, replicas, lambda: keras.optimizers.SGD(0.1), arrays, full=False)

    @pytest.mark.slow
    @REPLICAS
    def test_partial_batches_with_accumulation_and_clipping(self, mirrored, replicas):
        def sgd(**kwargs):
            return lambda: keras.optimizers.SGD(0.5, **kwargs)

        self.check(
            mirrored,
            replicas,
            sgd(),
            examples((STEPS - 1) * BATCH + 5),
            full=False,
            reference=sgd(global_clipnorm=0.05),
            clip_norm=0.05,
            accumulate_steps=2,
        )

    @FEW_REPLICAS
    def test_weighted_examples(self, mirrored, replicas):
        """Half of the weights are 0, so replicas differ in their number of valid examples."""
        weights = np.random.default_rng(2).integers(0, 2, STEPS * BATCH).astype(np.float32)
        self.check(mirrored, replicas, lambda: keras.optimizers.SGD(0.1), (*examples(), weights))

    @pytest.mark.slow
    @FEW_REPLICAS
    def test_frozen_layers(self, mirrored, replicas):
        def model():
            model = mlp()
            model.layers[0].trainable = False
            return model

        before = []

        class Step(TrainStep):
            def build(self, *args, **kwargs):
                before.extend(self.model.layers[0].get_weights())
                super().build(*args, **kwargs)

        loop, _ = self.check(mirrored, replicas, adam(), make_model=model, step_class=Step)
        assert largest_difference(loop.step.model.layers[0].get_weights(), before) == 0

    @pytest.mark.slow
    @FEW_REPLICAS
    def test_several_packs(self, mirrored, replicas):
        self.check(mirrored, replicas, adam(), bytes_per_pack=200)

    @pytest.mark.slow
    @FEW_REPLICAS
    def test_compiled_forward_and_backward(self, mirrored, replicas):
        self.check(mirrored, replicas, adam(), jit_compile=True)

    @pytest.mark.slow
    @FEW_REPLICAS
    def test_compiled_with_accumulation(self, mirrored, replicas):
        self.check(mirrored, replicas, adam(), jit_compile=True, accumulate_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_steps": 2}, {"ema_decay": 0.9}, {"loss_scale": True}, {"on_nan": "skip"}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_all_of_the_step_compiled_equals_plain_keras(options):
    default = tf.distribute.get_strategy()
    ours, theirs, loop, _ = both(default, adam(), jit_compile=True, **options)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6
    functions = loop.traced().graph.as_graph_def().library.function
    (body,) = (f.node_def for f in functions if any("IteratorGetNext" in n.op for n in f.node_def))
    assert sum(node.attr["_XlaMustCompile"].b for node in body) == 1  # forward, update and all


@REPLICAS
def test_batch_norm_statistics_are_those_of_one_replica(mirrored, replicas):
    """The layer sees the data, so its statistics do not depend on how batches are split."""

    def model():
        return keras.Sequential(
            [
                keras.layers.Input([FEATURES]),
                keras.layers.BatchNormalization(momentum=0.8, name="norm"),
                keras.layers.Dense(CLASSES),
            ]
        )

    arrays = examples()
    strategy = mirrored(replicas)
    loop = train(strategy, model, lambda: keras.optimizers.SGD(0.0), arrays)
    mean, variance = np.zeros(FEATURES), np.ones(FEATURES)
    for features, _ in cut(arrays):
        mean = 0.8 * mean + 0.2 * features.astype(np.float64).mean(axis=0)
        variance = 0.8 * variance + 0.2 * features.astype(np.float64).var(axis=0)
    norm = loop.step.model.get_layer("norm")
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance.numpy(), variance, atol=1e-6)
    assert_replicas_agree(strategy, loop.step.model.variables)


def test_synchronized_batch_norm_equals_one_replica(mirrored):
    def model():
        return keras.Sequential(
            [
                keras.layers.Input([FEATURES]),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(CLASSES),
            ]
        )

    ours, theirs, *_ = both(mirrored(2), lambda: keras.optimizers.SGD(0.1), make_model=model)
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6


@pytest.mark.slow
def test_gradients_of_a_synchronized_batch_norm_cross_replicas_of_other_counts(mirrored):
    """Gradients of the first layer are those of all replicas, whose weights differ."""

    def model():
        return keras.Sequential(
            [
                keras.layers.Input([FEATURES]),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(CLASSES),
            ]
        )

    weights = np.tile(np.repeat([1.0, 0.1], BATCH // 2), STEPS).astype(np.float32)
    arrays = (*examples(), weights)
    ours, theirs, *_ = both(
        mirrored(2), lambda: keras.optimizers.SGD(0.1), arrays, make_model=model
    )
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"jit_compile": True}], ids=str)
def test_a_synchronized_batch_norm_in_a_loop_or_under_xla_is_refused(mirrored, options):
    def model():
        norm = keras.layers.BatchNormalization(synchronized=True)
        return keras.Sequential([keras.layers.Input([FEATURES]), norm, keras.layers.Dense(CLASSES)])

    make_loop(mirrored(1), model=model, **options)
    with pytest.raises(UsageError, match="neither --accumulate_steps nor --jit_compile: use"):
        make_loop(mirrored(2), model=model, **options)


def dropout_model():
    return keras.Sequential([keras.layers.Input([64]), keras.layers.Dropout(0.5, seed=3)])


def masks(strategy, model) -> np.ndarray:
    """What Dropout lets through on each replica, [replicas, 64]."""
    ones = tf.ones([1, 64])
    results = strategy.run(tf.function(lambda: model(ones, training=True)))
    return np.concatenate([r.numpy() for r in strategy.experimental_local_results(results)])


def test_dropout_masks_differ_between_replicas(mirrored):
    strategy = mirrored(4)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input([64]), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(2)]
        )
        dropout = keras.Sequential(model.layers[:1])
        step = TrainStep(model, keras.optimizers.SGD(0.1))
    assert len(np.unique(masks(strategy, dropout), axis=0)) == 1  # what Keras does
    step.build(strategy)
    assert len(np.unique(masks(strategy, dropout), axis=0)) == 4
    for _ in range(2):
        offset_dropout_seeds(strategy, model)
    assert len(np.unique(masks(strategy, dropout), axis=0)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_float16_with_loss_scale_equals_keras(mirrored, replicas):
    with precision("mixed_float16"):
        ours, theirs, loop, reference = both(
            mirrored(replicas),
            adam(),
            reference=lambda: keras.optimizers.LossScaleOptimizer(adam()(), initial_scale=2.0**15),
            loss_scale=True,
        )
    # Rounding to float16 differs with the split of the batch: 2^-11 relative per operation.
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 5e-3
    assert (
        float(loop.step.updater.loss_scale.scale.numpy())
        == float(reference.dynamic_scale.numpy())
        == 2.0**15
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_bfloat16_equals_keras(mirrored, replicas):
    with precision("mixed_bfloat16"):
        ours, theirs, *_ = both(mirrored(replicas), adam())
    assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 3e-2  # 2^-8 relative


class InfinityOnLastReplica(TrainStep):
    """The gradient of the second step is infinite, on the last replica only."""

    def backward(self, tape, loss, variables=None):
        context = tf.distribute.get_replica_context()
        last = tf.equal(context.replica_id_in_sync_group, context.num_replicas_in_sync - 1)
        bad = tf.logical_and(last, tf.equal(self.global_step, 1))
        return [g + tf.where(bad, np.inf, 0.0) for g in super().backward(tape, loss, variables)]


@FEW_REPLICAS
@pytest.mark.parametrize("options", [{"loss_scale": True}, {"on_nan": "skip"}], ids=str)
def test_an_infinity_on_one_replica_skips_the_update_on_all(mirrored, replicas, options):
    strategy = mirrored(replicas)
    arrays = examples()
    loop = train(
        strategy, mlp, adam(), arrays, step_class=InfinityOnLastReplica, steps=2, **options
    )
    assert_replicas_agree(strategy, loop.step.model.trainable_variables)
    assert int(loop.step.updater.skipped.numpy()) == 1
    assert int(loop.step.optimizer.iterations.numpy()) == 1
    if "loss_scale" in options:
        assert float(loop.step.updater.loss_scale.scale.numpy()) == 2.0**14
    weights = loop.step.model.get_weights()
    assert all(np.isfinite(w).all() for w in weights)
    scalars = loop.train(3)  # and the third goes on
    assert scalars["skipped_steps"] == 1 and np.isfinite(scalars["loss"])
    assert largest_difference(loop.step.model.get_weights(), weights) > 1e-3


def test_cross_entropy_of_probabilities_and_with_smoothing_equals_keras():
    logits = tf.random.stateless_normal([8, CLASSES], [1, 2])
    labels = tf.range(8) % CLASSES
    theirs = keras.losses.categorical_crossentropy(
        tf.one_hot(labels, CLASSES), logits, from_logits=True, label_smoothing=0.1
    )
    np.testing.assert_allclose(cross_entropy(labels, logits, 0.1), theirs, rtol=1e-6)
    probabilities = tf.nn.softmax(tf.random.stateless_normal([8, CLASSES], [3, 4]))
    for smoothing in (0.0, 0.1):
        theirs = keras.losses.categorical_crossentropy(
            probabilities, logits, from_logits=True, label_smoothing=smoothing
        )
        ours = cross_entropy(probabilities, logits, smoothing)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.slow
@REPLICAS
def test_evaluation_sees_every_example_once(mirrored, replicas):
    """101 examples in batches of 16: the last has 5, on 4 replicas 2, 2, 1 and none."""
    features, labels = examples(101)
    strategy = mirrored(replicas)
    with strategy.scope():
        model = mlp()
        metrics = [
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2"),
        ]
        step = EvalStep(model, metrics=metrics)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
    evaluator = Evaluator(step, dataset, strategy=strategy)
    logits = model(features).numpy()
    want = {
        "loss": keras_loss(labels, logits).numpy().mean(),
        "accuracy": (logits.argmax(axis=1) == labels).mean(),
        "top2": np.mean([y in np.argsort(row)[-2:] for y, row in zip(labels, logits, strict=True)]),
    }
    for _ in range(2):  # the second has the iterator of the first
        assert evaluator.run() == pytest.approx(want, rel=1e-6)


def collectives(loop) -> list[tf.Operation]:
    definition = loop.traced().graph.as_graph_def()
    bodies = [definition.node, *(f.node_def for f in definition.library.function)]
    return [node for body in bodies for node in body if node.op.startswith("Collective")]


@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({}, 1),
        ({"clip_norm": 1.0, "accumulate_steps": 2, "ema_decay": 0.9, "loss_scale": True}, 1),
        ({"full": False}, 1),
        ({"bytes_per_pack": 200}, 3),
    ],
    ids=["plain", "everything", "counted", "packs"],
)
def test_one_gradient_collective_per_device_per_step(ring2, options, packs):
    loop = train(ring2, mlp, adam(), examples(), steps=3, **options)
    found = collectives(loop)
    assert [node.op for node in found] == ["CollectiveReduceV2"] * (2 * packs)
    names = {node.name.split("ctl_all_reduce/")[1].split("/")[0] for node in found}
    assert names == {f"pack{i}" for i in range(packs)}


def test_collectives_have_the_options(ring2):
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=7.0)
    loop = train(ring2, mlp, adam(), examples(), steps=1, options=options)
    assert {node.attr["timeout_seconds"].f for node in collectives(loop)} == {7.0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keras.optimizers.Nadam(), ["Nadam", "_backend_update_step"]),
        (lambda: keras.optimizers.Muon(), ["Muon"]),
        pytest.param(
            lambda: keras.optimizers.ScheduleFreeAdamW(),
            ["ScheduleFreeAdamW", "not proven"],
            marks=pytest.mark.skipif(
                not hasattr(keras.optimizers, "ScheduleFreeAdamW"),
                reason="needs a newer Keras, with ScheduleFreeAdamW",
            ),
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            ["LossScaleOptimizer", "inner"],
        ),
        (lambda: keras.optimizers.SGD(clipnorm=1.0), ["clipnorm", "clip_norm"]),
        (lambda: keras.optimizers.SGD(clipvalue=1.0), ["clipvalue", "TrainStep.clip"]),
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), ["global_clipnorm", "clip_norm"]),
        (lambda: keras.optimizers.SGD(use_ema=True), ["use_ema", "ema_decay"]),
        (lambda: keras.optimizers.SGD(loss_scale_factor=2.0), ["loss_scale_factor"]),
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            ["gradient_accumulation_steps", "accumulate_steps"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_right_is_refused(mirrored, make, words):
    strategy = mirrored(1)
    with strategy.scope():
        step = TrainStep(mlp(), make())
    with pytest.raises(UsageError) as error:
        step.build(strategy)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_variables_of_another_scope_are_refused(mirrored):
    step = TrainStep(mlp(), keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"strategy.scope\(\)"):
        step.build(mirrored(2))


def test_a_step_that_overrides_one_phase(mirrored):
    """A step of one's own: the loss only, no metrics, a batch of any form."""

    class Autoencoder(TrainStep):
        def loss(self, batch):
            return tf.reduce_mean((self.model(batch["x"], training=True) - batch["x"]) ** 2, -1)

        def count(self, batch):
            return batch["x"].shape[0]

    def model():
        return keras.Sequential([keras.layers.Input([FEATURES]), keras.layers.Dense(FEATURES)])

    weights = model().get_weights()
    results = []
    for replicas in (1, 2):
        strategy = mirrored(replicas)
        with strategy.scope():
            mine = model()
            mine.set_weights(weights)
            step = Autoencoder(mine, keras.optimizers.SGD(0.5))
        dataset = tf.data.Dataset.from_tensor_slices({"x": examples()[0]})
        loop = Loop(step, dataset.batch(BATCH, drop_remainder=True).repeat(), strategy=strategy)
        loop.train(STEPS)
        results.append(mine.get_weights())
    assert largest_difference(results[0], results[1]) <= 1e-6
    assert largest_difference(results[0], weights) > 1e-2


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize(("replicas", "jit_compile"), [(1, False), (1, True), (2, False)])
def test_a_skipped_step_leaves_batch_norm_as_it_was(mirrored, replicas, jit_compile, synchronized):
    """The statistics are those of a training that never saw the batch."""

    def model():
        keras.utils.set_random_seed(4)
        return keras.Sequential(
            [
                keras.layers.Input([FEATURES]),
                keras.layers.BatchNormalization(momentum=0.5, synchronized=synchronized),
                keras.layers.Dense(CLASSES),
            ]
        )

    batches = cut(examples(4 * BATCH))
    poisoned = batches[1][0].copy()
    poisoned[3, 2] = np.nan
    states = []
    for given in ([*batches[:2], (poisoned, batches[1][1]), *batches[2:]], batches):
        arrays = tuple(np.concatenate(parts) for parts in zip(*given, strict=True))
        loop = train(
            mirrored(replicas),
            model,
            adam(),
            arrays,
            steps=len(given),
            on_nan="skip",
            jit_compile=jit_compile,
        )
        states.append(loop.step.model.get_weights())
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="needs a newer Keras, with renorm of BatchNormalization",
)
def test_the_statistics_of_renorm_are_the_same_on_all_replicas(mirrored):
    def model():
        layers = keras.layers
        norm = layers.BatchNormalization(momentum=0.5, renorm=True, renorm_momentum=0.5)
        return keras.Sequential([layers.Input([FEATURES]), norm, layers.Dense(CLASSES)])

    loop = train(mirrored(2), model, adam(), examples())
    norm = loop.step.model.layers[0]
    assert len(norm.non_trainable_variables) == 5
    assert_replicas_agree(mirrored(2), norm.non_trainable_variables)


@pytest.mark.parametrize("accumulate_steps", [1, 3])
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
@pytest.mark.parametrize(("replicas", "jit_compile"), [(1, False), (2, False), (2, True)])
def test_counted_batches_do_not_overflow(mirrored, policy, replicas, jit_compile, accumulate_steps):
    """The sum of the gradients of 16 examples is more than float16 can hold, their mean is not."""
    features, labels = examples(4 * BATCH)
    arrays = 2e4 * np.sign(features), labels

    def model():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(CLASSES, kernel_initializer="zeros"),
        ]
        return keras.Sequential(layers)

    weights = []
    for constant in (True, False):  # sample weights are counted
        with precision(policy):
            loop = train(
                mirrored(replicas),
                model,
                lambda: keras.optimizers.SGD(1e-4),
                arrays if constant else (*arrays, np.ones(len(labels), "float32")),
                steps=1,
                on_nan="skip",
                jit_compile=jit_compile,
                accumulate_steps=accumulate_steps,
            )
        assert loop.step.updater.skipped_so_far() == 0
        weights.append(loop.step.model.get_weights())
    assert np.abs(weights[0][0]).max() > 0
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_counted_gradients_are_sums_until_they_are_reduced(dtype):
    """A step of one's own may override either side of it."""
    with precision(dtype):
        model = keras.Sequential([keras.layers.Input([FEATURES]), keras.layers.Dense(CLASSES)])
        step = TrainStep(model, keras.optimizers.SGD(0.1))
    strategy = tf.distribute.get_strategy()
    step.build(strategy)
    features, labels = examples(7)
    batch = tf.constant(features), tf.constant(labels), tf.ones([7])

    @tf.function
    def both_sides():
        def replica():
            loss, sums = step.forward_backward(batch, tf.constant(7.0))
            before = step.statistics.before(batch)
            return sums, step.reduce(loss, tf.constant(7.0), sums, before)[2]

        return strategy.run(replica)

    sums, means = both_sides()
    logits = model(features).numpy().astype("float64")
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected[np.arange(7), labels] -= 1
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(sums[-1], expected.sum(0), atol=tolerance)  # of the bias
    np.testing.assert_allclose(means[-1], expected.mean(0), atol=tolerance)
    assert sums[-1].dtype == "float32" and means[-1].dtype == dtype
