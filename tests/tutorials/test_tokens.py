"""Tutorials about text: a recurrent network, a Transformer with masks, embeddings of words.

The gradient of an Embedding is sparse. If a word occurs twice in a batch, Keras's Adam squares both
rows and adds the squares, where ctl squares their sum, the gradient. So the loops of the tutorials
get dense gradients here.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from twins import Twins, batches, eagerly

import ctl

STEPS, BATCH, WORDS, LENGTH = 3, 4, 11, 4


def ids(seed: int, *shape: int) -> np.ndarray:
    """Words, from 1 on."""
    return np.random.default_rng(seed).integers(1, WORDS, shape)


# https://www.tensorflow.org/text/tutorials/text_generation ---------------------------------------


class TextModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(WORDS, 4)
        self.gru = layers.GRU(5, return_sequences=True, return_state=True)
        self.dense = layers.Dense(WORDS)

    def call(self, inputs, states=None, return_state=False, training=False):
        x = self.embedding(inputs, training=training)
        x, states = self.gru(x, initial_state=states, training=training)
        x = self.dense(x, training=training)
        return (x, states) if return_state else x


def make_text_model() -> keras.Model:
    model = TextModel()
    model(np.zeros([1, LENGTH], "int64"))
    return model


def tutorial_text_generation(model, dataset) -> list[float]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()

    @tf.function
    def train_step(inputs):
        inputs, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(inputs, training=True)
            loss_value = loss(labels, predictions)
        grads = tape.gradient(loss_value, model.trainable_variables)
        grads = [tf.convert_to_tensor(g) for g in grads]
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return {"loss": loss_value}

    epochs, mean = [], keras.metrics.Mean()
    for _ in range(2):
        mean.reset_state()
        for inputs in dataset:
            mean.update_state(train_step(inputs)["loss"])
        epochs.append(float(mean.result()))
    return epochs


def port_text_generation(model, dataset, strategy) -> dict[str, float]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        step = ctl.TrainStep(model, "adam", loss)
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=2)


@pytest.mark.slow
def test_text_generation(mirrored):
    text = ids(0, STEPS * BATCH, LENGTH + 1)
    data = batches(BATCH, text[:, :-1], text[:, 1:])
    twins = Twins(mirrored(2), make_text_model)
    with eagerly():
        losses = tutorial_text_generation(twins.theirs, data)
    scalars = port_text_generation(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(losses[-1], rel=1e-6)


# https://www.tensorflow.org/text/tutorials/transformer -------------------------------------------


def make_transformer() -> keras.Model:
    """A decoder of one layer, without Dropout and without an encoder."""
    words = keras.Input([LENGTH], dtype="int64")
    x = layers.Embedding(WORDS, 8)(words)
    # The gradient of a bias of the keys would be 0, of which Adam magnifies the rounding.
    attended = layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="relu")(x)))
    return keras.Model(words, layers.Dense(WORDS)(x))


class CustomSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, d_model, warmup_steps=4):
        super().__init__()
        self.d_model, self.warmup_steps = d_model, warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        arg1 = tf.math.rsqrt(step)
        arg2 = step * self.warmup_steps**-1.5
        return tf.math.rsqrt(float(self.d_model)) * tf.math.minimum(arg1, arg2)


def adam() -> keras.Optimizer:
    return keras.optimizers.Adam(CustomSchedule(8), beta_1=0.9, beta_2=0.98, epsilon=1e-9)


def tutorial_transformer(model, dataset) -> list[list[float]]:
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    optimizer = adam()

    def masked_loss(label, pred):
        mask = label != 0
        loss = loss_object(label, pred)
        mask = tf.cast(mask, dtype=loss.dtype)
        loss *= mask
        return tf.reduce_sum(loss) / tf.reduce_sum(mask)

    def masked_accuracy(label, pred):
        pred = tf.cast(tf.argmax(pred, axis=2), label.dtype)
        mask = label != 0
        match = tf.cast((label == pred) & mask, dtype=tf.float32)
        return tf.reduce_sum(match) / tf.reduce_sum(tf.cast(mask, dtype=tf.float32))

    @tf.function
    def train_step(inputs, labels):
        with tf.GradientTape() as tape:
            predictions = model(inputs, training=True)
            loss = masked_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, masked_accuracy(labels, predictions)

    return [[float(value) for value in train_step(*batch)] for batch in dataset]


class Transformer(ctl.TrainStep):
    counts = "tokens"

    def count(self, batch):
        return tf.math.count_nonzero(batch[1], dtype=tf.float32)

    def loss(self, batch):
        inputs, labels = batch
        logits = self.model(inputs, training=True)
        mask = labels != 0
        right = tf.cast(tf.argmax(logits, axis=2) == labels, tf.float32)
        self.log("accuracy", tf.boolean_mask(right, mask))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_sum(losses * tf.cast(mask, tf.float32), axis=1)


def port_transformer(model, dataset, strategy) -> ctl.Loop:
    with strategy.scope():
        step = Transformer(model, adam())
    return ctl.Loop(step, dataset, strategy=strategy, steps_per_loop=1)


@pytest.mark.slow
def test_transformer(mirrored):
    """Texts of unequal lengths, so that replicas have unequal numbers of words."""
    text = ids(0, STEPS * BATCH, LENGTH + 1)
    lengths = np.random.default_rng(1).integers(1, LENGTH + 2, [len(text), 1])
    text *= np.arange(LENGTH + 1) <= lengths
    data = batches(BATCH, text[:, :-1], text[:, 1:])
    twins = Twins(mirrored(2), make_transformer)
    with eagerly():
        wanted = tutorial_transformer(twins.theirs, data)
    loop = port_transformer(twins.ours, data, mirrored(2))
    last = loop.train(epochs=1)
    twins.assert_equal(1e-5)
    assert loop.history.scalars["loss"] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
    words = np.count_nonzero(text[:, 1:].reshape([STEPS, -1]), axis=1)
    accuracy = np.average([accuracy for _, accuracy in wanted], weights=words)
    assert last["accuracy"] == pytest.approx(accuracy, rel=1e-6)


# https://www.tensorflow.org/text/tutorials/word2vec ----------------------------------------------

NEGATIVE = 1


class Word2Vec(keras.Model):
    def __init__(self):
        super().__init__()
        self.target_embedding = layers.Embedding(WORDS, 5, name="w2v_embedding")
        self.context_embedding = layers.Embedding(WORDS, 5)

    def call(self, pair):
        target, context = pair
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        word_emb = self.target_embedding(target)
        context_emb = self.context_embedding(context)
        return tf.einsum("be,bce->bc", word_emb, context_emb)


def make_word2vec() -> keras.Model:
    model = Word2Vec()
    model((np.zeros([1, 1], "int64"), np.zeros([1, NEGATIVE + 1], "int64")))
    return model


def tutorial_word2vec(word2vec, dataset) -> list[float]:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    word2vec.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return word2vec.fit(dataset, epochs=2, verbose=0).history["loss"]


def port_word2vec(word2vec, dataset, strategy) -> dict[str, float]:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        step = ctl.TrainStep(word2vec, "adam", loss, metrics=["accuracy"])
    return ctl.Loop(step, dataset, strategy=strategy).train(epochs=2)


@pytest.mark.slow
def test_word2vec(mirrored):
    """A batch is a pair, of which one part is a pair: ``((target, context), label)``. No word
    occurs twice in a batch."""
    random = np.random.default_rng(0)
    targets, contexts = (
        np.concatenate(
            [random.permutation(WORDS)[: BATCH * n].reshape([-1, n]) for _ in range(STEPS)]
        )
        for n in (1, NEGATIVE + 1)
    )
    labels = np.tile([1] + NEGATIVE * [0], [STEPS * BATCH, 1])
    data = batches(BATCH, (targets, contexts), labels)
    twins = Twins(mirrored(2), make_word2vec)
    losses = tutorial_word2vec(twins.theirs, data)
    scalars = port_word2vec(twins.ours, data, mirrored(2))
    twins.assert_equal()
    assert scalars["loss"] == pytest.approx(losses[-1], rel=1e-6)
