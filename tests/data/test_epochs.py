"""Epochs, counted in steps."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import make_loop

from ctl.data import Augmented, GlobalBatches, InMemory
from ctl.data.epochs import (
    completed,
    end_of,
    end_of_training,
    evaluation_interval,
    steps_per_epoch,
)
from ctl.errors import UsageError


def batches(count=7):
    return tf.data.Dataset.from_tensor_slices(np.zeros([20, 2, 2, 1], "uint8")).batch(count)


@pytest.mark.parametrize("steps", [1.0, 7, 60000 / 97, 100 / 3, 0.25])
def test_an_epoch_ends_once(steps):
    ends = [end_of(number, steps) for number in range(1, 40)]
    for step in range(1, ends[-1]):
        assert completed(step, steps) == sum(end <= step for end in ends)


def test_the_length_of_an_epoch():
    assert steps_per_epoch(InMemory(np.zeros([20, 2]), global_batch_size=8)) == 2.5
    assert steps_per_epoch(GlobalBatches(batches())) == 3
    static = batches().take(2)
    assert steps_per_epoch(Augmented(GlobalBatches(static, global_batch_size=7), "flip")) == 2
    for unknown in (batches().repeat(), batches().filter(lambda images: True)):
        assert steps_per_epoch(GlobalBatches(unknown)) is None


@pytest.mark.slow
def test_a_training_ends_after_its_epochs(tmp_path):
    loop = make_loop(evaluate=20, directory=tmp_path)  # 100 examples in batches of 16: 6.25 steps
    loop.train_and_evaluate(epochs=2)
    assert loop.global_step == 13 and [*loop.history.evaluations] == [7, 13]
    loop.checkpoints.close()
    again = make_loop(evaluate=20, directory=tmp_path)
    again.restore()
    again.train_and_evaluate(epochs=2.5, evaluate_every=15)
    assert again.global_step == 16 and [*again.history.evaluations] == [13, 15, 16]
    again.train(epochs=3)
    assert again.global_step == 19


def test_what_is_advised_for_data_without_a_length_works():
    """The loop repeats a dataset, so it is given without `repeat`."""
    some = batches().filter(lambda images: True)
    for unknown in (batches().repeat(), some):
        with pytest.raises(UsageError, match=r"without \.repeat\(\), since the loop repeats it, "):
            end_of_training(None, 2, GlobalBatches(unknown))
    told = some.apply(tf.data.experimental.assert_cardinality(3))
    for known in (batches(), told):
        data = GlobalBatches(known)
        assert end_of_training(None, 2, data) == 6
        assert len([*data.batches().take(6)]) == 6


def test_evaluations_stay_at_the_ends_of_epochs():
    """Of 156.25 steps, as 10,000 examples in batches of 64 have."""
    data = InMemory((np.zeros([625, 1]),), global_batch_size=4)
    for given, wanted in (("1ep", [157, 313, 469, 625]), ("0.5ep", [79, 157, 235, 313])):
        every = evaluation_interval(given, data)
        assert [end_of(n, every) for n in range(1, 5)] == wanted
    assert evaluation_interval(None, data) == evaluation_interval("1ep", data) == 156.25
    assert evaluation_interval("7", data) == 7 and evaluation_interval("0.001ep", data) == 1
    for wrong in ("1e", "", "2.5"):
        with pytest.raises(
            UsageError, match="^evaluate_every: .*(is not a duration|whole numbers)"
        ):
            evaluation_interval(wrong, data)


def test_what_is_refused():
    data = GlobalBatches(batches().repeat())
    for until, epochs, says in (
        (None, None, "^until must be a number of steps, not None; or give epochs="),
        (3, 2, "^until=3 and epochs=2 are both given"),
        (None, 0, "^epochs must be a number above 0, not 0"),
        (None, 2, r"^the length of an epoch of tf.data is unknown: give until=STEPS, .*repeat\(\)"),
    ):
        with pytest.raises(UsageError, match=says):
            end_of_training(until, epochs, data)
    with pytest.raises(UsageError, match="is unknown: give evaluate_every=STEPS, or data of a kn"):
        evaluation_interval(None, data)
