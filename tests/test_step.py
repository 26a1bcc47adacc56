"""N replicas equal one replica equal plain Keras, on the same global batches."""

from __future__ import annotations

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
    both,
    examples,
    largest_difference,
    mlp,
    train,
)

from ctl.distributed.replicas import offset_dropout_seeds
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.losses import cross_entropy
from ctl.phases.optimizers import PROVEN
from ctl.step import TrainStep

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
    @pytest.mark.parametrize("words", [["bias"], ["head"], ["^bias$"], ["head/kernel"]], ids=str)
    def test_weight_decay_with_exclusions(self, mirrored, replicas, words):
        def adamw():
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
            optimizer.exclude_from_weight_decay(var_names=words)
            return optimizer

        def model():
            layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(CLASSES, name="head")]
            return keras.Sequential([keras.Input([FEATURES]), *layers])

        self.check(mirrored, replicas, adamw, make_model=model)

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
