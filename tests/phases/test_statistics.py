"""State that the forward pass updates: moving statistics, their averages, and that of a layer of
the user."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    assert_replicas_agree,
    examples,
    make_loop,
    network,
    normalized,
    sgd,
)

from ctl.data import InMemory
from ctl.errors import UsageError
from ctl.step import TrainStep


class Centre(keras.layers.Layer):
    """Keeps a moving mean of its inputs, and subtracts it."""

    def __init__(self, **of_weight):
        super().__init__()
        self.of_weight = of_weight

    def build(self, shape):
        self.centre = self.add_weight(
            shape=shape[-1:], trainable=False, initializer="zeros", name="centre", **self.of_weight
        )

    def call(self, x):
        self.centre.assign(0.5 * self.centre + 0.5 * tf.reduce_mean(x, axis=0))
        return x - self.centre


def centred(**of_weight):
    return lambda: network(Centre(**of_weight))


class Averaging(TrainStep):
    def replica_statistics(self):
        return [*super().replica_statistics(), self.model.layers[0].centre.value]


@pytest.mark.slow
def test_variances_of_features_far_from_zero(mirrored):
    """The spread of the replicas' means is small beside the mean, in float32."""
    features, labels = examples(BATCH)
    features += np.float32(1000.0)
    data = InMemory((features, labels), global_batch_size=BATCH)
    loop = make_loop(mirrored(4), model=normalized(momentum=0.5), optimizer=sgd(0.0), data=data)
    loop.train(20)
    norm = loop.step.model.layers[0]
    np.testing.assert_allclose(norm.moving_mean.numpy(), features.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm.moving_variance.numpy(), features.var(0), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "synchronized"), [(1, False), (2, False), (2, True)])
def test_statistics_are_averaged_with_the_weights(mirrored, replicas, synchronized):
    loop = make_loop(
        mirrored(replicas),
        model=normalized(momentum=0.5, synchronized=synchronized),
        optimizer=sgd(0.0),
        ema_decay=0.75,
    )
    model = loop.step.model
    mean, variance = model.layers[0].moving_mean, model.layers[0].moving_variance
    expected: list[np.ndarray] = []
    for step in range(4):
        loop.train(step + 1)
        now = [mean.numpy(), variance.numpy()]
        expected = [0.75 * a + 0.25 * b for a, b in zip(expected or now, now, strict=True)]
    with loop.step.updater.averaged():
        for variable, average in zip((mean, variance), expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), average, rtol=1e-5, atol=1e-6)
        assert np.abs(mean.numpy() - now[0]).max() > 1e-3
        assert_replicas_agree(mirrored(replicas), model.variables)
    np.testing.assert_array_equal(mean.numpy(), now[0])


class TestStateOfALayer:
    def test_that_differs_between_replicas_is_refused(self, mirrored):
        loop = make_loop(mirrored(2), model=centred())
        with pytest.raises(UsageError, match=r"^variable \S*centre/centre differs between repl"):
            loop.train(1)

    def test_is_refused_when_it_is_saved_at_the_latest(self, mirrored, tmp_path):
        """All replicas see the same examples at first."""
        features, labels = examples(BATCH)
        same = np.tile(features[:1], [BATCH, 1]), labels
        batches = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
        batches = tf.data.Dataset.from_tensors(same).concatenate(batches)
        loop = make_loop(mirrored(2), model=centred(), data=batches, directory=tmp_path)
        loop.train(1)
        loop.save()
        loop.train(2)
        with pytest.raises(UsageError, match="differs between replicas"):
            loop.save()

    def test_is_averaged_if_the_step_says_so(self, mirrored):
        data = examples(BATCH)
        loop = make_loop(
            mirrored(2),
            model=centred(),
            step_class=Averaging,
            data=InMemory(data, global_batch_size=BATCH),
        )
        loop.train(1)
        centre = loop.step.model.layers[0].centre
        np.testing.assert_allclose(centre.numpy(), 0.5 * data[0].mean(0), atol=1e-6)
        assert_replicas_agree(mirrored(2), [centre])

    def test_is_that_of_replica_0_if_the_layer_says_so(self, mirrored):
        features, labels = examples(BATCH)
        batches = tf.data.Dataset.from_tensors((features, labels))  # in this order
        model = centred(aggregation="only_first_replica")
        loop = make_loop(mirrored(2), model=model, data=batches)
        loop.train(1)
        centre = loop.step.model.layers[0].centre
        first = 0.5 * features[: BATCH // 2].mean(0)
        np.testing.assert_allclose(centre.numpy(), first, atol=1e-6)
        assert_replicas_agree(mirrored(2), [centre])

    @pytest.mark.parametrize(
        ("replicas", "aggregation"),
        [
            *[(1, "none"), (1, "only_first_replica")],
            *[(2, "none"), (2, "mean"), (2, "sum"), (2, "only_first_replica")],
        ],
    )
    def test_is_as_before_after_a_skipped_step(self, mirrored, replicas, aggregation):
        features, labels = examples(BATCH)
        poisoned = features.copy()
        poisoned[3, 2] = np.nan
        batches = [tf.data.Dataset.from_tensors((x, labels)) for x in (features, poisoned)]
        loop = make_loop(
            mirrored(replicas),
            model=centred(aggregation=aggregation),
            step_class=Averaging if aggregation == "none" else TrainStep,
            data=batches[0].concatenate(batches[1]),
            on_nan="skip",
        )
        loop.train(1)
        centre = loop.step.model.layers[0].centre
        before = centre.numpy()
        loop.train(2)
        assert loop.step.updater.skipped_so_far() == 1
        np.testing.assert_array_equal(centre.numpy(), before)
        assert_replicas_agree(mirrored(replicas), [centre])
