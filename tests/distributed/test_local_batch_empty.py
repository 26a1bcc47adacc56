"""Replicas whose share of a batch has no examples."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    CLASSES,
    FEATURES,
    PARTIAL,
    STEPS,
    adam,
    assert_replicas_agree,
    both,
    convolutions,
    examples,
    largest_difference,
    mlp,
    precision,
    train,
)

from ctl.checkpoint import CheckpointManager
from ctl.control.evaluator import Evaluator
from ctl.data import GlobalBatches, InMemory
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep


def normalized_convolutions() -> keras.Model:
    """With no examples, it fails in evaluation, too."""
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Reshape([2, 2, 3]),
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def unit_length() -> keras.Model:
    """Of an example of zeros it makes NaN, and so do its gradients."""
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Dense(8, use_bias=False),
            keras.layers.Lambda(lambda x: x / tf.norm(x, axis=-1, keepdims=True)),
            keras.layers.Dense(CLASSES),
        ]
    )


def normalized(**options) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.BatchNormalization(momentum=0.8, **options),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dense(CLASSES),
        ]
    )


class TestNoExamples:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [{}, {"accumulate_steps": 3}, {"jit_compile": True}, {"bytes_per_pack": 200}],
        ids=lambda options: next(iter(options), "plain"),
    )
    @pytest.mark.parametrize("model", [convolutions, unit_length])
    def test_training_equals_one_device(self, mirrored, model, options):
        ours, theirs, *_ = both(
            mirrored(4),
            lambda: keras.optimizers.SGD(0.1),
            examples(PARTIAL),
            make_model=model,
            full=False,
            **options,
        )
        assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("weights", [None, [1.0, -0.9, 1.0, -0.9, 0.0], [0.0] * 5], ids=str)
    @pytest.mark.parametrize("parts", [1, 3])
    def test_statistics_are_weighted_by_examples(self, mirrored, parts, weights):
        """Not by the weights of examples, which BatchNorm does not know."""
        features, labels = examples(5)
        arrays = (features, labels) if weights is None else (features, labels, np.array(weights))
        strategy = mirrored(4)
        with strategy.scope():
            model = normalized()
            step = TrainStep(model, keras.optimizers.SGD(0.0), accumulate_steps=parts)
        # TensorFlow splits them as 2, 2, 1 and 0.
        batches = tf.data.Dataset.from_tensor_slices(arrays).batch(5)
        Loop(step, batches, strategy=strategy).train(3)
        mean, variance = np.zeros(FEATURES), np.ones(FEATURES)
        for _ in range(3):
            means, variances = [], []
            if parts == 1:  # those of the whole batch
                mean = 0.8 * mean + 0.2 * features.astype(np.float64).mean(axis=0)
                variance = 0.8 * variance + 0.2 * features.astype(np.float64).var(axis=0)
                continue
            for rows in np.split(features.astype(np.float64), [2, 4]):
                m, v = mean, variance
                for micro_batch in np.split(rows, min(parts, len(rows))):
                    m = 0.8 * m + 0.2 * micro_batch.mean(axis=0)
                    v = 0.8 * v + 0.2 * micro_batch.var(axis=0)
                means.append(m)
                variances.append(v)
            mean = np.average(means, axis=0, weights=[2, 2, 1])
            variance = np.average(variances, axis=0, weights=[2, 2, 1])
        norm = model.layers[0]
        np.testing.assert_allclose(norm.moving_mean.numpy(), mean, atol=1e-6)
        np.testing.assert_allclose(norm.moving_variance.numpy(), variance, atol=1e-6)
        assert_replicas_agree(strategy, norm.variables)

    @pytest.mark.slow
    def test_statistics_in_float16_do_not_overflow(self, mirrored):
        features, labels = examples(514)
        strategy = mirrored(2)
        with precision("float16"), strategy.scope():
            model = normalized()
            step = TrainStep(model, keras.optimizers.SGD(0.0))
        batches = tf.data.Dataset.from_tensor_slices((20 * features, labels)).batch(514)
        Loop(step, batches, strategy=strategy).train(9)
        variance = model.layers[0].moving_variance
        assert variance.dtype == "float16"
        assert variance.numpy().min() > 200 and variance.numpy().max() < 600

    @pytest.mark.slow
    @pytest.mark.parametrize("parts", [1, 3])
    def test_resumed_bit_for_bit(self, mirrored, tmp_path, parts):
        """Masks of Dropout, too: replicas that have drawn fewer of them stay in step."""
        strategy = mirrored(4)

        def fresh(directory) -> Loop:
            keras.utils.set_random_seed(1)
            with strategy.scope():
                step = TrainStep(normalized(), adam()(), accumulate_steps=parts)
            batches = tf.data.Dataset.from_tensor_slices(examples(BATCH + 5)).batch(BATCH)
            checkpoints = CheckpointManager(directory)
            return Loop(step, batches, strategy=strategy, checkpoints=checkpoints)

        def bits(loop: Loop) -> list[np.ndarray]:
            variables = [v for group in loop.step.state().values() for v in group]
            copies = [strategy.experimental_local_results(v) for v in variables]
            return [copy.numpy() for group in copies for copy in group]

        straight = fresh(tmp_path / "straight")
        straight.train(7)
        first = fresh(tmp_path / "first")
        first.train(4)  # the last of them was of 5 examples
        first.save(wait=True)
        first.checkpoints.close()
        resumed = fresh(tmp_path / "first")
        assert resumed.restore().step == 4
        resumed.train(7)
        for ours, theirs in zip(bits(resumed), bits(straight), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for loop in (straight, resumed):
            loop.checkpoints.close()

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["resident", "tf.data"])
    def test_evaluation(self, mirrored, kind):
        """65 examples in batches of 16: the last has one."""
        features, labels = examples(65)
        strategy = mirrored(4)
        with strategy.scope():
            model = normalized_convolutions()
            metric = keras.metrics.SparseCategoricalAccuracy("accuracy")
            step = EvalStep(model, metrics=[metric])
        data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)
        if kind == "resident":
            data = InMemory((features, labels), global_batch_size=16, training=False)
        logits = model(features).numpy()
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        want = {
            "loss": losses.numpy().mean(),
            "accuracy": (logits.argmax(axis=1) == labels).mean(),
        }
        assert Evaluator(step, data, strategy=strategy).run() == pytest.approx(want, rel=1e-6)

    @pytest.mark.slow
    def test_metrics_see_no_example_that_stands_for_none(self, mirrored):
        loop = train(
            mirrored(4),
            convolutions,
            adam(),
            examples(5),
            full=False,
            steps=3,
            step_class=lambda *args, **options: TrainStep(
                *args, metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")], **options
            ),
        )
        (metric,) = loop.step.metrics
        assert float(tf.convert_to_tensor(metric.variables[1].value)) == 3 * 5

    @pytest.mark.slow
    def test_outputs_of_all_examples_are_zeros_too(self, mirrored):
        """A metric of one's own, of a sum and a number: 3 steps with 5 examples."""

        class Step(TrainStep):
            def loss(self, batch):
                losses, logits = super().loss(batch)
                return losses, {"seen": tf.reduce_sum(tf.ones_like(losses)), "one": 1.0}

            def update_metrics(self, batch, outputs):
                (metric,) = self.metrics
                metric.update_state(outputs["one"], sample_weight=outputs["seen"])

        with mirrored(4).scope():
            step = Step(mlp(), adam()(), metrics=[keras.metrics.Mean("mean")])
        data = tf.data.Dataset.from_tensor_slices(examples(5)).batch(5)
        Loop(step, data, strategy=mirrored(4)).train(3)
        assert float(tf.convert_to_tensor(step.metrics[0].variables[1].value)) == 3 * 5

    @pytest.mark.slow
    @pytest.mark.parametrize("training", [True, False])
    def test_inner_axes_stay_known(self, mirrored, training):
        """Sequences of any length, of 8 features: layers ask for the 8."""
        seen = []

        class Step(TrainStep if training else EvalStep):
            def loss(self, batch):
                seen.append(batch[0].shape.as_list())
                return super().loss(batch)

        random = np.random.default_rng(0)
        sequences = tf.data.Dataset.from_generator(
            lambda: ((random.normal(size=[n, 8]), n % CLASSES) for n in (2, 5, 3, 4)),
            output_signature=(tf.TensorSpec([None, 8]), tf.TensorSpec([], tf.int32)),
        ).padded_batch(4)
        with mirrored(2).scope():
            layers = [keras.layers.GroupNormalization(2), keras.layers.GRU(3)]
            network = keras.Sequential(
                [keras.Input([None, 8]), *layers, keras.layers.Dense(CLASSES)]
            )
            step = Step(network, adam()()) if training else Step(network)
        if training:
            Loop(step, sequences, strategy=mirrored(2)).train(1)
        else:
            Evaluator(step, sequences, strategy=mirrored(2)).run()
        assert set(map(tuple, seen)) == {(None, None, 8)}

    @pytest.mark.slow
    def test_full_batches_of_sparse_tensors(self, mirrored):
        """Which TensorFlow can split over replicas where each gets some."""

        class Step(TrainStep):
            def loss(self, batch):
                return super().loss((tf.sparse.to_dense(batch[0]), batch[1]))

            def count(self, batch):
                return super().count((batch[1], batch[1]))

        features, labels = examples(STEPS * BATCH)
        results = []
        for replicas in (1, 2):
            keras.utils.set_random_seed(0)
            with mirrored(replicas).scope():
                step = Step(mlp(), adam()())
            data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(features), labels))
            Loop(step, data.batch(BATCH), strategy=mirrored(replicas)).train(STEPS)
            results.append(step.model.get_weights())
        assert largest_difference(*results) <= 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["ragged", "strings"])
    def test_features_of_any_kind(self, mirrored, kind):
        """One step on 5 examples of different lengths: 4 replicas equal one."""
        lengths = [1, 4, 2, 3, 2]
        words = tf.ragged.constant([[str(i) for i in range(n)] for n in lengths])

        class Step(TrainStep):
            def loss(self, batch):
                texts, labels = batch
                if kind == "strings":
                    texts = tf.strings.split(texts)
                numbers = tf.strings.to_number(texts)
                numbers = tf.reduce_sum(numbers, axis=1, keepdims=True)
                return tf.reduce_sum((self.model(numbers) - tf.cast(labels, tf.float32)) ** 2, 1)

            def count(self, batch):
                return tf.cast(tf.shape(batch[1])[0], tf.float32)

        features = words if kind == "ragged" else tf.strings.reduce_join(words, 1, separator=" ")
        weights = []
        for replicas in (1, 4):
            strategy = mirrored(replicas)
            with strategy.scope():
                model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
                model.set_weights([np.ones([1, 1]), np.zeros([1])])
                step = Step(model, keras.optimizers.SGD(0.01))
            labels = tf.range(5)[:, None]
            data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(5)
            Loop(step, data, strategy=strategy).train(2)
            weights.append(model.get_weights())
        assert largest_difference(*weights) <= 1e-6
        assert abs(weights[0][0] - 1) > 1e-3

    @pytest.mark.slow
    def test_synchronized_batch_norm_is_refused(self, mirrored):
        with pytest.raises(UsageError, match="a replica has no examples .*drop_remainder"):
            train(
                mirrored(4),
                lambda: normalized(synchronized=True),
                adam(),
                examples(BATCH + 5),
                full=False,
            )

    def test_elements_of_ragged_tensors_and_of_scalars(self):
        words = tf.ragged.constant([[1, 2], [3], [4, 5, 6]])
        assert len(list(GlobalBatches(tf.data.Dataset.from_tensors(words)).batches().take(2))) == 2
        batched = tf.data.Dataset.from_tensor_slices(words).batch(2)
        assert len(list(GlobalBatches(batched, training=False).batches())) == 2
        numbers = tf.data.Dataset.range(3)
        assert len(list(GlobalBatches(numbers, training=False).batches())) == 3

    def test_elements_without_examples_are_left_out(self):
        sizes = [3, 0, 2, 0]
        data = tf.data.Dataset.from_generator(
            lambda: (np.zeros([n, 2], np.float32) for n in sizes),
            output_signature=tf.TensorSpec([None, 2]),
        )
        batches = GlobalBatches(data).batches(start_step=1)
        assert [len(batch) for batch in batches.take(3)] == [2, 3, 2]
