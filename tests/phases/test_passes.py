"""Two passes in one step, as in SAM; a pass may leave no trace."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    BATCH,
    assert_replicas_agree,
    examples,
    largest_difference,
    make_loop,
    network,
    precision,
    sgd,
)
from keras import layers
from sam import SharpnessOfEach, sam_loop, trained_plainly

from ctl.errors import UsageError
from ctl.phases import passes
from ctl.step import TrainStep

STEPS = 10
plainly = functools.cache(trained_plainly)
CUT, COMPILED = {"accumulate_steps": 2}, {"jit_compile": True}


@pytest.mark.slow
@pytest.mark.compiled_update
def test_two_passes_may_be_accumulated_and_compiled(mirrored):
    loop = sam_loop(mirrored(2), **CUT, **COMPILED)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plainly(STEPS)) <= 1e-6
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


@pytest.mark.slow
def test_sam_where_examples_are_counted(mirrored):
    """Of one example, the second replica has none."""
    sizes = (1, 16, 5)
    loop = sam_loop(mirrored(2), sizes=sizes, static=False)
    loop.train(STEPS)
    assert largest_difference(loop.step.model.get_weights(), plainly(STEPS, sizes)) <= 1e-6


@pytest.mark.slow
def test_each_replica_may_move_along_its_own_gradient(mirrored):
    replicas = 2
    loop = sam_loop(mirrored(replicas), kind=SharpnessOfEach)
    loop.train(STEPS)
    plain = plainly(STEPS, parts=replicas)
    assert largest_difference(loop.step.model.get_weights(), plain) <= 1e-6
    assert largest_difference(plain, plainly(STEPS)) > 1e-4
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "options"), [(1, COMPILED), (2, CUT)])
def test_the_weights_return_bit_for_bit(mirrored, replicas, options):
    loop = sam_loop(mirrored(replicas), kind=SharpnessOfEach, rate=0.0, **options)
    before = [w.tobytes() for w in loop.step.model.get_weights()]
    loop.train(STEPS)
    assert before == [w.tobytes() for w in loop.step.model.get_weights()]
    assert_replicas_agree(loop.strategy, loop.step.model.variables)


class Own(TrainStep):
    """With metrics, scalars, variables and a seed of its own, which a pass changes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.spread = keras.metrics.Mean(name="spread")
        self.passes = tf.Variable(0, trainable=False)
        self.total = self.variable("total", [], per_replica=True)
        self.draws = keras.random.SeedGenerator(3)

    def loss(self, batch):
        losses, logits = super().loss(batch)
        noise = keras.random.normal(tf.shape(losses), seed=self.draws)
        self.spread.update_state(tf.math.reduce_std(losses))
        self.passes.assign_add(1)
        self.total.assign_add(tf.reduce_sum(losses))
        self.log("largest", losses, reduce="max")
        self.log("all", losses, reduce="sum")
        return losses * (1.0 + 0.01 * noise), logits


class Twice(Own):
    def forward_backward(self, batch, count):
        with passes.state_kept(self):
            super().forward_backward(batch, count)
        return super().forward_backward(batch, count)


def with_state() -> keras.Model:
    return network(layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dropout(0.5))


@pytest.mark.slow
def test_a_pass_that_is_undone_leaves_no_trace(mirrored):
    """Statistics, metrics, seeds, the step's own variable: all bits are those of one pass."""
    bits, scalars = [], []
    for kind in (Own, Twice):
        options = {"step_class": kind, "seed": 1, **CUT, **COMPILED}
        loop = make_loop(mirrored(2), model=with_state, **options)
        found = loop.train(STEPS)
        scalars.append({name: value for name, value in found.items() if "_per_" not in name})
        state = [v for group in loop.step.state().values() for v in group]
        state += [v.value for m in (*loop.step.metrics, loop.step.spread) for v in m.variables]
        state.append(loop.step.total)
        copies = [c for v in state for c in loop.strategy.experimental_local_results(v)]
        bits.append([copy.numpy().tobytes() for copy in copies])
    assert bits[0] == bits[1] and scalars[0] == scalars[1]
    assert loop.step.passes.numpy() == STEPS * CUT["accumulate_steps"]


class TwoLosses(TrainStep):
    """Passes differ by a Python value. The sum of both losses is the first of them times 0.5."""

    factor = 1.0

    def loss(self, batch):
        losses, logits = super().loss(batch)
        return self.factor * losses, logits

    def forward_backward(self, batch, count):
        found = []
        for factor in (1.0, -0.5):
            self.factor = factor
            found.append(super().forward_backward(batch, count))
        (loss, gradients), (other, others) = found
        return loss + other, [a + b for a, b in zip(gradients, others, strict=True)]


def pooled() -> keras.Model:
    return network(layers.Reshape([4, 3]), layers.MaxPooling1D(2), layers.Flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        pytest.param(2, COMPILED, marks=pytest.mark.compiled_update, id="two"),
        pytest.param(1, COMPILED | CUT, id="cut"),
        pytest.param(1, {"model": pooled} | CUT, id="pooled"),
    ],
)
def test_two_passes_may_have_two_losses(mirrored, replicas, options):
    class Half(TrainStep):
        def loss(self, batch):
            losses, logits = super().loss(batch)
            return 0.5 * losses, logits

    data = tf.data.Dataset.from_tensors(examples(BATCH)).repeat()
    given = {"data": data, "optimizer": sgd(0.5), "seed": 1}
    plain = {k: v for k, v in options.items() if k == "model"}
    loops = [
        make_loop(mirrored(replicas), step_class=TwoLosses, **given, **options),
        make_loop(mirrored(1), step_class=Half, **given, **plain),
    ]
    losses = [loop.train(3)["loss"] for loop in loops]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    weights = [loop.step.model.get_weights() for loop in loops]
    assert largest_difference(*weights) <= 1e-6


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_update(mirrored):
    """The loss scale of float16 is too large at first."""
    with precision("mixed_float16"):
        loop = sam_loop(mirrored(2), loss_scale=True)
    loop.step.updater.loss_scale.scale.assign(2.0**60)
    before = loop.step.model.get_weights()
    assert loop.train(1)["skipped_steps"] == 1
    assert largest_difference(before, loop.step.model.get_weights()) == 0.0
    loop.step.updater.loss_scale.scale.assign(1024.0)
    loop.train(2)
    after = loop.step.model.get_weights()
    assert largest_difference(before, after) > 1e-3 and all(np.isfinite(w).all() for w in after)


@pytest.mark.slow
def test_reduced_gradients_are_those_of_the_mean_loss(mirrored):
    """Whatever the loss scale and the number of examples."""

    class Noting(TrainStep):
        def forward_backward(self, batch, count):
            loss, gradients = super().forward_backward(batch, count)
            total = passes.reduced(self, gradients, count)
            self.norm.update_state(tf.linalg.global_norm(total))
            return loss, gradients

        def clip(self, gradients):
            self.reduced.update_state(tf.linalg.global_norm(gradients))
            return gradients

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.norm = keras.metrics.Mean(name="norm")
            self.reduced = keras.metrics.Mean(name="reduced")

    for static, scaled in ((True, False), (False, True)):
        loop = sam_loop(
            mirrored(2),
            kind=Noting,
            sizes=(9, 4) if not static else (BATCH,),
            static=static,
            loss_scale=scaled,
        )
        scalars = loop.train(2)
        assert scalars["norm"] == pytest.approx(scalars["reduced"], rel=1e-5)


def test_what_cannot_be():
    class Short(TrainStep):
        def forward_backward(self, batch, count):
            with passes.perturbed(self, [None]):
                return super().forward_backward(batch, count)

    with pytest.raises(UsageError, match=r"^perturbed\(\) was given 1 moves for 4 .*is none$"):
        make_loop(step_class=Short).train(1)
    with pytest.raises(UsageError, match=r"^replicas that share one copy .*: use mirrored$"):
        central = tf.distribute.experimental.CentralStorageStrategy(["/cpu:0", "/cpu:1"])
        sam_loop(central).train(1)
