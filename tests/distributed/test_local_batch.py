"""A replica's share of a batch: micro-batches, losses and weights that would be scaled wrongly, and
shares without examples."""

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
    accuracy,
    adam,
    assert_replicas_agree,
    both,
    convolutions,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    mlp,
    network,
    precision,
    sgd,
    train,
)

from ctl.control.evaluator import Evaluator
from ctl.data import GlobalBatches, InMemory
from ctl.distributed import local_batch
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep


def batches(arrays, size: int = BATCH, full: bool = False) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size, drop_remainder=full)


class TestMicroBatches:
    @pytest.mark.slow
    @pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
    @pytest.mark.parametrize("parts", [3, 8])
    def test_all_examples_in_order_of_sizes_that_differ_by_one(self, parts, static):
        def cut(examples):
            groups = local_batch.micro_batches({"x": examples}, parts)
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

        traced = tf.function(
            cut, input_signature=None if static else [tf.TensorSpec([None, 2], tf.int32)]
        )
        near = {1, parts - 1, parts, parts + 1, 2 * parts - 1, 2 * parts, 19}  # each is traced
        for count in sorted(near) if static else range(20):
            values = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
            joined, sizes = traced(tf.constant(values, shape=[count, 2]))
            np.testing.assert_array_equal(joined, values)
            assert len(sizes) == max(1, min(parts, count))
            assert max(sizes) - min(sizes) <= 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("replicas", "count", "model", "parts"),
        [(1, STEPS * BATCH, mlp, 5), (2, PARTIAL, convolutions, 3)],
    )
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
                return keras_loss(batch["labels"], self.model(batch["views"]))

            def count(self, batch):
                return super().count((batch["views"], None))

        def with_views(batch):
            views = tf.repeat(batch["features"], 2, axis=0)
            length = 2 * BATCH if full else None
            return {**batch, "views": tf.ensure_shape(views, [length, FEATURES])}

        features, labels = examples(4 * BATCH)
        views = batches({"features": features, "labels": labels}, full=full).map(with_views)
        step = Step(mlp(), adam()(), accumulate_steps=2, jit_compile=jit_compile)
        with pytest.raises(
            UsageError, match="accumulate_steps cannot split tensors with different"
        ):
            Loop(step, views, strategy=tf.distribute.get_strategy()).train(1)

    def test_what_has_no_examples_is_in_each(self):
        """A scalar and None; and a tensor of unknown rank is cut as others are."""

        @tf.function(input_signature=[tf.TensorSpec([6]), tf.TensorSpec([]), tf.TensorSpec(None)])
        def cut(examples, scalar, unknown):
            ((number, micro_batch),) = local_batch.micro_batches(
                (examples, scalar, unknown, None), 3
            )
            assert number == 3
            return micro_batch(tf.constant(1))

        values = tf.range(6.0), 7.0, tf.reshape(tf.range(12.0), [6, 2])
        examples, scalar, unknown, none = cut(*values)
        assert none is None and examples.numpy().tolist() == [2, 3] and scalar == 7
        assert unknown.numpy().tolist() == [[4, 5], [6, 7]]

    def test_sparse_tensors_are_refused(self):
        with pytest.raises(UsageError, match="cannot split sparse tensors"):
            local_batch.micro_batches(tf.sparse.from_dense(np.eye(4)), 2)


NOT_THOSE_OF_EXAMPLES = {
    "mean": tf.reduce_mean,
    "column": lambda losses: losses[:, None],
    "one": lambda losses: losses[:1],
    "twice": lambda losses: tf.repeat(losses, 2),
    "square": lambda losses: losses[:, None] + losses,
    "ragged": lambda losses: tf.RaggedTensor.from_row_lengths(
        losses, tf.ones_like(losses, tf.int32)
    ),
}


class TestShapes:
    @pytest.mark.slow
    def test_weights_with_an_axis_more(self, mirrored):
        """[n, 1] is [n]: it was broadcast against the losses to [n, n]."""
        weights = np.random.default_rng(2).integers(0, 3, STEPS * BATCH).astype(np.float32)
        features, labels = examples()
        results = []
        for shape in ([-1], [-1, 1]):
            data = batches((features, labels, weights.reshape(shape)), full=True)
            loop = make_loop(mirrored(2), data=data, seed=0)
            loop.train(STEPS)
            results.append([*loop.step.model.get_weights(), loop.step.results()["accuracy"]])
        assert largest_difference(*results) == 0

    def test_weights_of_unknown_rank(self):
        features, labels = examples()
        weights = np.random.default_rng(2).integers(0, 3, STEPS * BATCH).astype(np.float32)
        results = []
        for known in (True, False):
            data = batches((features, labels, weights), full=True)
            if not known:
                data = data.map(
                    lambda x, y, w: (x, y, tf.numpy_function(lambda w: w[:, None], [w], tf.float32))
                )
            keras.utils.set_random_seed(0)
            step = TrainStep(mlp(), adam()())  # metrics of Keras take no weights of unknown rank
            Loop(step, data, strategy=tf.distribute.get_strategy()).train(STEPS)
            results.append(step.model.get_weights())
        assert largest_difference(*results) == 0

    @pytest.mark.parametrize("shape", [[BATCH, 2], [BATCH, 1, 1], [BATCH, BATCH]], ids=str)
    def test_weights_of_no_example_are_refused(self, mirrored, shape):
        data = tf.data.Dataset.from_tensors((*(a[:BATCH] for a in examples()), np.ones(shape)))
        with pytest.raises(UsageError, match=r"weights of a batch have shape .*\[n\] or \[n, 1\]"):
            make_loop(mirrored(1), data=data).train(1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("change", "replicas", "full", "jit_compile"),
        [
            *((name, 2, False, False) for name in NOT_THOSE_OF_EXAMPLES),
            # The number of these may be known only when the step runs.
            *((name, 1, True, False) for name in ("one", "twice")),
            *((name, 1, False, True) for name in ("one", "twice")),
            ("twice", 2, True, True),
        ],
    )
    def test_losses_that_are_not_those_of_examples_are_refused(
        self, mirrored, change, replicas, full, jit_compile
    ):
        class Step(TrainStep):
            def loss(self, batch):
                losses, outputs = super().loss(batch)
                return NOT_THOSE_OF_EXAMPLES[change](losses), outputs

        loop = make_loop(
            mirrored(replicas),
            step_class=Step,
            data=batches(examples(), full=full),
            jit_compile=jit_compile,
        )
        with pytest.raises(UsageError, match="one loss per example") as error:
            loop.train(STEPS)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("change", [tf.reduce_mean, lambda losses: losses[:1]])
    def test_in_evaluation_too(self, mirrored, change):
        class Step(EvalStep):
            def loss(self, batch):
                return change(super().loss(batch)[0])

        with mirrored(2).scope():
            step = Step(mlp())
        with pytest.raises(UsageError, match="one loss per example"):
            Evaluator(step, batches(examples()), strategy=mirrored(2)).run()

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


class Forgets(TrainStep):
    def loss(self, batch):
        features, labels, _ = batch
        return keras_loss(labels, self.model(features, training=self.training))


class Uses(TrainStep):
    def loss(self, batch):
        weights = tf.cond(tf.size(batch[1]) > 0, lambda: batch[2], lambda: tf.zeros_like(batch[2]))
        return weights * Forgets.loss(self, batch)


class ForgetsInEvaluation(EvalStep):
    loss = Forgets.loss


class TestThirdPart:
    def data(self, third):
        return tf.data.Dataset.from_tensors((*examples(BATCH), third)).repeat()

    @pytest.mark.parametrize("kind", [TrainStep, Uses])
    @pytest.mark.parametrize("dtype", ["int64", "uint8"])
    def test_of_integers_is_refused(self, kind, dtype):
        loop = make_loop(step_class=kind, data=self.data(np.arange(BATCH).astype(dtype)))
        with pytest.raises(UsageError, match=f"^the weights .* have dtype {dtype}: .*float32; if"):
            loop.train(1)

    def test_may_be_a_mask(self):
        results = []
        for dtype in (bool, np.float32):
            data = self.data((np.arange(BATCH) % 3 > 0).astype(dtype))
            results.append(make_loop(data=data, seed=1).train(3)["loss"])
        assert results[0] == results[1]

    def test_weighs_the_losses_of_an_own_loss(self, mirrored):
        data = self.data(np.linspace(0, 1, BATCH, dtype=np.float32))
        own, plain = (make_loop(step_class=k, data=data, seed=1) for k in (Uses, TrainStep))
        assert own.train(3)["loss"] == pytest.approx(plain.train(3)["loss"], rel=1e-6)
        for options in ({}, {"accumulate_steps": 2}, {"jit_compile": True}):
            loop = make_loop(mirrored(2), step_class=Forgets, data=data, **options)
            with pytest.raises(UsageError, match=r"^loss\(\) of Forgets does not use the weights"):
                loop.train(1)
        evaluator = Evaluator(ForgetsInEvaluation(mlp()), data.take(1))
        with pytest.raises(UsageError, match=r"^loss\(\) of ForgetsInEvaluation does not use"):
            evaluator.run()


class TestPowerOfTwo:
    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_is_the_largest_up_to_the_count(self, jit_compile):
        function = tf.function(local_batch.power_of_two, jit_compile=jit_compile)
        counts = [0.0, 0.3, 1.0, 1.9, 2.0, 5.0, 63.99, 64.0, 1e9, -5.0, np.inf, -np.inf, np.nan]
        expected = [1, 0.25, 1, 1, 2, 4, 32, 64, 2**29, 4, 1, 1, 1]
        assert [float(function(tf.constant(c))) for c in counts] == expected
        for dtype in (tf.int32, tf.int64, tf.float64, tf.float16):
            assert float(local_batch.power_of_two(tf.constant(17, dtype))) == 16

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


# Empty shares


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


def fragile() -> keras.Model:
    """Of an example of zeros, its unit length makes NaN, and so do its gradients; with no examples,
    its convolution gives a tensor of a wrong shape, whose gradient aborts the process."""
    layers = keras.layers
    return network(
        layers.Lambda(lambda x: x / tf.norm(x, axis=-1, keepdims=True)),
        layers.Reshape([2, 2, 3]),
        layers.Conv2D(4, 2, activation="tanh"),
        layers.Flatten(),
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


SGD = sgd()  # one object, so that tests share a reference


def still() -> keras.Optimizer:
    """Leaves the weights as they are."""
    return keras.optimizers.SGD(0.0)


class TestNoExamples:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [{"accumulate_steps": 3, "bytes_per_pack": 200}, {"jit_compile": True}],
        ids=lambda options: next(iter(options)),
    )
    def test_training_equals_one_device(self, mirrored, options):
        ours, theirs, *_ = both(
            mirrored(4), SGD, examples(PARTIAL), make_model=fragile, full=False, **options
        )
        assert largest_difference(ours.get_weights(), theirs.get_weights()) <= 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("parts", [1, 3])
    def test_statistics_are_weighted_by_examples(self, mirrored, parts):
        """Not by the weights of examples, which BatchNorm does not know; the last are all 1."""
        features, labels = examples(5)
        weights = np.concatenate([[1.0, -0.9, 1.0, -0.9, 0.0], np.zeros(5), np.ones(5)])
        arrays = np.tile(features, [3, 1]), np.tile(labels, 3), weights
        data = batches(arrays, 5)  # TensorFlow splits them as 2, 2, 1 and 0
        loop = make_loop(
            mirrored(4), model=normalized, optimizer=still, data=data, accumulate_steps=parts
        )
        loop.train(3)
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
        norm = loop.step.model.layers[0]
        np.testing.assert_allclose(norm.moving_mean.numpy(), mean, atol=1e-6)
        np.testing.assert_allclose(norm.moving_variance.numpy(), variance, atol=1e-6)
        assert_replicas_agree(loop.strategy, norm.variables)

    @pytest.mark.slow
    def test_statistics_in_float16_do_not_overflow(self, mirrored):
        features, labels = examples(514)
        data = batches((20 * features, labels), 514)
        with precision("float16"):
            loop = make_loop(mirrored(2), model=normalized, optimizer=still, data=data)
        loop.train(9)
        variance = loop.step.model.layers[0].moving_variance
        assert variance.dtype == "float16"
        assert variance.numpy().min() > 200 and variance.numpy().max() < 600

    @pytest.mark.slow
    def test_resumed_bit_for_bit(self, mirrored, tmp_path):
        """Masks of Dropout, too: replicas that have drawn fewer of them stay in step."""
        strategy = mirrored(2)
        loop = make_loop(
            strategy,
            model=normalized,
            data=batches(examples(BATCH + 1)),
            accumulate_steps=3,
            directory=tmp_path,
        )

        def bits() -> list[np.ndarray]:
            variables = [v for group in loop.step.state().values() for v in group]
            copies = [strategy.experimental_local_results(v) for v in variables]
            return [copy.numpy() for group in copies for copy in group]

        loop.train(4)  # the last of them was of 5 examples
        loop.save(wait=True)
        loop.train(7)
        straight = bits()
        assert loop.restore().step == 4
        loop.train(7)
        loop.checkpoints.close()
        for ours, theirs in zip(bits(), straight, strict=True):
            np.testing.assert_array_equal(ours, theirs)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["resident", "tf.data"])
    def test_evaluation(self, mirrored, kind):
        """65 examples in batches of 16: the last has one."""
        features, labels = examples(65)
        strategy = mirrored(4)
        with strategy.scope():
            model = normalized_convolutions()
            step = EvalStep(model, metrics=[accuracy()])
        data = batches((features, labels))
        if kind == "resident":
            data = InMemory((features, labels), global_batch_size=BATCH, training=False)
        logits = model(features).numpy()
        want = {
            "loss": keras_loss(labels, logits).numpy().mean(),
            "accuracy": (logits.argmax(axis=1) == labels).mean(),
        }
        assert Evaluator(step, data, strategy=strategy).run() == pytest.approx(want, rel=1e-6)

    @pytest.mark.slow
    def test_metrics_see_no_example_that_stands_for_none(self, mirrored):
        """That of the class, and one of one's own, of a sum and a number: 3 steps with 5
        examples."""

        class Step(TrainStep):
            def loss(self, batch):
                losses, logits = super().loss(batch)
                seen = tf.reduce_sum(tf.ones_like(losses))
                return losses, {"logits": logits, "seen": seen, "one": 1.0}

            def update_metrics(self, batch, outputs):
                accuracy, own = self.metrics
                accuracy.update_state(batch[1], outputs["logits"], *batch[2:])
                own.update_state(outputs["one"], sample_weight=outputs["seen"])

        with mirrored(4).scope():
            metrics = [accuracy(), keras.metrics.Mean("mean")]
            step = Step(convolutions(), adam()(), metrics=metrics)
        Loop(step, batches(examples(5), 5), strategy=mirrored(4)).train(3)
        counts = [float(tf.convert_to_tensor(m.variables[1].value)) for m in step.metrics]
        assert counts == [3 * 5, 3 * 5]

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
            data = batches((tf.sparse.from_dense(features), labels))
            loop = make_loop(mirrored(replicas), step_class=Step, data=data, seed=0)
            loop.train(STEPS)
            results.append(loop.step.model.get_weights())
        assert largest_difference(*results) <= 1e-6

    @pytest.mark.slow
    def test_features_of_any_kind(self, mirrored):
        """Ragged tensors and strings: two steps on 5 examples of different lengths."""
        lengths = [1, 4, 2, 3, 2]
        words = tf.ragged.constant([[str(i) for i in range(n)] for n in lengths])

        class Step(TrainStep):
            def loss(self, batch):
                (ragged, strings), labels = batch

                def distance(texts):
                    numbers = tf.strings.to_number(texts)
                    numbers = tf.reduce_sum(numbers, axis=1, keepdims=True)
                    outputs = self.model(numbers) - tf.cast(labels, tf.float32)
                    return tf.reduce_sum(outputs**2, 1)

                return distance(ragged) + distance(tf.strings.split(strings))

            def count(self, batch):
                return tf.cast(tf.shape(batch[1])[0], tf.float32)

        features = words, tf.strings.reduce_join(words, 1, separator=" ")
        weights = []
        for replicas in (1, 4):
            strategy = mirrored(replicas)
            with strategy.scope():
                model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
                model.set_weights([np.ones([1, 1]), np.zeros([1])])
                step = Step(model, keras.optimizers.SGD(0.01))
            data = batches((features, tf.range(5)[:, None]), 5)
            Loop(step, data, strategy=strategy).train(2)
            weights.append(model.get_weights())
        assert largest_difference(*weights) <= 1e-6
        assert abs(weights[0][0] - 1) > 1e-3

    @pytest.mark.slow
    def test_synchronized_batch_norm_is_refused(self, mirrored):
        synchronized = lambda: normalized(synchronized=True)  # noqa: E731
        loop = make_loop(mirrored(2), model=synchronized, data=batches(examples(BATCH + 1)))
        with pytest.raises(UsageError, match="a replica got no examples .*drop_remainder"):
            loop.train(STEPS)

    def test_elements_of_ragged_tensors_and_of_scalars(self):
        words = tf.ragged.constant([[1, 2], [3], [4, 5, 6]])
        assert len(list(GlobalBatches(tf.data.Dataset.from_tensors(words)).batches().take(2))) == 2
        assert len(list(GlobalBatches(batches(words, 2), training=False).batches())) == 2
        numbers = tf.data.Dataset.range(3)
        assert len(list(GlobalBatches(numbers, training=False).batches())) == 3

    def test_elements_without_examples_are_left_out(self):
        sizes = [3, 0, 2, 0]
        data = tf.data.Dataset.from_generator(
            lambda: (np.zeros([n, 2], np.float32) for n in sizes),
            output_signature=tf.TensorSpec([None, 2]),
        )
        found = GlobalBatches(data).batches(start_step=1).take(3)
        assert [len(batch) for batch in found] == [2, 3, 2]
