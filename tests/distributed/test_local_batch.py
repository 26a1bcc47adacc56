"""A replica's share of a batch: micro-batches, losses and weights that would be scaled wrongly."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    FEATURES,
    PARTIAL,
    STEPS,
    adam,
    both,
    convolutions,
    examples,
    keras_loss,
    largest_difference,
    make_loop,
    mlp,
    train,
)

from ctl.control.evaluator import Evaluator
from ctl.distributed import local_batch
from ctl.errors import UsageError
from ctl.loop import Loop
from ctl.phases.base_step import EvalStep
from ctl.step import TrainStep


class TestMicroBatches:
    @pytest.mark.slow
    @pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
    @pytest.mark.parametrize("parts", [2, 3, 8])
    def test_all_examples_in_order_of_sizes_that_differ_by_one(self, parts, static):
        for count in range(1 if static else 0, 20):
            spec = tf.TensorSpec([count if static else None, 2], tf.int32)

            @tf.function(input_signature=[spec])
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
        with pytest.raises(UsageError, match="cannot cut sparse tensors"):
            local_batch.micro_batches(tf.sparse.from_dense(np.eye(4)), 2)


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
        weights = np.random.default_rng(2).integers(0, 3, STEPS * BATCH).astype(np.float32)
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
        weights = np.random.default_rng(2).integers(0, 3, STEPS * BATCH).astype(np.float32)
        results = []
        for known in (True, False):
            keras.utils.set_random_seed(0)
            data = tf.data.Dataset.from_tensor_slices((features, labels, weights))
            data = data.batch(BATCH, drop_remainder=True)
            if not known:
                data = data.map(
                    lambda x, y, w: (x, y, tf.numpy_function(lambda w: w[:, None], [w], tf.float32))
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
        with pytest.raises(UsageError, match=f"^the third part .* has {dtype}: .*float32; or, if"):
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
