"""A replica's share of a batch: micro-batches, no examples at all, and losses and weights of shapes
that would be scaled wrongly."""

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
    assert_replicas_agree,
    both,
    examples,
    largest_difference,
    make_loop,
    mlp,
    precision,
    train,
)

from ctl import share
from ctl.checkpoint import CheckpointManager
from ctl.data import GlobalBatches, InMemory
from ctl.errors import UsageError
from ctl.evaluator import Evaluator
from ctl.loop import Loop
from ctl.step import EvalStep, TrainStep

# 19 batches of 16 and one of 5: on 4 replicas 2, 2, 1 and no examples.
PARTIAL = (STEPS - 1) * BATCH + 5


def convolutions() -> keras.Model:
    """With no examples, a convolution gives a tensor of a wrong shape, and its gradient aborts the
    process."""
    return keras.Sequential(
        [
            keras.layers.Input([FEATURES]),
            keras.layers.Reshape([2, 2, 3]),
            keras.layers.Conv2D(4, 2, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


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


class TestMicroBatches:
    @pytest.mark.slow
    @pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
    @pytest.mark.parametrize("parts", [2, 3, 8])
    def test_all_examples_in_order_of_sizes_that_differ_by_one(self, parts, static):
        for count in range(1 if static else 0, 20):
            spec = tf.TensorSpec([count if static else None, 2], tf.int32)

            @tf.function(input_signature=[spec])
            def cut(examples):
                groups = share.micro_batches({"x": examples}, parts)
                sizes = tf.TensorArray(tf.int32, parts, element_shape=[])
                joined, done = tf.zeros([0, 2], tf.int32), 0
                for number, micro_batch in groups:
                    for part in tf.range(number):
                        tf.autograph.experimental.set_loop_options(
                            shape_invariants=[(joined, tf.TensorShape([None, 2]))]
                        )
                        piece = micro_batch(part)["x"]
                        joined = tf.concat([joined, piece], 0)
                        sizes = sizes.write(done, tf.shape(piece)[0])
                        done += 1
                return joined, sizes.stack()[:done]

            values = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
            joined, sizes = cut(tf.constant(values, shape=[count, 2]))
            np.testing.assert_array_equal(joined, values)
            assert len(sizes) == max(1, min(parts, count))
            assert max(sizes) - min(sizes) <= 1

    @pytest.mark.slow
    @pytest.mark.parametrize("replicas", [1, 2])
    @pytest.mark.parametrize("count", [STEPS * BATCH, PARTIAL], ids=["full", "partial"])
    @pytest.mark.parametrize("model", [mlp, convolutions])
    @pytest.mark.parametrize("parts", [3, 5])
    def test_compiled(self, mirrored, replicas, count, model, parts):
        """Micro-batches of two sizes; XLA took a slice of both sizes for one of the larger."""
        default = tf.distribute.get_strategy()
        strategy = default if replicas == 1 else mirrored(replicas)
        ours, theirs, *_ = both(
            strategy,
            adam(),
            examples(count),
            make_model=model,
            full=count != PARTIAL,
            jit_compile=True,
            accumulate_steps=parts,
        )
        assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 2e-6

    @pytest.mark.parametrize("jit_compile", [False, True], ids=["", "xla"])
    @pytest.mark.parametrize("full", [True, False], ids=["full", "partial"])
    def test_tensors_of_different_lengths_are_refused(self, full, jit_compile):
        """Two views of each example: which belong to a micro-batch, only the user knows."""

        class Step(TrainStep):
            def loss(self, batch):
                losses = keras.losses.sparse_categorical_crossentropy(
                    batch["labels"], self.model(batch["views"]), from_logits=True
                )
                return losses

            def count(self, batch):
                return super().count((batch["views"], None))

        features, labels = examples(4 * BATCH)
        data = tf.data.Dataset.from_tensor_slices({"features": features, "labels": labels})
        views = data.batch(BATCH, drop_remainder=full).map(
            lambda batch: {**batch, "views": tf.repeat(batch["features"], 2, axis=0)}
        )
        if full:
            views = views.map(
                lambda batch: {
                    **batch,
                    "views": tf.ensure_shape(batch["views"], [2 * BATCH, FEATURES]),
                }
            )
        step = Step(mlp(), adam()(), accumulate_steps=2, jit_compile=jit_compile)
        with pytest.raises(UsageError, match="accumulate_steps cannot cut tensors of different"):
            Loop(step, views, strategy=tf.distribute.get_strategy()).train(1)

    def test_what_has_no_examples_is_in_each(self):
        """A scalar and None; and a tensor of unknown rank is cut as others are."""

        @tf.function(input_signature=[tf.TensorSpec([6]), tf.TensorSpec([]), tf.TensorSpec(None)])
        def cut(examples, scalar, unknown):
            ((number, micro_batch),) = share.micro_batches((examples, scalar, unknown, None), 3)
            assert number == 3
            return micro_batch(tf.constant(1))

        values = tf.range(6.0), 7.0, tf.reshape(tf.range(12.0), [6, 2])
        examples, scalar, unknown, none = cut(*values)
        assert none is None and examples.numpy().tolist() == [2, 3] and scalar == 7
        assert unknown.numpy().tolist() == [[4, 5], [6, 7]]

    def test_sparse_tensors_are_refused(self):
        with pytest.raises(UsageError, match="cannot cut sparse tensors"):
            share.micro_batches(tf.sparse.from_dense(np.eye(4)), 2)


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


class Returns(TrainStep):
    """A loss of the shape that ``change`` makes of [n]."""

    change = staticmethod(lambda losses: losses)

    def loss(self, batch):
        losses, outputs = super().loss(batch)
        return self.change(losses), outputs


class TestShapes:
    @pytest.mark.slow
    def test_weights_with_an_axis_more(self, mirrored):
        """[n, 1] is [n]: it was broadcast against the losses to [n, n]."""
        weights = np.random.default_rng(2).integers(0, 3, STEPS * BATCH)
        features, labels = examples()
        results = []
        for shape in ([-1], [-1, 1]):
            keras.utils.set_random_seed(0)
            with mirrored(2).scope():
                metric = keras.metrics.SparseCategoricalAccuracy("accuracy")
            loop = train(
                mirrored(2),
                mlp,
                adam(),
                (features, labels, weights.reshape(shape)),
                step_class=lambda *args, metric=metric: TrainStep(*args, metrics=[metric]),
            )
            results.append([*loop.step.model.get_weights(), loop.step.results()["accuracy"]])
        assert largest_difference(*results) == 0

    def test_weights_of_unknown_rank(self, mirrored):
        features, labels = examples()
        weights = np.random.default_rng(2).integers(0, 3, STEPS * BATCH)
        results = []
        for known in (True, False):
            keras.utils.set_random_seed(0)
            data = tf.data.Dataset.from_tensor_slices((features, labels, weights))
            data = data.batch(BATCH, drop_remainder=True)
            if not known:
                data = data.map(
                    lambda x, y, w: (x, y, tf.numpy_function(lambda w: w[:, None], [w], tf.int64))
                )
            step = TrainStep(mlp(), adam()())
            Loop(step, data, strategy=tf.distribute.get_strategy()).train(STEPS)
            results.append(step.model.get_weights())
        assert largest_difference(*results) == 0

    @pytest.mark.parametrize("shape", [[BATCH, 2], [BATCH, 1, 1], [BATCH, BATCH]], ids=str)
    def test_weights_of_no_example_are_refused(self, mirrored, shape):
        data = tf.data.Dataset.from_tensors((*(a[:BATCH] for a in examples()), np.ones(shape)))
        with mirrored(1).scope():
            step = TrainStep(mlp(), adam()())
        with pytest.raises(UsageError, match=r"weights of a batch have shape .*\[n\] or \[n, 1\]"):
            Loop(step, data, strategy=mirrored(1)).train(1)

    @pytest.mark.slow
    @pytest.mark.parametrize("replicas", [1, 2])
    @pytest.mark.parametrize("full", [True, False], ids=["full", "partial"])
    @pytest.mark.parametrize("jit_compile", [False, True], ids=["", "xla"])
    @pytest.mark.parametrize(
        "change",
        [
            tf.reduce_mean,
            lambda losses: losses[:, None],
            lambda losses: losses[:1],
            lambda losses: tf.repeat(losses, 2),
            lambda losses: losses[:, None] + losses,
            lambda losses: tf.RaggedTensor.from_row_lengths(losses, tf.ones_like(losses, tf.int32)),
        ],
        ids=["mean", "column", "one", "twice", "square", "ragged"],
    )
    def test_losses_that_are_not_those_of_examples_are_refused(
        self, mirrored, replicas, full, jit_compile, change
    ):
        class Step(Returns):
            pass

        Step.change = staticmethod(change)
        with pytest.raises(UsageError, match="one loss for each example") as error:
            train(
                mirrored(replicas),
                mlp,
                adam(),
                examples(),
                full=full,
                step_class=Step,
                jit_compile=jit_compile,
            )
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("change", [tf.reduce_mean, lambda losses: losses[:1]])
    def test_in_evaluation_too(self, mirrored, change):
        class Step(EvalStep):
            def loss(self, batch):
                return change(super().loss(batch)[0])

        data = tf.data.Dataset.from_tensor_slices(examples()).batch(BATCH)
        with mirrored(2).scope():
            step = Step(mlp())
        with pytest.raises(UsageError, match="one loss for each example"):
            Evaluator(step, data, strategy=mirrored(2)).run()

    @pytest.mark.slow
    def test_as_many_losses_as_are_counted(self, mirrored):
        """Two views of each example, counted as two, are one batch of twice the size."""

        class Views(TrainStep):
            def loss(self, batch):
                losses, _ = super().loss(batch)
                return tf.concat([losses, losses], 0)

            def count(self, batch):
                return 2 * super().count(batch)

        results = []
        for step_class in (TrainStep, Views):
            keras.utils.set_random_seed(0)
            loop = train(mirrored(2), mlp, adam(), examples(), step_class=step_class)
            results.append(loop.step.model.get_weights())
        assert largest_difference(*results) <= 1e-6


class TestPowerOfTwo:
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_is_the_largest_up_to_the_count(self, jit_compile):
        function = tf.function(share.power_of_two, jit_compile=jit_compile)
        counts = [0.0, 0.3, 1.0, 1.9, 2.0, 5.0, 63.99, 64.0, 1e9, -5.0, np.inf, -np.inf, np.nan]
        expected = [1, 0.25, 1, 1, 2, 4, 32, 64, 2**29, 4, 1, 1, 1]
        assert [float(function(tf.constant(c))) for c in counts] == expected
        for dtype in (tf.int32, tf.int64, tf.float64, tf.float16):
            assert float(share.power_of_two(tf.constant(17, dtype))) == 16

    def test_counts_of_any_type(self):
        """A step may count in integers; what is divided before the backward pass is multiplied
        after it."""

        def counting(dtype):
            class Counting(TrainStep):
                def count(self, batch):
                    return tf.cast(tf.shape(batch[0])[0], dtype)

            return Counting

        trained = []
        for kind in (TrainStep, counting(tf.int32), counting(tf.float64)):
            loop = make_loop(step_class=kind, seed=0)
            loop.train(5)
            trained.append(loop.step.model.get_weights())
        for weights in trained[1:]:
            assert largest_difference(weights, trained[0]) <= 1e-6


class TestLabels:
    """Labels that are no class of the model: seen where they are in memory, else in the step."""

    def made(self, labels, *, in_memory, step_class=TrainStep, **options):
        features = np.zeros([len(labels), FEATURES], np.float32)
        arrays = features, np.array(labels)
        data = InMemory(arrays, global_batch_size=4)
        if not in_memory:
            data = tf.data.Dataset.from_tensor_slices(arrays).batch(4)
        return make_loop(data=data, step_class=step_class, **options)

    @pytest.mark.parametrize(("wrong", "dtype"), [(-1, "int64"), (CLASSES, "uint8")])
    def test_in_memory(self, wrong, dtype):
        labels = np.array([0, CLASSES - 1, wrong, 1], dtype)
        reason = f"^label {labels[2]} of example 2 is no class: .* 5 outputs, .* 0 to 4 .1 of 4"
        with pytest.raises(UsageError, match=reason):
            self.made(labels, in_memory=True)
        with pytest.raises(UsageError, match=reason):
            data = InMemory((np.zeros([4, FEATURES]), labels), global_batch_size=4, training=False)
            Evaluator(EvalStep(mlp()), data)

    @pytest.mark.parametrize("wrong", [CLASSES, 2**32 + 1])
    def test_in_the_step(self, wrong):
        loop = self.made([0, wrong, 1, 1], in_memory=False)
        with pytest.raises(
            UsageError, match=f"^label {wrong} is no class: the model has 5 outputs, .* 4$"
        ):
            loop.train(1)

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_under_xla(self, mirrored, replicas):
        """It computes NaN where the CPU's kernel fails."""
        labels = [0] * 9 + [CLASSES + 2] + [0] * 6
        loop = self.made(
            labels, in_memory=False, jit_compile=True, strategy=mirrored(replicas), steps_per_loop=2
        )
        with pytest.raises(
            UsageError,
            match="^label 7 of example 1 in the batch of step 3 is no class: .* 5 outputs, .* 0 to",
        ):
            loop.train(4)

    def test_a_check_that_waits_for_the_labels_has_not_failed(self):
        message = (
            "Received a label value of 3 which is outside the valid range of [0, 3).\n"
            "\t [[{{node while/SparseSoftmaxCrossEntropyWithLogits}}]]\n"
            "\t [[while/body/_1/ctl_one_loss_for_each_example/Reshape/_258]]"
        )
        with pytest.raises(UsageError, match="^label 3 is no class"), share.refusals():
            raise tf.errors.InvalidArgumentError(None, None, message)

    def test_labels_that_mean_something_else(self):
        class Shifted(TrainStep):
            def loss(self, batch):
                features, labels = batch
                return super().loss((features, labels - 10))

            def update_metrics(self, batch, outputs):
                pass

        labels = [10, 11, 14, 12]
        assert self.made(labels, in_memory=True, step_class=Shifted).train(2)["loss"] > 0
