"""`TrainStep.seed` differs where it should, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import BATCH, examples, make_loop

from ctl import testing
from ctl.step import TrainStep


class Noisy(TrainStep):
    """Adds noise to the features, and the same noise on all replicas to the gradients."""

    def loss(self, batch):
        features, labels = batch
        noise = tf.random.stateless_normal(tf.shape(features), self.seed("features"))
        self.log("noise", noise)
        self.log("noise_max", noise, reduce="max")
        return super().loss((features + 0.1 * noise, labels))

    def clip(self, gradients):
        seed = self.seed("gradients", per_replica=False)
        noise = [tf.random.stateless_normal(g.shape, seed) for g in gradients]
        self.log("other", self.draw(self.seed(7)), reduce="max")
        self.log("same", self.draw(self.seed(7, per_replica=False)), reduce="max")
        self.log("least", -self.draw(self.seed(7, per_replica=False)), reduce="max")
        return [g + 1e-3 * n for g, n in zip(gradients, noise, strict=True)]

    def draw(self, seed):
        return tf.random.stateless_normal([], seed)


def make(strategy, **options):
    data = tf.data.Dataset.from_tensor_slices(examples(4 * BATCH)).batch(BATCH, True).repeat()
    return make_loop(strategy, step_class=Noisy, data=data, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "options"),
    [(1, {"jit_compile": True}), (2, {"accumulate_steps": 2})],
)
def test_noise_differs_between_steps_replicas_and_micro_batches(mirrored, replicas, options):
    loop = make(mirrored(replicas), **options)
    found = []
    for step in range(1, 4):
        scalars = loop.train(step, total=step)
        loop.scalars.reset()
        found += [scalars["noise"], scalars["other"]]
        assert scalars["same"] == -scalars["least"]  # equal on all replicas
    assert len(set(found)) == len(found)
    # If two parts had the same noise, the mean over N would have that of N / 2 numbers.
    assert np.abs([found[::2]]).max() < 4 / np.sqrt(BATCH * 12)


@pytest.mark.slow
def test_a_resume_and_a_second_run_draw_the_same():
    def made(strategy, checkpoints):
        return make(strategy, checkpoints=checkpoints, accumulate_steps=2)

    testing.check_resumed(made, 2, steps=5)


def test_the_run_and_the_salt_change_it(mirrored):
    def drawn(salt, **options):
        loop = make(mirrored(1), **options)
        return [int(n) for n in loop.step.seed(salt).numpy()]

    seeds = [drawn(0), drawn(1), drawn("a"), drawn("b"), drawn(0, random_seed=1)]
    assert len({tuple(seed) for seed in seeds}) == 5
    assert drawn("a") == seeds[2]


@pytest.mark.slow
def test_a_new_trace_draws_the_same(mirrored):
    """XLA's function of one trace is used again in the next."""
    loops = [make(mirrored(2), seed=1, jit_compile=True) for _ in range(2)]
    loops[0].train(4)
    loops[1].train(2, total=4)
    loops[1].step.bytes_per_pack = 64
    loops[1].train(4)
    for a, b in zip(*(loop.step.model.variables for loop in loops), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
