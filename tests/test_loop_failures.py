"""What can go wrong in a loop: NaN, skipped updates, failing writes, batches that do not fit."""

from __future__ import annotations

from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, CLASSES, FEATURES, assert_replicas_agree, examples, make_loop, mlp

from ctl.base import durable
from ctl.base.actions import Every
from ctl.data import InMemory
from ctl.data.sources import Items
from ctl.data.streaming import Streaming
from ctl.errors import CheckpointError, DivergedError, UsageError
from ctl.phases import labels
from ctl.step import TrainStep


def poisoned(*steps: int) -> tf.data.Dataset:
    """The last example of these batches is NaN: it goes to the last replica."""
    features, labels = examples()
    for step in steps:
        features[step * BATCH - 1] = np.nan
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH, drop_remainder=True)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "step"), [(1, 12), (4, 12), (2, 14), (2, 8), (2, 1)])
def test_nan_names_its_step_and_the_last_good_checkpoint(mirrored, tmp_path, replicas, step):
    """In calls of up to 7 steps that end at 7, 10, 14: in the middle, at the end, at the start."""
    saves = Every(lambda status: loop.save(), steps=10)
    loop = make_loop(
        mirrored(replicas),
        data=poisoned(step),
        directory=tmp_path,
        actions=[saves],
        steps_per_loop=7,
    )
    good = tmp_path / "step-0000000010" if step > 10 else "none"
    with pytest.raises(DivergedError) as error:
        loop.train(20)
    assert f"the loss is nan at step {step}; last good checkpoint: {good};" in str(error.value)
    row = f"example {BATCH - 1} in the batch of step {step} has a NaN or Inf (1 of {BATCH} have)"
    assert str(error.value).endswith(f"{row}: mend the data, or leave them out")
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3
    loop.checkpoints.close()
    assert [s.step for s in loop.checkpoints.all()] == ([10] if step > 10 else [])


def test_a_nan_in_memory_is_found(caplog):
    features, labels = examples(BATCH)
    features[2], features[5] = np.inf, np.nan
    loop = make_loop(data=InMemory((features, labels), global_batch_size=BATCH))
    with pytest.raises(DivergedError, match=rf"; example 2 has a NaN or Inf \(2 of {BATCH} have"):
        loop.train(1)
    assert "example 2 has a NaN or Inf (2 of" in caplog.text  # at the start: a relu may hide them


@pytest.mark.parametrize("end", [4, 8])
def test_a_nan_that_relu_hides_is_found(end):
    """The losses stay finite; the weights of the first layer do not."""

    def hiding():
        first, last = keras.layers.Dense(8, "relu"), keras.layers.Dense(CLASSES)
        return keras.Sequential([keras.Input([FEATURES]), first, last])

    loop = make_loop(data=poisoned(3), model=hiding, evaluate=BATCH)
    row = f"example {BATCH - 1} in the batch of step 3 has a NaN or Inf"
    with pytest.raises(DivergedError, match=f"kernel is not finite at step 4; .*; {row}"):
        loop.train_and_evaluate(end, evaluate_every=4)
    assert np.isfinite(loop.history.scalars["loss"]).all()


def test_examples_in_memory_are_searched_once(monkeypatch):
    """For a loss of step 9 that no example explains."""
    looks = []
    monkeypatch.setattr(labels, "not_finite", lambda dataset, step: looks.append(step))
    loop = make_loop()
    loop.train(8, total=12)  # the weights are not looked at before the end
    kernel = loop.step.model.trainable_variables[0]
    kernel.assign(np.full(kernel.shape, np.nan))
    with pytest.raises(DivergedError, match="try a lower learning rate"):
        loop.train(12)
    assert len(looks) == 1


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The loss of step 5 is finite, its gradient is not: only the next loss would tell."""

    class NanGradient(TrainStep):
        def backward(self, tape, loss, variables=None):
            bad = tf.where(tf.equal(self.global_step, 4), np.nan, 0.0)
            return [g + bad for g in super().backward(tape, loss, variables)]

    loop = make_loop(step_class=NanGradient, directory=tmp_path)
    with pytest.raises(DivergedError, match=r"kernel is not finite at step 5; .* try a lower"):
        loop.train(5)
    with pytest.raises(DivergedError, match="NaN or Inf"):
        loop.save(wait=True)
    loop.checkpoints.close()
    assert loop.checkpoints.all() == []


def test_a_constant_inf_is_saved(tmp_path):
    """A layer of the model adds a mask to its input."""

    class Masked(keras.layers.Layer):
        def build(self, shape):
            self.mask = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros")
            self.mask.assign(np.where(np.arange(shape[-1]), 0.0, -np.inf))

        def call(self, inputs):
            return keras.ops.where(self.mask < 0, 0.0, inputs)

    def masked():
        first, last = mlp().layers
        return keras.Sequential([keras.layers.Input(first.input.shape[1:]), first, Masked(), last])

    loop = make_loop(model=masked, directory=tmp_path)
    with loop.checkpoints as checkpoints:
        loop.train(2)
        loop.save(wait=True)
        loop.train(3)
        bias = loop.step.model.trainable_variables[-1]
        bias.assign(np.full(bias.shape, np.inf))
        with pytest.raises(DivergedError, match="NaN or Inf"):
            loop.save(wait=True)
        assert [saved.step for saved in checkpoints.all()] == [2]


def test_skipping_goes_on_and_counts(mirrored):
    """3 of 20 updates; the mean loss is that of the other 17."""
    strategy = mirrored(2)
    loop = make_loop(strategy, data=poisoned(3, 4, 12), on_nan="skip")
    scalars = loop.train(20)
    assert scalars["skipped_steps"] == int(loop.step.updater.skipped.numpy()) == 3
    assert 0.5 < scalars["loss"] < 5
    assert loop.global_step == 20 and int(loop.step.optimizer.iterations.numpy()) == 17
    assert all(np.isfinite(w).all() for w in loop.step.model.get_weights())
    assert_replicas_agree(strategy, loop.step.model.trainable_variables)


@pytest.mark.parametrize("options", [{"on_nan": "skip"}, {"loss_scale": True}], ids=str)
def test_skipping_without_end_stops(options):
    loop = make_loop(data=poisoned(*range(1, 21)), steps_per_loop=30, **options)
    with pytest.raises(DivergedError, match="the last 120 updates, up to step 120, were skipped"):
        loop.train(1000)
    assert loop.global_step == 120


def test_a_write_that_fails_in_the_background_stops_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(5, "Input/output error")

    def save(status):
        loop.save()
        futures.wait(loop.checkpoints._pending)  # the failure is there, nobody has looked

    wakes = []
    loop = make_loop(
        directory=tmp_path,
        actions=[Every(save, steps=5), lambda status: wakes.append(status.step)],
        steps_per_loop=1,
    )
    loop.train(4)
    monkeypatch.setattr(durable, "publish", full)
    with pytest.raises(CheckpointError, match="step 5.*Input/output error"):
        loop.train(20)
    assert wakes == [1, 2, 3, 4, 5] and loop.global_step == 6
    loop.checkpoints.close()


@pytest.mark.parametrize("replicas", [2, 4])
def test_batches_that_replicas_cannot_share(mirrored, replicas):
    data = InMemory(examples(100), global_batch_size=15)
    with pytest.raises(UsageError, match=f"15 is not divisible by {replicas} replicas"):
        make_loop(mirrored(replicas), data=data)


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_micro_batches_than_examples(mirrored, replicas):
    with pytest.raises(
        UsageError, match=f"=17, but a replica has {16 // replicas} examples: use {16 // replicas}"
    ):
        make_loop(mirrored(replicas), accumulate_steps=17)


@pytest.mark.parametrize("method", ["save", "restore"])
def test_without_checkpoints_or_evaluator(method):
    loop = make_loop()
    with pytest.raises(UsageError, match=r"no checkpoints: give Loop\(checkpoints"):
        getattr(loop, method)()
    with pytest.raises(UsageError, match=r"no evaluator: give Loop\(evaluator"):
        loop.evaluate()


def test_an_example_that_cannot_be_read_is_named():
    features, labels = examples(64)

    def example(number):
        if number == 41:
            raise OSError("no such picture")
        return features[number], labels[number]

    data = Streaming(Items(range(64), example), global_batch_size=BATCH)
    with pytest.raises(UsageError, match="the data are damaged: items, example 41: OSError"):
        make_loop(data=data).train(8)
