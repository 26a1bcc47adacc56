"""Losses that compare the examples of all replicas: N replicas equal one."""

from __future__ import annotations

import pytest
import tensorflow as tf
from contrastive import Contrastive, contrastive, plain_tensorflow, views
from helpers import assert_replicas_agree, batches_of, largest_difference, precision

import ctl
from ctl.errors import UsageError
from ctl.jobs import trials
from ctl.reduce import all_gather, first_row

STEPS = 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_n_replicas_equal_plain_tensorflow(mirrored, replicas):
    batches = views([16] * STEPS)
    loop = contrastive(mirrored(replicas), batches, static=True)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plain_tensorflow(batches)) <= 1e-6
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


def test_on_the_default_strategy_and_with_tensorflows_collectives(ring2):
    batches = views([16, 16])
    for strategy, static in ((tf.distribute.get_strategy(), True), (ring2, True), (ring2, False)):
        loop = contrastive(strategy, batches, static)
        loop.train(2)
        assert largest_difference(loop.step.model.get_weights(), plain_tensorflow(batches)) <= 1e-6


def test_unequal_and_empty_parts(mirrored):
    """9 examples over 4 replicas are 3, 3, 3 and 0; the zeros that stand in are no negatives, and
    each replica divides its loss by a number of its own."""
    batches = views([9, 13, 5, 9])
    loop = contrastive(mirrored(4), batches)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plain_tensorflow(batches)) <= 1e-6


def test_with_a_loss_scale(mirrored):
    """In float16, in which a step divides by a power of two that is another on each replica: four
    replicas are about as far from float32 as one is."""
    batches = views([9, 13, 5, 9] * 4)
    wide = contrastive(mirrored(1), batches)
    wide.train(10)
    errors = []
    for replicas in (1, 4):
        with precision("mixed_float16"):
            loop = contrastive(mirrored(replicas), batches, loss_scale=True)
        loop.step.updater.loss_scale.scale.assign(1024.0)  # else some of them skip an update
        loop.train(10)
        weights = loop.step.model.get_weights(), wide.step.model.get_weights()
        errors.append(largest_difference(*weights))
    assert errors[1] <= 2 * errors[0]


def test_the_rows_are_in_the_order_of_the_replicas(mirrored):
    strategy = mirrored(4)

    @tf.function(input_signature=[tf.TensorSpec([4], tf.int32)])
    def run(sizes):
        def one():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            part = tf.fill([sizes[replica], 1], replica)
            return all_gather(part), first_row(part)

        return strategy.run(one)

    rows, firsts = run(tf.constant([2, 0, 3, 1]))
    for value in strategy.experimental_local_results(rows):
        assert value.numpy().ravel().tolist() == [0, 0, 2, 2, 2, 3]
    assert [int(f) for f in strategy.experimental_local_results(firsts)] == [0, 2, 2, 5]


def test_an_evaluation_gathers_too(mirrored):
    """The last of its batches has no example for one replica."""

    class Evaluation(ctl.EvalStep):
        loss = Contrastive.loss

    values = []
    for replicas in (1, 4):
        strategy = mirrored(replicas)
        batches = views([16, 9])
        loop = contrastive(strategy, batches)

        with strategy.scope():
            evaluation = Evaluation(loop.step.model)
        evaluator = ctl.Evaluator(evaluation, batches_of(batches), strategy=strategy)
        values.append(evaluator.run()["loss"])
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"jit_compile": True}])
def test_in_a_loop_or_under_xla(mirrored, options):
    batches = views([16, 16])
    contrastive(mirrored(1), batches, static=True, **options).train(1)
    loop = contrastive(mirrored(2), batches, static=True, **options)
    with pytest.raises(UsageError, match=r"^a loss with ctl\.reduce\.all_gather on several .*out$"):
        loop.train(1)


def test_the_trial_of_xla_leaves_it_off(mirrored):
    loop = contrastive(mirrored(2), views([16] * 200), static=True)
    assert trials.tune_jit_compile(loop) is False
    loop.train(1)


@pytest.mark.parametrize("fixed", [None, 3])
def test_parts_of_varying_sizes_by_tensorflows_collectives(ring2, fixed):
    """In a call, a collective of TensorFlow keeps the shape of its first run."""
    batches = views([9, 13, 5, 9, 13, 5])
    loop = contrastive(ring2, batches, steps_per_loop=fixed)
    loop.train(6)
    assert largest_difference(loop.step.model.get_weights(), plain_tensorflow(batches)) <= 1e-6
