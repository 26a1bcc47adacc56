"""The language model: bytes, the mean over valid tokens, and what a position sees."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import largest_difference
from references import assert_trains_as, descend

import ctl
from ctl.data.text import PAD, Buckets, pack, pad, windows
from ctl.recipes import gpt

CONTEXT, BATCH, STEPS = 6, 8, 4
TEXTS = [bytes(range(65, 65 + n)) for n in (40, 3, 6, 1, 0, 29, 60, 2, 2, 2, 2, 23)]


def model() -> keras.Model:
    """Small, since the step does not look into the model."""
    tokens = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(256, 8)(tokens)
    return keras.Model(tokens, keras.layers.Dense(256, "tanh")(x))


def batches() -> tf.data.Dataset:
    """Windows in order, so that replicas have unequal numbers of valid tokens."""
    rows = windows(TEXTS, CONTEXT)[: STEPS * BATCH]
    assert len(rows) == STEPS * BATCH
    return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH, drop_remainder=True)


def make(strategy, checkpoints=None, **options) -> ctl.Loop:
    with strategy.scope():
        step = gpt.LanguageModel(model(), keras.optimizers.SGD(0.5), **options)
    return ctl.Loop(step, batches(), strategy=strategy, checkpoints=checkpoints)


def token_losses(trained: keras.Model, rows: tf.Tensor) -> tf.Tensor:
    """The loss of each valid token of a batch, float32 [tokens]."""
    targets = rows[:, 1:].numpy()
    valid = [(row, at, targets[row, at]) for row, at in zip(*targets.nonzero(), strict=True)]
    return -tf.gather_nd(tf.nn.log_softmax(trained(rows[:, :-1])), valid)


def plain_tensorflow(trained: keras.Model) -> float:
    """Trains on one device. Returns the mean over the tokens of all steps."""
    seen = []

    def mean_loss(rows: tf.Tensor) -> tf.Tensor:
        losses = token_losses(trained, rows)
        seen.extend(losses.numpy())
        return tf.reduce_mean(losses)

    descend(trained, keras.optimizers.SGD(0.5), mean_loss, ((rows,) for rows in batches()))
    return float(np.mean(seen))


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_equal_plain_tensorflow(mirrored, replicas, options):
    loop = make(mirrored(replicas), **options)
    scalars, loss = assert_trains_as(loop, model(), plain_tensorflow, steps=STEPS, tolerance=1e-6)
    assert scalars["loss"] == pytest.approx(loss, rel=1e-5)
    assert scalars["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)


def test_an_evaluation_counts_tokens():
    trained = model()
    loss = np.mean(np.concatenate([token_losses(trained, rows) for rows in batches()]))
    results = ctl.Evaluator(gpt.Evaluation(trained), batches()).run()
    assert results["loss"] == pytest.approx(loss, rel=1e-5)
    assert results["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)


def test_a_position_sees_only_those_before():
    tokens = np.arange(CONTEXT)[np.newaxis] + 65
    other = tokens.copy()
    other[0, 3] += 1
    trained = gpt.gpt(CONTEXT, 32, 1)
    same = np.all(trained(tokens).numpy() == trained(other).numpy(), axis=-1)[0]
    assert same.tolist() == [True] * 3 + [False] * 3


def small_gpt() -> keras.Model:
    return gpt.gpt(CONTEXT, 32, 1)


def one_step(strategy, rows: np.ndarray, weights, **options) -> tuple[list[np.ndarray], dict]:
    """The gradients of all rows in one batch, and the scalars."""
    with strategy.scope():
        trained = small_gpt()
        trained.set_weights(weights)
        step = gpt.LanguageModel(trained, keras.optimizers.SGD(1.0), **options)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(len(rows))
    scalars = ctl.Loop(step, data, strategy=strategy).train(1)
    return [a - b for a, b in zip(weights, trained.get_weights(), strict=True)], scalars


@pytest.mark.slow
def test_packed_rows_equal_single_texts(mirrored):
    """On replicas with unequal numbers of rows and tokens, and with micro-batches."""
    texts = TEXTS[1:]  # in an odd number of rows
    packed, padded = pack(texts, CONTEXT), pad(texts, CONTEXT)
    assert len(packed) < len(padded) and len(packed) % 2
    weights = small_gpt().get_weights()
    expected, scalars = one_step(mirrored(1), padded, weights)
    assert max(np.abs(gradient).max() for gradient in expected) > 0.1
    found, logged = one_step(mirrored(2), packed, weights, accumulate_steps=2)
    assert largest_difference(found, expected) <= 1e-6
    assert logged["loss"] == pytest.approx(scalars["loss"], rel=1e-6)
    assert logged["perplexity"] == pytest.approx(scalars["perplexity"], rel=1e-5)


def test_a_text_sees_no_other_text():
    trained = small_gpt()
    row = np.array([[PAD, 65, 66, PAD, 67, 68]])
    other = np.array([[PAD, 90, 91, PAD, 67, 68]])
    alone = np.array([[PAD, 67, 68, PAD, PAD, PAD]])
    packed = trained(row).numpy()[0, 3:]
    np.testing.assert_array_equal(packed, trained(other).numpy()[0, 3:])
    np.testing.assert_allclose(packed, trained(alone).numpy()[0, :3], atol=1e-6)


@pytest.mark.slow
def test_batches_of_several_lengths(mirrored):
    """An evaluation equals that of padded rows; in a training, replicas and XLA equal one."""
    texts = [bytes(range(65, 65 + n % 3 + 1)) for n in range(60)] * 2
    trained = model()
    by_length = Buckets(texts, CONTEXT, global_batch_size=BATCH, training=False)
    padded = pad(texts, CONTEXT)
    wanted = ctl.Evaluator(
        gpt.Evaluation(trained), tf.data.Dataset.from_tensor_slices(padded).batch(BATCH)
    ).run()
    found = ctl.Evaluator(gpt.Evaluation(trained), by_length).run()
    assert found == pytest.approx(wanted, rel=1e-5)

    weights = []
    for replicas, options in ((1, {}), (2, {}), (1, {"jit_compile": True})):
        keras.utils.set_random_seed(0)
        with mirrored(replicas).scope():
            step = gpt.LanguageModel(model(), keras.optimizers.SGD(0.5), **options)
        data = Buckets(texts, CONTEXT, global_batch_size=BATCH)
        ctl.Loop(step, data, strategy=mirrored(replicas)).train(6)
        weights.append(step.model.get_weights())
    for others in weights[1:]:
        assert largest_difference(others, weights[0]) <= 1e-6
