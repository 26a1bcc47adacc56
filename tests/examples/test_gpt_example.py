"""The GPT is trained as a plain loop of TensorFlow trains it, and no place sees a later one."""

from __future__ import annotations

import string

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.examples import gpt
from ctl.testing import check_reference

pytestmark = pytest.mark.slow


def plain_tensorflow(model: keras.Model, batches: list) -> None:
    """AdamW with a rate that grows, on the mean of all places, with a gradient that is clipped."""
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    variables = model.trainable_variables
    for step, (tokens, targets) in enumerate(batches):
        optimizer.learning_rate = 3e-3 * (step + 1) / 51
        with tf.GradientTape() as tape:
            logits = model(tf.cast(tokens, tf.int32), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.cast(targets, tf.int32), logits
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, [v.value for v in variables])
        gradients, norm = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], 1.0)
        assert norm > 1.0
        optimizer.apply(gradients, variables)


def test_it_equals_plain_tensorflow():
    check_reference(lambda *_: gpt.make_loop(), plain_tensorflow)


def test_the_targets_are_the_bytes_one_place_later():
    tokens, targets = gpt.make_loop().dataset.arrays
    assert tokens.shape == targets.shape == (len(tokens), gpt.CONTEXT)
    assert (tokens[:, 1:] == targets[:, :-1]).all()


def test_a_place_sees_no_later_one():
    model, random = gpt.make_model(), np.random.default_rng(0)
    row = random.integers(1, 256, [1, gpt.CONTEXT])
    other = row.copy()
    other[0, 20:] = random.integers(1, 256, gpt.CONTEXT - 20)
    logits, others = (model(tokens).numpy() for tokens in (row, other))
    np.testing.assert_allclose(logits[0, :20], others[0, :20], atol=1e-5)
    assert np.abs(logits[0, 20:] - others[0, 20:]).min(axis=1).max() > 0


def test_it_writes_what_the_model_expects():
    """A model that is sure of the next letter, wherever the last one stands."""

    def sure(row):
        return tf.one_hot((tf.constant(row) - 65 + 1) % 26 + 65, 256) * 1000.0

    letters = string.ascii_uppercase * 3
    assert gpt.write(sure, "A", len(letters) - 1) == letters


def test_the_program_runs(monkeypatch, capsys):
    monkeypatch.setattr(gpt, "STEPS", 60)
    monkeypatch.setattr(gpt, "write", lambda model, text, length: f"{text}…")
    gpt.main()
    assert capsys.readouterr().out.endswith("\ndef …\n")
