"""A variable with a value on each replica is saved part by part, and restored where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, make_loop

from ctl import testing
from ctl.errors import CheckpointError, UsageError
from ctl.step import TrainStep


class ErrorFeedback(TrainStep):
    """Sums signs of gradients, and keeps what they leave out (Seide et al. 2014)."""

    on_resize = "refuse", "refuse", "refuse", "refuse"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.left = [
            self.variable(f"left{n}", v.shape, per_replica=True, on_resize=how)
            for n, (v, how) in enumerate(
                zip(self.model.trainable_variables, self.on_resize, strict=True)
            )
        ]
        self.updates = self.variable("updates", [], "int64")

    def sum_gradients(self, gradients):
        sent = []
        for gradient, left in zip(gradients, self.left, strict=True):
            whole = gradient + left.read_value()
            sent.append(tf.reduce_mean(tf.abs(whole)) * tf.sign(whole))
            left.assign(whole - sent[-1])
        self.updates.assign_add(1)
        return super().sum_gradients(sent)


class Resizable(ErrorFeedback):
    """One half of the variables is summed, the other begins anew."""

    on_resize = "sum", "zero", "sum", "zero"


def make(strategy, step_class=ErrorFeedback, **options):
    return make_loop(strategy, step_class=step_class, **options)


def left(loop) -> list[np.ndarray]:
    """The values of all replicas, [replicas, ...]."""
    return [
        np.stack([one.numpy() for one in loop.strategy.experimental_local_results(variable)])
        for variable in loop.step.left
    ]


def saved(loop, steps: int) -> None:
    loop.train(steps)
    loop.save(wait=True)
    loop.checkpoints.close()


@pytest.mark.slow
def test_a_resume_changes_no_bit():
    def loop(strategy, checkpoints):
        return make(strategy, checkpoints=checkpoints, jit_compile=True, on_nan="skip")

    testing.check_resumed(loop, 2)


@pytest.mark.slow
def test_each_replica_gets_its_own(mirrored, tmp_path):
    first = make(mirrored(4), directory=tmp_path)
    saved(first, 3)
    wanted = left(first)
    assert np.abs(wanted[0][0] - wanted[0][3]).max() > 1e-4
    second = make(mirrored(4), directory=tmp_path)
    second.restore()
    for a, b in zip(wanted, left(second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(second.step.updates.numpy()) == 3


@pytest.mark.slow
def test_another_number_of_replicas(mirrored, tmp_path):
    """More and fewer."""
    first = make(mirrored(2), Resizable, directory=tmp_path / "resizable")
    saved(first, 3)
    for now in (4, 1):
        second = make(mirrored(now), Resizable, directory=tmp_path / "resizable")
        second.restore()
        for how, old, new in zip(Resizable.on_resize, left(first), left(second), strict=True):
            total = old.sum(axis=0) if how == "sum" else np.zeros_like(old[0])
            np.testing.assert_allclose(new[0], total, rtol=1e-5, atol=1e-7, err_msg=how)
            assert not np.abs(new[1:]).any()
        second.train(5)
        second.checkpoints.close()
    first = make(mirrored(2), directory=tmp_path / "refused")
    first.save(wait=True)
    first.checkpoints.close()
    with pytest.raises(CheckpointError, match=r"left0.*resume on as many, or .*on_resize='sum'"):
        make(mirrored(1), directory=tmp_path / "refused").restore()


@pytest.mark.slow
def test_a_skipped_update_changes_nothing(mirrored):
    features, labels = examples(2 * BATCH)
    features[BATCH] = np.nan  # on replica 0 of the second batch
    data = tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH)
    loop = make(mirrored(2), data=data, on_nan="skip")
    loop.train(1, total=2)
    before = left(loop)
    loop.train(2)
    assert loop.step.updater.skipped_so_far() == 1 == int(loop.step.updates.numpy())
    for a, b in zip(before, left(loop), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_cannot_be_is_refused(mirrored):
    step = make(mirrored(1)).step
    with pytest.raises(UsageError, match="on_resize='mean' is not one of refuse, sum, zero"):
        step.variable("mine", [], per_replica=True, on_resize="mean")
    with pytest.raises(UsageError, match="create the variables of a step before its loop"):
        step.variable("mine", [], per_replica=True)
    strategy = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"], "/cpu:0")
    with pytest.raises(UsageError, match="left0 cannot differ between replicas"):
        make(strategy)


def test_variables_apart_that_cannot_be(mirrored):
    class Apart(TrainStep):
        values = True

        def unsynchronized_variables(self):
            weights = self.model.trainable_variables
            return [v.value for v in weights] if self.values else weights

    class Keras(Apart):
        values = False

    with pytest.raises(UsageError, match="^Apart lets weights differ .* leave out ema_decay"):
        make_loop(mirrored(2), step_class=Apart, ema_decay=0.9)
    with pytest.raises(
        UsageError, match=r"^Keras.unsynchronized_variables\(\) must return the .value"
    ):
        make_loop(mirrored(2), step_class=Keras)
    central = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"])
    with pytest.raises(UsageError, match="^Apart needs a copy of its variables on each replica"):
        make_loop(central, step_class=Apart)
